"""Block quantisation of one matrix: error bounds, grids that are kept, and the graph form of fractional zero points."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from onnx import TensorProto, helper, numpy_helper

from edge_convert.convert import decoder_passes as passes
from edge_convert.convert.decoder_quantize import TABLE, WeightPlan, quantise_graph
from edge_convert.convert.weight_formats import (
    Blocks,
    WeightFormat,
    dequantise_rows,
    half_scales,
    quantise_rows,
    stored_bytes,
)


def weights_of(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def signal_to_noise_db(weights: np.ndarray, blocks: Blocks | None) -> float:
    assert blocks is not None
    error = dequantise_rows(blocks, weights.shape[1]) - weights
    return 10 * float(np.log10((weights**2).sum() / max((error**2).sum(), 1e-30)))


@pytest.mark.parametrize("method", ["nearest", "shrink", "hqq"])
@pytest.mark.parametrize(("bits", "steps"), [(8, 127), (4, 15)])
@pytest.mark.parametrize("columns", [32, 50, 96])
def test_quantised_rows_are_within_half_a_step(bits: int, steps: int, columns: int, method: str) -> None:
    weights = weights_of(7, columns)
    weights[3] = 0
    blocks = quantise_rows(weights, WeightFormat(bits, 32, method))
    assert blocks is not None
    back = dequantise_rows(blocks, columns)
    assert back.shape == weights.shape
    span = np.abs(weights).max() * 2
    # Up to a fifth of the range may be cut off, and an integer zero point moves all values by half a step.
    assert np.abs(back - weights).max() <= span / steps * 4
    assert np.sqrt(np.mean((back - weights) ** 2)) <= span / steps / 2
    assert np.abs(back[3]).max() <= 1e-6


def test_methods_are_in_the_order_of_their_error() -> None:
    weights = weights_of(64, 512)
    found = [
        signal_to_noise_db(weights, quantise_rows(weights, WeightFormat(4, 32, m)))
        for m in ("nearest", "shrink", "hqq")
    ]
    assert found == sorted(found), found
    assert found[2] - found[0] > 0.5


@pytest.mark.parametrize(
    ("kind", "bits", "bits_a_weight"),
    [("Q4_0", 4, 4.5), ("Q4_1", 4, 5.3), ("Q5_0", 8, 8.6), ("Q8_0", 8, 8.5)],
)
def test_the_grid_of_a_gguf_type_is_kept(kind: str, bits: int, bits_a_weight: float) -> None:
    source = weights_of(32, 1024)
    dtype = GGMLQuantizationType[kind]
    weights = dequantize(quantize(source, dtype), dtype).astype(np.float32)
    blocks = quantise_rows(weights, WeightFormat(bits, 32, "grid"))
    assert blocks is not None
    assert half_scales(blocks).dtype == np.float16
    assert signal_to_noise_db(weights, blocks) > 40  # 8 bits give 44; again rounded to 4 bits it would be 21
    if blocks.fraction is None:
        np.testing.assert_allclose(dequantise_rows(blocks, 1024), weights, rtol=0, atol=2e-6 * np.abs(weights).max())
    assert stored_bytes(blocks) * 8 / weights.size <= bits_a_weight + 0.15


def test_weights_on_no_grid_have_none() -> None:
    weights = weights_of(100, 64)
    assert quantise_rows(weights, WeightFormat(4, 32, "grid")) is None
    gridded = dequantize(quantize(weights, GGMLQuantizationType.Q4_1), GGMLQuantizationType.Q4_1).astype(np.float32)
    gridded[99, 63] += 0.01  # past the rows that are tried first
    assert quantise_rows(gridded, WeightFormat(4, 32, "grid")) is None


def test_scales_outside_float16_stay_float32() -> None:
    blocks = quantise_rows(weights_of(4, 32) * np.float32(1e-7), WeightFormat(8, 32))
    assert blocks is not None
    assert half_scales(blocks).dtype == np.float32


def decoder(path: Path, weights: np.ndarray) -> Path:
    """x (1, S, K) times `weights`, and a head, as an exporter would name them."""
    rows, columns = weights.shape
    tensors = [numpy_helper.from_array(np.ascontiguousarray(weights.T), "layer.weight")]
    tensors.append(numpy_helper.from_array(weights_of(rows, 64, 1), "head.weight"))
    nodes = [
        helper.make_node("MatMul", ["x", "layer.weight"], ["y"], "/layer/MatMul"),
        helper.make_node("MatMul", ["y", "head.weight"], ["logits"], passes.HEAD_NAME),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "S", columns])]
    outputs = [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "S", rows]),
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "S", 64]),
    ]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


@pytest.mark.parametrize("columns", [64, 100, 1024])
@pytest.mark.parametrize("form", [WeightFormat(4, 32, "hqq"), WeightFormat(4, 32, "shrink"), WeightFormat(8, 32)])
def test_the_graph_computes_what_the_blocks_stand_for(tmp_path: Path, form: WeightFormat, columns: int) -> None:
    weights = weights_of(48, columns)
    model = passes.load_graph(decoder(tmp_path / "fp32.onnx", weights))
    plan = WeightPlan((form,), WeightFormat(8, 32), accuracy_level=0)
    assert quantise_graph(model, plan) == {"/layer/MatMul": form, passes.HEAD_NAME: WeightFormat(8, 32)}
    passes.save_graph(model, tmp_path / "quantised.onnx")
    session = ort.InferenceSession(tmp_path / "quantised.onnx", providers=["CPUExecutionProvider"])
    x = weights_of(3, columns, 2)
    (found,) = session.run(["y"], {"x": x[None]})
    blocks = quantise_rows(weights, form)
    assert blocks is not None
    expected = x @ dequantise_rows(blocks, columns).T
    # Sums in float32 in another order.
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_the_plan_names_single_layers(tmp_path: Path) -> None:
    model = passes.load_graph(decoder(tmp_path / "fp32.onnx", weights_of(48, 64)))
    plan = WeightPlan((WeightFormat(4, 32),), WeightFormat(8, 32), 0, nodes={"/layer/MatMul": None})
    assert TABLE not in quantise_graph(model, plan)
    assert [node.op_type for node in model.graph if node.name == "/layer/MatMul"] == ["MatMul"]
