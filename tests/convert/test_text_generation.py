"""The decoder recipe: every exported graph computes what transformers computes, in every family and precision."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from assets import smollm2_gguf
from decoders import FAMILIES, SIZES, TEMPLATE, VOCAB, prompt, request_for, save_model
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, FalconConfig, LlamaConfig, Qwen2Config

from edge_convert.convert.recipe import Exported, Request
from edge_convert.convert.recipes.text_generation import RECIPE
from edge_convert.convert.source import open_source
from edge_convert.runtime.device import load_profile
from edge_convert.runtime.errors import ExportError, UnsupportedModelError

# fp32 on both sides, logits of order 1: what is left is the order of summation over a few hundred terms.
FP32_TOLERANCE = 2e-5


def convert(request: Request, folder: Path) -> Exported:
    """Export and quantise into new folders below `folder`."""
    places = [folder / "export", folder / "quantise"]
    for place in places:
        place.mkdir(parents=True)
    return RECIPE.quantise(request, RECIPE.export(request, places[0]), places[1])["decoder"]


def run(graph: Exported, ids: np.ndarray, *, positions: list[int] | None = None, split: int = 0) -> np.ndarray:
    """Logits of `positions` (all), in one run, or in two with the cache carried over after `split` tokens."""
    session = ort.InferenceSession(str(graph.path), providers=["CPUExecutionProvider"])
    assert graph.cache is not None
    shape = (1, graph.cache.kv_heads, 0, graph.cache.head_dim)
    past = {name: np.zeros(shape, graph.cache.dtype) for name in graph.cache.past}
    parts, done = [], 0
    for chunk in (ids[:split], ids[split:]) if split else (ids,):
        kept = list(range(len(chunk))) if positions is None else positions
        done += len(chunk)
        feed = {"input_ids": chunk[None], "seqlens_k": np.array([done - 1], np.int32), **past}
        feed["total_sequence_length"] = np.array(done, np.int32)
        feed["logits_positions"] = np.array(kept, np.int64)
        logits, *present = session.run(["logits", *graph.cache.present], feed)
        past = dict(zip(graph.cache.past, present, strict=True))
        parts.append(logits[0])
    return np.concatenate(parts).astype(np.float32)


def constants(path: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every initializer."""
    graph = onnx.load(path, load_external_data=False).graph
    return {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("source") / "llama", FAMILIES["llama"]())


@pytest.fixture(scope="module")
def llama_graphs(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    folder = tmp_path_factory.mktemp("graphs")
    return {name: convert(request_for(llama, name), folder / name) for name in ("fp32", "fp16", "int8", "int4")}


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_graph_equals_transformers(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", FAMILIES[family]())
    request = request_for(folder)
    graph = convert(request, tmp_path)
    ids = prompt()
    expected = RECIPE.reference(request).logits(ids)
    bound = FP32_TOLERANCE * max(1.0, float(np.abs(expected).max()))
    assert np.std(expected) > 0.1, "a model without an opinion proves nothing"
    np.testing.assert_allclose(run(graph, ids), expected, rtol=0, atol=bound)
    np.testing.assert_allclose(run(graph, ids, split=13), expected, rtol=0, atol=bound)


def test_logits_positions_pick_rows(llama_graphs: dict[str, Exported]) -> None:
    ids = prompt()
    everything = run(llama_graphs["fp32"], ids)
    picked = run(llama_graphs["fp32"], ids, positions=[23, 4])
    assert picked.shape == (2, VOCAB)
    np.testing.assert_allclose(picked, everything[[23, 4]], rtol=0, atol=FP32_TOLERANCE)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
def test_graph_has_the_contract(precision: str, llama_graphs: dict[str, Exported]) -> None:
    graph = llama_graphs[precision]
    model = onnx.load(graph.path, load_external_data=False)
    assert model.ir_version <= 10
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": 21, "com.microsoft": 1}
    assert graph.cache is not None
    inputs = {value.name for value in model.graph.input}
    assert inputs == {"input_ids", "seqlens_k", "total_sequence_length", "logits_positions", *graph.cache.past}
    assert model.graph.output[0].name == "logits"
    assert {value.name for value in model.graph.output} == {"logits", *graph.cache.present}
    past = next(value for value in model.graph.input if value.name == graph.cache.past[0])
    assert [dim.dim_value for dim in past.type.tensor_type.shape.dim] == [0, 2, 0, 16]
    assert (graph.cache.kv_heads, graph.cache.head_dim, graph.cache.max_length) == (2, 16, 128)
    for node in model.graph.node:
        assert not node.input or node.input[-1], f"{node.name} ends with an empty input"


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
def test_tied_embedding_is_stored_once(precision: str, llama_graphs: dict[str, Exported]) -> None:
    size = VOCAB * SIZES["hidden_size"]
    tables = [name for name, shape in constants(llama_graphs[precision].path).items() if np.prod(shape) == size]
    assert len(tables) == 1, tables


@pytest.mark.parametrize(("precision", "bound"), [("fp16", 0.01), ("int8", 0.05), ("int4", 0.5)])
def test_lower_precisions_stay_near(
    precision: str, bound: float, llama: Path, llama_graphs: dict[str, Exported]
) -> None:
    ids = prompt()
    expected = RECIPE.reference(request_for(llama)).logits(ids)
    error = run(llama_graphs[precision], ids) - expected
    relative = float(np.sqrt(np.mean(error**2)) / np.std(expected))
    assert 0 < relative < bound


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantised_linear_layers_and_nothing_else(precision: str, llama_graphs: dict[str, Exported]) -> None:
    model = onnx.load(llama_graphs[precision].path, load_external_data=False)
    bits = {
        node.name: next(item.i for item in node.attribute if item.name == "bits")
        for node in model.graph.node
        if node.op_type == "MatMulNBits"
    }
    assert bits.pop("/lm_head/MatMul") == 8
    assert set(bits.values()) == {int(precision[3:])}
    assert len(bits) == 2 * 4  # layers times (qkv, output, gate and up, down)
    assert not [node.name for node in model.graph.node if node.op_type in ("MatMul", "FusedMatMul")]


def test_untied_model_keeps_two_tables_in_int8(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", FAMILIES["llama-untied"]())
    request = request_for(folder, "int8")
    ids = prompt()
    expected = RECIPE.reference(request).logits(ids)
    error = run(convert(request, tmp_path), ids) - expected
    assert float(np.sqrt(np.mean(error**2)) / np.std(expected)) < 0.05


@pytest.mark.parametrize(("precision", "most"), [("int8", 0.05), ("int4", 0.5)])
def test_sizes_that_no_block_divides(tmp_path: Path, precision: str, most: float) -> None:
    config = LlamaConfig(**{**SIZES, "hidden_size": 40, "head_dim": 16, "intermediate_size": 90})
    request = request_for(save_model(tmp_path / "model", config), precision)
    ids = prompt()
    expected = RECIPE.reference(request).logits(ids)
    error = run(convert(request, tmp_path), ids) - expected
    assert float(np.sqrt(np.mean(error**2)) / np.std(expected)) < most


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_stored_weights_are_computed_in_fp32(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    folder = save_model(tmp_path / "model", FAMILIES[family]())
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    reference = RECIPE.reference(request_for(folder))
    sizes = {parameter.dtype: parameter.numel() for parameter in reference._model.parameters() if parameter.ndim == 2}
    assert dtype in sizes  # kept as it is stored
    wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = prompt()
    with torch.inference_mode():
        expected = wide(torch.from_numpy(ids)[None]).logits[0].numpy()
    np.testing.assert_allclose(reference.logits(ids), expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def test_context_caps_cache_and_rotary_tables(llama: Path, tmp_path: Path) -> None:
    graph = convert(request_for(llama, context=40), tmp_path)
    assert graph.cache is not None
    assert graph.cache.max_length == 40
    assert constants(graph.path)["cos_cache"][0] == 40
    with pytest.raises(ExportError, match="128"):
        RECIPE.package(request_for(llama, context=4096), tmp_path)


def test_package_writes_tokenizer_template_and_stop_ids(llama: Path, tmp_path: Path) -> None:
    request = request_for(llama)
    processing = RECIPE.package(request, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chat_template.jinja", "tokenizer.json"]
    assert (tmp_path / "chat_template.jinja").read_text("utf-8") == TEMPLATE
    assert processing["eos_token_ids"] == [2, 4]  # </s> of the config and <|im_end|> of the template
    assert (processing["bos_token"], processing["bos_token_id"], processing["context_length"]) == ("<s>", 1, 128)
    text = "Turn left, then wait 3 s. Ünïcode ☃"
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    reference = RECIPE.reference(request)
    assert ids == reference.tokenize(text)
    assert reference.render([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_model_without_chat_template(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", FAMILIES["llama"](), template=None)
    (tmp_path / "out").mkdir()
    processing = RECIPE.package(request_for(folder), tmp_path / "out")
    assert processing["chat_template"] is None
    assert processing["eos_token_ids"] == [2]
    assert RECIPE.reference(request_for(folder)).render([{"role": "user", "content": "hi"}]) is None


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    config = FalconConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    folder = save_model(tmp_path / "model", config)
    with pytest.raises(UnsupportedModelError, match="FalconForCausalLM"):
        RECIPE.export(request_for(folder), tmp_path)


def test_other_kinds_of_source_are_refused(llama: Path, tmp_path: Path) -> None:
    request = request_for(llama)
    request = dataclasses.replace(request, source=dataclasses.replace(request.source, kind="onnx"))
    with pytest.raises(UnsupportedModelError, match="onnx"):
        RECIPE.export(request, tmp_path)


def test_fp16_for_cuda_has_a_half_cache(llama: Path, tmp_path: Path) -> None:
    graph = convert(request_for(llama, "fp16", target="cuda"), tmp_path)
    assert graph.cache is not None
    assert graph.cache.dtype == "float16"
    ids = prompt()
    expected = RECIPE.reference(request_for(llama)).logits(ids)
    error = run(graph, ids) - expected
    assert float(np.sqrt(np.mean(error**2)) / np.std(expected)) < 0.02


@pytest.mark.real
def test_smollm2_from_gguf(tmp_path: Path) -> None:
    """The real model: fp32 equals torch to rounding; int8 is 4 times smaller, near in KL and in first choices."""
    request = Request(open_source(str(smollm2_gguf())), load_profile("cpu"), "int8", None, None, lambda _: None)
    for name in ("export", "quantise"):
        (tmp_path / name).mkdir()
    exported = RECIPE.export(request, tmp_path / "export")
    quantised = RECIPE.quantise(request, exported, tmp_path / "quantise")["decoder"]
    assert sum(path.stat().st_size for path in (tmp_path / "quantise").iterdir()) < 160e6
    reference = RECIPE.reference(request)
    ids = np.array(reference.tokenize(" ".join(PASSAGES)), np.int64)
    expected = log_softmax(reference.logits(ids))
    assert divergence(expected, log_softmax(run(exported["decoder"], ids))) < 1e-6
    found = log_softmax(run(quantised, ids))
    assert divergence(expected, found) < 0.01
    assert np.mean(expected.argmax(-1) == found.argmax(-1)) >= 0.9


@pytest.mark.real
def test_shape_of_qwen2_5_half_billion(tmp_path: Path) -> None:
    """Random weights in Qwen2.5-0.5B's shape: more than 2 GB of fp32, a large tied vocabulary, QKV biases."""
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )
    request = request_for(save_model(tmp_path / "model", config, scale=0.03), context=512)
    graph = convert(request, tmp_path)
    names = {name for name in constants(graph.path) if name.endswith("qkv_proj.Add.bias")}
    assert len(names) == 24
    assert sum(shape == (151_936, 896) for shape in constants(graph.path).values()) == 1
    ids = np.random.default_rng(1).integers(5, 151_936, 24, dtype=np.int64)
    expected = RECIPE.reference(request).logits(ids)
    bound = FP32_TOLERANCE * max(1.0, float(np.abs(expected).max()))
    assert np.std(expected) > 0.1, "a model without an opinion proves nothing"
    np.testing.assert_allclose(run(graph, ids, split=13), expected, rtol=0, atol=bound)


PASSAGES = (
    "A quadcopter keeps its place by changing the speed of four motors many times a second.",
    "When the battery falls below a fifth of its charge, the vehicle returns to the point where it took off.",
    "The recipe asks for two eggs, a cup of flour and a little salt; mix them slowly and let the dough rest.",
)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities float64 (S, V)."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def divergence(expected: np.ndarray, found: np.ndarray) -> float:
    """Mean KL(expected || found) in nats."""
    return float((np.exp(expected) * (expected - found)).sum(-1).mean())
