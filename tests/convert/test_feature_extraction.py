from __future__ import annotations

import dataclasses
import json
import types

import numpy as np
import onnx
import pytest
from assets import minilm_folder
from tokenizers import Tokenizer, models

from edge_convert.convert.fp16 import emulated, prepared, value_types
from edge_convert.convert.graph_tools import cpu_session
from edge_convert.convert.recipe import Request
from edge_convert.convert.recipes.feature_extraction import RECIPE, read_layout
from edge_convert.convert.source import open_source
from edge_convert.runtime.device import load_profile
from edge_convert.runtime.errors import ExportError, SourceError, UnsupportedModelError
from edge_convert.wrappers.embed import EmbedSettings, TextEmbedder

TEXTS = (
    "", "a", "|", "hello", "Turn left at the crossing.", "Battery low, returning home.", "¿Dónde está?", "你好世界",
    "🙂", "The drone lost its GPS fix and is descending slowly over the field behind the barn.",
    "Stop! A person is standing in front of the robot.", "x" * 400, "one two three " * 400,
)  # fmt: skip


def write(folder, name, value):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), "utf-8")


def sentence_folder(folder, pooling, *extra):
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    modules += [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    modules += [{"type": f"sentence_transformers.models.{name}", "path": f"2_{name}"} for name in extra]
    write(folder, "modules.json", modules)
    write(folder, "1_Pooling/config.json", pooling)
    return folder


@pytest.mark.parametrize(
    ("pooling", "wanted"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_max_tokens": True, "word_embedding_dimension": 8}, "max"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_pooling_is_what_the_config_asks(tmp_path, pooling, wanted):
    assert read_layout(sentence_folder(tmp_path, pooling), {}).pooling == wanted


@pytest.mark.parametrize(
    "pooling", [{"pooling_mode_mean_sqrt_len_tokens": True}, {}, {"pooling_mode": ["cls", "mean"]}]
)
def test_other_poolings_are_refused(tmp_path, pooling):
    with pytest.raises(UnsupportedModelError, match="pooling"):
        read_layout(sentence_folder(tmp_path, pooling), {})


def test_normalise_only_if_the_modules_have_it(tmp_path):
    pooling = {"pooling_mode_mean_tokens": True}
    assert not read_layout(sentence_folder(tmp_path, pooling), {}).normalise
    assert read_layout(sentence_folder(tmp_path, pooling, "Normalize"), {}).normalise


def test_an_unknown_module_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="Dense"):
        read_layout(sentence_folder(tmp_path, {"pooling_mode_mean_tokens": True}, "Dense"), {})


def test_a_missing_pooling_config_is_named(tmp_path):
    sentence_folder(tmp_path, {})
    (tmp_path / "1_Pooling/config.json").unlink()
    with pytest.raises(SourceError, match="1_Pooling"):
        read_layout(tmp_path, {})


@pytest.mark.parametrize(
    ("sentence", "tokenizer", "config", "wanted"),
    [
        (256, 512, {"max_position_embeddings": 512}, 256),
        (None, 384, {"max_position_embeddings": 512}, 384),
        (1024, None, {"max_position_embeddings": 512}, 512),
        (None, int(1e30), {"max_position_embeddings": 512}, 512),
        (None, None, {"max_position_embeddings": 514, "model_type": "roberta", "pad_token_id": 1}, 512),
    ],
)
def test_max_length(tmp_path, sentence, tokenizer, config, wanted):
    if sentence:
        write(tmp_path, "sentence_bert_config.json", {"max_seq_length": sentence})
    if tokenizer:
        write(tmp_path, "tokenizer_config.json", {"model_max_length": tokenizer})
    assert read_layout(tmp_path, config).max_length == wanted


def bert(folder, *, drop="", add=(), **config):
    """A random BERT of two layers, without the tensors that contain `drop`, its config changed after saving."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import BertConfig, BertModel

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    BertModel(BertConfig(**sizes, num_hidden_layers=2, max_position_embeddings=32)).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if not drop or drop not in name}
    kept |= {name: torch.ones(16) for name in add}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    write(folder, "config.json", json.loads((folder / "config.json").read_text("utf-8")) | config)
    vocabulary = {token: index for index, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello"])}
    Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    return Request(open_source(str(folder)), load_profile("cpu"), "fp32", None, None, lambda _: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": "layer.1.output"}, r"tiny lacks 4 tensors .*encoder\.layer\.1\.output"),
        ({"num_hidden_layers": 3}, r"lacks 16 tensors .*layer\.2"),
        ({"num_hidden_layers": 1}, r"16 tensors that its config leaves out .*layer\.1"),
        ({"intermediate_size": 8}, "of another shape"),
        ({"num_attention_heads": 0}, "cannot be loaded by transformers"),
    ],
)
def test_weights_that_are_not_the_configs(tmp_path, change, message):
    request = bert(tmp_path / "tiny", **change)
    for stage in (lambda: RECIPE.export(request, tmp_path), lambda: RECIPE.reference(request)):
        with pytest.raises(SourceError, match=message):
            stage()


def test_an_encoder_without_pooler_and_with_a_head_of_its_training(tmp_path):
    request = bert(tmp_path / "tiny", drop="pooler", add=["cls.predictions.bias", "embeddings.position_ids"])
    assert RECIPE.reference(request).embed(["hello"]).shape == (1, 16)
    assert RECIPE.package(request, tmp_path)["dimension"] == 16


@pytest.mark.parametrize(
    ("raised", "expected"), [(KeyboardInterrupt(), KeyboardInterrupt), (ValueError("odd"), ExportError)]
)
def test_what_the_exporter_raises(tmp_path, monkeypatch, raised, expected):
    import torch

    def fail(*_, **__):
        raise torch.onnx.OnnxExporterError("") from raised

    request = bert(tmp_path / "tiny")
    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(expected):
        RECIPE.export(request, tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("modules.json", {"a": 1}, "not a list of modules"),
        ("modules.json", [5], "not a list of modules"),
        ("sentence_bert_config.json", [5], "not a JSON object"),
        ("sentence_bert_config.json", {"max_seq_length": "long"}, "a number is needed"),
    ],
)
def test_side_files_with_other_types(tmp_path, name, value, message):
    write(tmp_path, name, value)
    with pytest.raises(SourceError, match=message):
        read_layout(tmp_path, {})


def test_a_side_file_that_is_nested_too_deeply(tmp_path):
    (tmp_path / "modules.json").write_text("[" * 200_000)
    with pytest.raises(SourceError, match="nested too deeply"):
        read_layout(tmp_path, {})


class Runner:
    """What TextEmbedder needs of a Session."""

    def __init__(self, path):
        self.session = cpu_session(path)

    def run(self, feed):
        return {"embedding": self.session.run(["embedding"], feed)[0]}


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Graphs by precision, the wrapper's settings, the tokenizer file and the original."""
    folder = tmp_path_factory.mktemp("minilm")
    source = open_source(str(minilm_folder()))
    request = Request(source, load_profile("cpu"), "fp32", None, None, lambda _: None)
    graphs = RECIPE.export(request, folder)
    paths = {"fp32": graphs["encoder"].path}
    for precision in ("fp16", "int8"):
        (folder / precision).mkdir()
        asked = dataclasses.replace(request, precision=precision)
        paths[precision] = RECIPE.quantise(asked, graphs, folder / precision)["encoder"].path
    settings = EmbedSettings.from_processing(RECIPE.package(request, folder))
    reference = RECIPE.reference(request)
    return types.SimpleNamespace(
        paths=paths, settings=settings, folder=folder, reference=reference, wanted=reference.embed(TEXTS)
    )


def embedder(converted, precision):
    tokenizer = Tokenizer.from_file(str(converted.folder / "tokenizer.json"))
    return TextEmbedder(Runner(converted.paths[precision]), tokenizer, converted.settings)


@pytest.mark.real
@pytest.mark.parametrize(
    ("precision", "mean", "lowest"), [("fp32", 0.99999, 0.99999), ("fp16", 0.9999, 0.9995), ("int8", 0.99, 0.97)]
)
def test_embeddings_are_the_originals(converted, precision, mean, lowest):
    cosines = (embedder(converted, precision).embed(TEXTS) * converted.wanted).sum(1)
    assert cosines.mean() >= mean
    assert cosines.min() >= lowest


@pytest.mark.real
def test_fp16_holds_with_every_value_rounded(converted):
    """The CPU computes the fp16 graph in fp32; the emulation is what a device with float16 would give."""
    model = prepared(onnx.load(converted.paths["fp32"]))
    written = onnx.load(converted.paths["fp16"])
    types = value_types(written)
    norms = [types[item.output[0]] for item in written.graph.node if item.op_type == "LayerNormalization"]
    assert norms.count("tensor(float)") == 12
    islands = [item.name for item in written.graph.node if types.get(item.output[0]) == "tensor(float)"]
    feeds = []
    for text in TEXTS:
        ids = np.array([converted.reference.tokenize(text)])
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        feeds.append({name: feed[name] for name in converted.settings.inputs})
    found = np.concatenate([outputs[0] for outputs in emulated(model, feeds, islands=islands).outputs])
    cosines = (found * converted.wanted).sum(1) / np.linalg.norm(found, axis=1)
    assert cosines.min() >= 0.9995


@pytest.mark.real
def test_padded_is_unpadded(converted):
    fp32 = embedder(converted, "fp32")
    np.testing.assert_allclose(fp32.embed(TEXTS, batch_size=13), fp32.embed(TEXTS, batch_size=1), atol=1e-5)


@pytest.mark.real
def test_tokens_are_the_originals(converted):
    fp32 = embedder(converted, "fp32")
    assert [fp32.encode_ids(text) for text in TEXTS] == [converted.reference.tokenize(text) for text in TEXTS]
    assert converted.settings.max_length == 256


@pytest.mark.real
def test_attention_is_fused_and_the_files_shrink(converted):
    model = onnx.load(converted.paths["fp32"])
    operators = [node.op_type for node in model.graph.node]
    assert operators.count("MultiHeadAttention") == 6
    assert "Softmax" not in operators
    assert max(entry.version for entry in model.opset_import) <= 21
    sizes = {name: path.stat().st_size for name, path in converted.paths.items()}
    assert sizes["int8"] < sizes["fp32"] * 0.4
    assert sizes["fp16"] < sizes["fp32"] * 0.52
