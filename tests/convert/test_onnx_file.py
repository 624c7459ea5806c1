"""ONNX files as a source: whole bundles from tiny graphs in both layouts, and every refusal by name."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_files import CLASSES, IMAGENET, SIZE, classifier, encoder, save
from PIL import Image

from edge_convert.convert.onnx_graph import Original
from edge_convert.convert.pipeline import convert, load_reference
from edge_convert.convert.recipe import Request, find_recipe
from edge_convert.convert.recipes.onnx_classifier import IMAGE_CLASSIFICATION
from edge_convert.convert.recipes.onnx_encoder import FEATURE_EXTRACTION
from edge_convert.convert.source import open_source
from edge_convert.runtime.device import load_profile
from edge_convert.runtime.errors import ConversionError, ExportError, SourceError, UnsupportedModelError, UsageError
from edge_convert.wrappers.embed import TextEmbedder
from edge_convert.wrappers.image import ImageClassifier


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["[PAD]", "[CLS]", "[SEP]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the robot turns left at the crossing"] * 4, trainer)
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    made.enable_padding(pad_id=0)  # must not reach the wrapper or the reference
    return made


@pytest.fixture
def beside(tmp_path, tokenizer):
    folder = tmp_path / "source"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    return folder


def modules(folder, pooling, *, normalise):
    entries = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] if normalise else [])]
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in entries]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))


def preparation(folder, value):
    (folder / "preprocessor_config.json").write_text(json.dumps(value))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for index in range(24):
        small = rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)
        Image.fromarray(small).resize((48, 40), Image.Resampling.BICUBIC).save(folder / f"{index:02}.png")
    return folder


def request(path, precision="fp32", calibration=None, target="cpu"):
    return Request(open_source(str(path)), load_profile(target), precision, None, calibration, lambda _: None)


def failed(report):
    return [(gate.name, gate.metric, gate.value, gate.bound) for gate in report.gates if gate.outcome == "failed"]


# --- encoders


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_an_encoder_becomes_a_bundle_that_passes(beside, tmp_path, precision):
    path = encoder(beside)
    result = convert(str(path), target="cpu", task="feature-extraction", precision=precision, output=tmp_path / "out")
    assert result.report is not None
    assert failed(result.report) == []
    assert any("mean-pooled" in text for text in result.bundle.manifest.warnings)
    found = TextEmbedder.load(result.bundle).embed(["turn left", "go"])
    wanted = load_reference(str(path), bundle=result.bundle).embed(["turn left", "go"])
    assert np.sum(found * wanted, axis=1).min() > (0.97 if precision == "int8" else 0.9995)
    assert result.bundle.manifest.processing["max_length"] == 64


@pytest.mark.parametrize(
    ("pooling", "normalise"), [("cls_token", False), ("cls_token", True), ("mean_tokens", False), ("max_tokens", True)]
)
@pytest.mark.parametrize("opset", [13, 17, 21])
def test_pooling_follows_the_files_beside(beside, tmp_path, pooling, normalise, opset):
    modules(beside, pooling, normalise=normalise)
    path = encoder(beside, types=False, opset=opset)
    asked = request(path)
    assert FEATURE_EXTRACTION.check(asked) == ()
    graph = FEATURE_EXTRACTION.export(asked, tmp_path)["encoder"].path
    reference = FEATURE_EXTRACTION.reference(asked)
    texts = ["go", "turn left at the crossing"]
    rows = [reference.tokenize(text) for text in texts]
    feed = {"input_ids": np.zeros((2, max(map(len, rows))), np.int64)}
    feed["attention_mask"] = np.zeros_like(feed["input_ids"])
    for row, ids in enumerate(rows):
        feed["input_ids"][row, : len(ids)], feed["attention_mask"][row, : len(ids)] = ids, 1
    found = Original(graph).run("embedding", feed)
    # By hand, from the file's own token vectors.
    hidden = [
        Original(path).run(
            "last_hidden_state", {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
        )[0]
        for ids in rows
    ]
    pooled = {"cls_token": lambda h: h[0], "mean_tokens": lambda h: h.mean(0), "max_tokens": lambda h: h.max(0)}
    wanted = np.stack([pooled[pooling](value) for value in hidden])
    if normalise:
        wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    np.testing.assert_allclose(reference.embed(texts), wanted, atol=1e-5)


def test_a_sentence_output_is_left_alone(beside, tmp_path):
    path = encoder(beside, sentence=True, output="sentence_embedding")
    modules(beside, "cls_token", normalise=True)
    result = convert(str(path), target="cpu", task="feature-extraction", precision="fp32", output=tmp_path / "out")
    found, reference = TextEmbedder.load(result.bundle), load_reference(str(path), bundle=result.bundle)
    assert np.linalg.norm(found.embed("turn left")) > 2
    np.testing.assert_allclose(found.embed(["turn left"]), reference.embed(["turn left"]), rtol=1e-4, atol=1e-5)


def test_int32_tokens_and_external_data(beside, tmp_path):
    path = encoder(beside, kind=TensorProto.INT32, save_as_external_data=True, location="model.data", size_threshold=0)
    before = open_source(str(path)).sha256
    result = convert(str(path), target="cpu", task="feature-extraction", precision="fp32", output=tmp_path / "out")
    assert result.report is not None
    assert failed(result.report) == []
    assert result.bundle.manifest.graphs["encoder"].inputs[0].dtype == "int64"
    data = beside / "model.data"
    data.write_bytes(data.read_bytes()[:-4] + b"\0\0\0\0")
    assert open_source(str(path)).sha256 != before


def test_the_files_beside_belong_to_the_source(beside):
    path = encoder(beside)
    before = open_source(str(path)).sha256
    modules(beside, "cls_token", normalise=True)
    assert open_source(str(path)).sha256 != before


def test_a_missing_tokenizer_is_named(beside, tmp_path):
    (beside / "tokenizer.json").unlink()
    with pytest.raises(SourceError, match="tokenizer"):
        FEATURE_EXTRACTION.export(request(encoder(beside)), tmp_path)


def test_other_inputs_are_refused(beside, tmp_path):
    with pytest.raises(UnsupportedModelError, match="image"):
        FEATURE_EXTRACTION.export(request(classifier(beside)), tmp_path)


def test_fixed_token_axes_are_refused(beside, tmp_path):
    path = encoder(beside)
    model = onnx.load(path)
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[1].dim_value = 16
    onnx.save(model, path)
    with pytest.raises(UnsupportedModelError, match="dynamic axes"):
        FEATURE_EXTRACTION.export(request(path), tmp_path)


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_a_quantised_file_is_kept_or_refused(beside, tmp_path, precision):
    from onnxruntime.quantization import quantize_dynamic

    path = encoder(beside)
    quantize_dynamic(path, beside / "small.onnx")
    with pytest.raises(UsageError, match=r"already quantised.*--precision fp32"):
        FEATURE_EXTRACTION.export(request(beside / "small.onnx", precision), tmp_path)
    kept = FEATURE_EXTRACTION.export(request(beside / "small.onnx"), tmp_path)["encoder"].path
    assert any(node.op_type == "MatMulInteger" for node in onnx.load(kept).graph.node)


# --- classifiers


@pytest.mark.parametrize("planar", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_a_classifier_becomes_a_bundle_that_passes(tmp_path, photos, planar, precision):
    path = classifier(tmp_path, planar=planar)
    preparation(tmp_path, IMAGENET)
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {str(i): f"kind {i}" for i in range(CLASSES)}}))
    result = convert(
        str(path), target="cpu", task="image-classification", precision=precision, output=tmp_path / "out",
        calibration=photos,
    )  # fmt: skip
    assert result.report is not None
    assert failed(result.report) == []
    (graph,) = result.bundle.manifest.graphs.values()
    assert (graph.inputs[0].dtype, graph.inputs[0].shape[1:]) == ("uint8", (SIZE, SIZE, 3))
    assert ("QuantizeLinear" in graph.node_counts) == (precision == "int8")
    assert ImageClassifier.load(result.bundle).classify(photos / "00.png")[0][0].name.startswith("kind ")


def test_normalisation_is_that_of_the_config(tmp_path):
    path = classifier(tmp_path)
    preparation(tmp_path, IMAGENET)
    asked = request(path)
    (tmp_path / "graph").mkdir()
    graph = IMAGE_CLASSIFICATION.export(asked, tmp_path / "graph")["classifier"].path
    frames = np.random.default_rng(3).integers(0, 256, (3, SIZE, SIZE, 3), dtype=np.uint8)
    pixels = (frames / 255 - IMAGENET["image_mean"]) / IMAGENET["image_std"]
    wanted = Original(path).run("out", {"image": pixels.transpose(0, 3, 1, 2).astype(np.float32)})
    np.testing.assert_allclose(Original(graph).run("logits", {"frames": frames}), wanted, atol=1e-4)
    np.testing.assert_allclose(IMAGE_CLASSIFICATION.reference(asked).logits(frames), wanted, atol=1e-4)


def test_a_fixed_batch_of_one_and_a_softmax(tmp_path):
    path = classifier(tmp_path, batch=1, softmax=True)
    preparation(tmp_path, {"mean": 127.0, "std": 128.0})
    (tmp_path / "labels.txt").write_text("".join(f"kind {i}\n" for i in range(CLASSES)))
    result = convert(str(path), target="cpu", task="image-classification", precision="fp32", output=tmp_path / "out")
    assert result.report is not None
    assert failed(result.report) == []
    assert "Softmax" not in result.bundle.manifest.graphs["classifier"].node_counts


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "must lie beside"),
        ({"size": 32}, "neither mean and std"),
        ({"mean": 0, "std": 0}, "not positive"),
        ({"mean": [1, 2], "std": 1}, "three"),
        ({"mean": 0, "std": 1, "crop_size": 48}, "48x48"),
        ({"mean": 0, "std": 1, "resample": 5}, "resample"),
        ({"mean": 0, "std": 1, "rescale_offset": True}, "rescale_offset"),
        ([1], "not a JSON object"),
    ],
)
def test_a_preprocessing_that_cannot_be_used_is_named(tmp_path, config, message):
    path = classifier(tmp_path)
    if config is not None:
        preparation(tmp_path, config)
    with pytest.raises(ConversionError, match=message):
        IMAGE_CLASSIFICATION.export(request(path), tmp_path)


def test_too_few_labels_are_refused(tmp_path):
    path = classifier(tmp_path)
    preparation(tmp_path, IMAGENET)
    (tmp_path / "labels.txt").write_text("one\ntwo\n")
    with pytest.raises(SourceError, match="10 classes"):
        IMAGE_CLASSIFICATION.export(request(path), tmp_path)


def test_another_layout_is_refused(tmp_path):
    path = save(
        tmp_path / "net.onnx", [helper.make_node("Flatten", ["x"], ["y"])], [("x", TensorProto.FLOAT, ("n", 8, 8, 3))],
        [("y", TensorProto.FLOAT, ("n", 192))], {},
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=r"float32 \(N, 3, H, W\)"):
        IMAGE_CLASSIFICATION.export(request(path), tmp_path)


def test_a_batch_fixed_inside_is_refused(tmp_path):
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    path = save(
        tmp_path / "net.onnx", nodes, [("x", TensorProto.FLOAT, (1, 3, 8, 8))], [("y", TensorProto.FLOAT, (1, 192))],
        {"shape": np.array([1, 192], np.int64)},
    )  # fmt: skip
    preparation(tmp_path, {"mean": 0, "std": 1})
    with pytest.raises(UnsupportedModelError, match="dynamic batch"):
        IMAGE_CLASSIFICATION.export(request(path), tmp_path)


# --- both


@pytest.mark.parametrize("opset", [11, 22])
def test_the_opset_is_brought_into_range(tmp_path, opset):
    path = classifier(tmp_path, opset=opset)
    preparation(tmp_path, IMAGENET)
    result = convert(str(path), target="cpu", task="image-classification", precision="fp32", output=tmp_path / "out")
    graph = result.bundle.manifest.graphs["classifier"]
    assert graph.opsets["ai.onnx"] == (13 if opset == 11 else 21)
    assert result.report is not None
    assert failed(result.report) == []


def test_an_opset_that_cannot_be_lowered_is_an_export_error(tmp_path):
    node = helper.make_node
    nodes = [
        node("Flatten", ["x"], ["flat"]),
        node("RMSNormalization", ["flat", "gain"], ["y"]),  # new in opset 23
    ]
    path = save(
        tmp_path / "net.onnx", nodes, [("x", TensorProto.FLOAT, ("n", 3, 8, 8))], [("y", TensorProto.FLOAT, ("n", 192))],
        {"gain": np.ones(192, np.float32)}, opset=23,
    )  # fmt: skip
    preparation(tmp_path, {"mean": 0, "std": 1})
    with pytest.raises(ExportError, match="opset 21"):
        IMAGE_CLASSIFICATION.export(request(path), tmp_path)


def test_a_decoder_file_is_refused_with_what_to_give(beside):
    with pytest.raises(UnsupportedModelError, match="GGUF"):
        convert(str(encoder(beside)), target="cpu", task="text-generation", output=beside / "out")


def test_an_interrupt_in_onnxruntime_is_no_broken_model(beside, monkeypatch):
    import onnxruntime

    def interrupted(*_, **__):
        raise RuntimeError("wrapped") from KeyboardInterrupt()

    path = encoder(beside)
    original = Original(path)
    monkeypatch.setattr(original._session, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        original.run("last_hidden_state", {})
    monkeypatch.setattr(onnxruntime, "InferenceSession", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Original(path)


def test_other_sources_keep_their_recipes():
    assert find_recipe("feature-extraction", "huggingface") is not FEATURE_EXTRACTION
    assert find_recipe("feature-extraction", "onnx") is FEATURE_EXTRACTION
