"""What a written graph computes in is read from the graph: fp16 with islands, int8 with fp32 layers, decoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from decoders import SIZES, request_for, save_model
from onnx import TensorProto, helper, numpy_helper
from transformers import LlamaConfig

from edge_convert.convert import decoder_passes as passes
from edge_convert.convert.decoder_quantize import (
    COARSE_TABLE,
    INT4_FINE,
    INT8,
    WeightPlan,
    quantise_graph,
    uniform_plan,
)
from edge_convert.convert.fp16 import to_float16
from edge_convert.convert.fp16 import value_types as types_of_onnx_runtime
from edge_convert.convert.precisions import fp32_nodes, product_types, value_types
from edge_convert.convert.quantize import quantise_dynamic, quantise_static
from edge_convert.convert.recipes.text_generation import RECIPE
from edge_convert.convert.stamp import read_back

RNG = np.random.default_rng(0)
WIDTH = 64
WEIGHT = (RNG.normal(size=(WIDTH, WIDTH)) / 8).astype(np.float32)
FEEDS = [{"x": RNG.normal(size=(4, WIDTH)).astype(np.float32)} for _ in range(3)]
node = helper.make_node


def save(path: Path, nodes: list[onnx.NodeProto], weights: dict[str, Any], shape: list[Any]) -> Path:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def check_types(path: Path) -> None:
    """The types from the schemas are those that ONNX Runtime infers."""
    model = onnx.load(path)
    names = {"float": "float32", "double": "float64"}
    wanted = {name: kind[7:-1] for name, kind in types_of_onnx_runtime(model).items()}
    found = value_types(model)
    assert {name: found.get(name) for name in wanted} == {name: names.get(kind, kind) for name, kind in wanted.items()}


def test_an_fp16_graph_names_its_islands(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "first"),
        node("Mul", ["a", "large"], ["b"], "overflow"),
        node("Shape", ["b"], ["shape"], "shape"),
        node("Mul", ["b", "less"], ["c"], "back"),
        node("Reshape", ["c", "shape"], ["d"], "reshape"),
        node("MatMul", ["d", "w"], ["y"], "second"),
    ]
    weights = {"w": WEIGHT, "large": np.float32(1e5), "less": np.float32(1e-5)}
    source, out = save(tmp_path / "in.onnx", nodes, weights, ["n", WIDTH]), tmp_path / "out.onnx"
    report = to_float16(source, out, feeds=FEEDS)
    spec = read_back(out)
    assert set(spec.fp32_nodes) == set(report.islands) >= {"overflow", "back"}
    assert spec.products == {"fp16": 2}
    assert read_back(source).fp32_nodes == ()
    assert read_back(source).products == {"fp32": 2}
    check_types(out)


@pytest.mark.parametrize("branch", ["then", "else"])
def test_an_island_of_control_flow_is_named(tmp_path: Path, branch: str) -> None:
    inner = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
    branches = {
        f"{name}_branch": helper.make_graph([node("MatMul", ["a", "w"], ["inner"], name)], name, [], [inner])
        for name in ("then", "else")
    }
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "before"),
        node("If", ["taken"], ["c"], "choice", **branches),
        node("Relu", ["c"], ["y"], "after"),
    ]
    weights = {"w": WEIGHT, "taken": np.array(branch == "then")}
    source, out = save(tmp_path / "in.onnx", nodes, weights, ["n", WIDTH]), tmp_path / "out.onnx"
    assert set(to_float16(source, out, feeds=FEEDS).islands) == {"choice"}
    assert read_back(out).fp32_nodes == ("choice",)
    check_types(out)


def test_a_static_int8_graph_names_its_fp32_convolutions_however_small(tmp_path: Path) -> None:
    """The planted one has weights of 64 values, too few for the table of weights; one channel is a thousand times."""
    weights = {f"w{at}": RNG.normal(size=(8, 8, 1, 1)).astype(np.float32) for at in range(6)}
    weights["w1"][0] = 0
    weights["w2"][:, 0] = 1000
    values = ["x", *(f"v{at}" for at in range(5)), "y"]
    nodes = [node("Conv", [values[at], f"w{at}"], [values[at + 1]], f"c{at}") for at in range(6)]
    shape = [1, 8, 8, 8]
    source, out = save(tmp_path / "in.onnx", nodes, weights, shape), tmp_path / "out.onnx"
    quantise_static(source, out, [{"x": RNG.normal(size=shape).astype(np.float32)} for _ in range(8)])
    spec = read_back(out)
    assert spec.fp32_nodes == ("c2",)
    assert spec.products == {"fp32": 1, "int8": 5}
    check_types(out)


def test_a_dynamic_int8_graph_names_what_was_left_out(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], ["a"], "first"), node("MatMul", ["a", "v"], ["y"], "second")]
    source = save(tmp_path / "in.onnx", nodes, {"w": WEIGHT, "v": WEIGHT.T.copy()}, ["n", WIDTH])
    out = tmp_path / "out.onnx"
    quantise_dynamic(source, out, exclude=["second"], feeds=FEEDS)
    spec = read_back(out)
    assert spec.fp32_nodes == ("second",)
    assert spec.products == {"fp32": 1, "int8": 1}
    check_types(out)


def test_a_decoder_says_where_activations_are_rounded(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", LlamaConfig(**SIZES, tie_word_embeddings=True))
    export = tmp_path / "export"
    export.mkdir()
    graph = RECIPE.export(request_for(folder), export)["decoder"].path
    name = "/model/layers.1/mlp/down_proj/MatMul"

    def written(plan: WeightPlan | None) -> tuple[set[str], tuple[str, ...]]:
        model = passes.load_graph(graph)
        if plan is not None:
            quantise_graph(model, plan)
        path = tmp_path / "made.onnx"
        passes.save_graph(model, path)
        check_types(path)
        proto = onnx.load(path, load_external_data=False)
        return set(product_types(proto).values()), fp32_nodes(proto)

    assert written(None) == ({"fp32"}, ())
    assert written(WeightPlan(INT8, COARSE_TABLE, 4)) == ({"int8"}, ())
    assert written(WeightPlan(INT8, COARSE_TABLE, 0)) == ({"fp32"}, ())
    # Sums of blocks, which fractions of zero points meet, are no weights.
    assert written(WeightPlan(INT4_FINE, COARSE_TABLE, 4)) == ({"int8"}, ())
    assert written(WeightPlan(INT8, COARSE_TABLE, 4, {name: None})) == ({"int8", "fp32"}, (name,))
    assert written(uniform_plan("int4", passes.load_graph(graph), 4)) == ({"int8"}, ())
