"""fp16 graphs: planted faults stay in fp32, and what the CPU would have hidden is seen."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_convert.convert.fp16 import (
    ERROR_BOUND,
    convert,
    emulated,
    first_fault,
    measure,
    prepared,
    row_error,
    text_feeds,
    to_float16,
    value_types,
    verify,
)
from edge_convert.runtime.errors import ExportError

RNG = np.random.default_rng(0)
WIDTH = 64
WEIGHT = (RNG.normal(size=(WIDTH, WIDTH)) / 8).astype(np.float32)
FEEDS = [{"x": RNG.normal(size=(4, WIDTH)).astype(np.float32)} for _ in range(3)]
node = helper.make_node


def save(folder, nodes, tensors, *, outputs=("y",), shape=("n", WIDTH), kind=TensorProto.FLOAT):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("rows", "columns")) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in tensors.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = folder / "in.onnx"
    onnx.save(model, path)
    return path


def run(path, feed):
    return ort.InferenceSession(str(path)).run(None, feed)


def kinds(path):
    """The type that each node writes, by the node's name."""
    model = onnx.load(path)
    onnx.checker.check_model(model)
    types = value_types(model)
    return {item.name: types[item.output[0]] for item in model.graph.node if item.op_type != "Cast"}


def check_right(source, out, feeds=FEEDS):
    for feed in feeds:
        assert row_error(run(source, feed), run(out, feed)) < ERROR_BOUND


def test_a_harmless_graph_is_float16_throughout(tmp_path):
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "product"),
        node("LayerNormalization", ["a", "g", "b"], ["n"], "norm"),
        node("Softmax", ["n"], ["s"], "softmax"),
        node("ReduceMean", ["s"], ["y"], "mean", axes=[1], keepdims=1),
    ]
    source = save(tmp_path, nodes, {"w": WEIGHT, "g": np.ones(WIDTH, np.float32), "b": np.zeros(WIDTH, np.float32)})
    out = tmp_path / "out.onnx"
    report = to_float16(source, out, feeds=FEEDS)
    assert report.islands == {}
    assert report.float16_nodes == 4
    assert 0 < report.error < ERROR_BOUND
    assert set(kinds(out).values()) == {"tensor(float16)"}
    written = onnx.load(out)
    assert {tensor.data_type for tensor in written.graph.initializer} == {TensorProto.FLOAT16}
    assert sum(item.op_type == "Cast" for item in written.graph.node) == 2
    check_right(source, out)


OVERFLOW = [
    node("MatMul", ["x", "w"], ["a"], "small"),
    node("Mul", ["a", "large"], ["b"], "overflow"),
    node("Relu", ["b"], ["c"], "also"),
    node("Mul", ["c", "less"], ["d"], "back"),
    node("MatMul", ["d", "w"], ["y"], "after"),
]
FACTORS = {"w": WEIGHT, "large": np.float32(1e4), "less": np.float32(1 / 8192)}


def test_an_overflow_stays_in_fp32_up_to_its_last_reader(tmp_path):
    feeds = [{"x": feed["x"] * 40} for feed in FEEDS]
    source, out = save(tmp_path, OVERFLOW, FACTORS), tmp_path / "out.onnx"
    report = to_float16(source, out, feeds=feeds)
    assert set(report.islands) == {"overflow", "also", "back"}
    assert "b reaches" in report.islands["overflow"]
    assert kinds(out) == dict.fromkeys(("small", "after"), "tensor(float16)") | dict.fromkeys(
        ("overflow", "also", "back"), "tensor(float)"
    )
    check_right(source, out, feeds)
    casts = [item for item in onnx.load(out).graph.node if item.op_type == "Cast"]
    assert len(casts) == 4  # at both ends, into the islands and out of them: none between


def test_the_cpu_hides_an_overflow_that_the_emulation_shows(tmp_path):
    feeds = [{"x": feed["x"] * 40} for feed in FEEDS]
    source, out = save(tmp_path, OVERFLOW, FACTORS), tmp_path / "out.onnx"
    model = prepared(onnx.load(source))
    onnx.save(convert(model, measure(model, feeds), ()), out)  # as it would be without islands
    check_right(source, out, feeds)
    seen = emulated(model, feeds)
    assert not np.isfinite(seen.outputs[0][0]).all()
    assert first_fault(model, seen.values) == ("overflow", "b")


def test_an_output_of_an_island_does_not_pass_through_float16(tmp_path):
    source, out = save(tmp_path, OVERFLOW[:2], FACTORS, outputs=("b", "a")), tmp_path / "out.onnx"
    to_float16(source, out, feeds=FEEDS)
    assert kinds(out) == {"small": "tensor(float16)", "overflow": "tensor(float)"}
    assert [value.name for value in onnx.load(out).graph.output] == ["b", "a"]
    feed = {"x": FEEDS[0]["x"] * 100}
    assert np.abs(run(source, feed)[0]).max() > 65504
    check_right(source, out, [feed])


def test_an_overflow_inside_a_layer_norm(tmp_path):
    tensors = {"up": np.float32(500), "g": np.ones(WIDTH, np.float32), "w": WEIGHT}
    nodes = [
        node("MatMul", ["x", "w"], ["n"], "before"),
        node("Mul", ["n", "up"], ["a"], "wide"),
        node("LayerNormalization", ["a", "g"], ["b"], "norm"),
        node("MatMul", ["b", "w"], ["y"], "after"),
    ]
    source, out = save(tmp_path, nodes, tensors), tmp_path / "out.onnx"
    report = to_float16(source, out, feeds=FEEDS)
    assert set(report.islands) == {"norm"}
    assert "sums inside" in report.islands["norm"]
    assert kinds(out)["norm"] == "tensor(float)"
    check_right(source, out)


@pytest.mark.parametrize(
    ("kind", "factor", "kept"),
    [
        ("ReduceSum", 10, False),
        ("ReduceSum", 500, True),
        ("ReduceMean", 500, True),
        ("ReduceL2", 2, False),
        ("ReduceL2", 20, True),
        ("Softmax", 500, False),
    ],
)
def test_sums_inside_by_length_and_size(tmp_path, kind, factor, kept):
    axes = {} if kind == "Softmax" else {"axes": [1], "keepdims": 1}
    inputs = ["a"]
    tensors = {"up": np.float32(factor)}
    if kind == "ReduceSum":
        axes.pop("axes")
        inputs, tensors["axes"] = ["a", "axes"], np.array([1])
    nodes = [node("Mul", ["x", "up"], ["a"], "wide"), node(kind, inputs, ["y"], "inside", **axes)]
    feeds = [{"x": np.sign(feed["x"])} for feed in FEEDS]
    feeds[0]["x"][:] = 1
    source, out = save(tmp_path, nodes, tensors), tmp_path / "out.onnx"
    assert ("inside" in to_float16(source, out, feeds=feeds[:1]).islands) == kept


def test_an_underflow_stays_in_fp32(tmp_path):
    tensors = {"down": np.float32(2.0**-20), "up": np.float32(2.0**20), "w": WEIGHT}
    nodes = [
        node("Mul", ["x", "down"], ["a"], "small"),
        node("MatMul", ["a", "w"], ["b"], "product"),
        node("Mul", ["b", "up"], ["y"], "large"),
    ]
    source, out = save(tmp_path, nodes, tensors), tmp_path / "out.onnx"
    report = to_float16(source, out, feeds=FEEDS)
    assert set(report.islands) == {"small", "product", "large"}
    assert "below" in report.islands["product"]
    check_right(source, out)


def test_a_floor_reaches_to_its_division(tmp_path):
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "product"),
        node("ReduceL2", ["a"], ["l"], "length", axes=[1], keepdims=1),
        node("Clip", ["l", "tiny"], ["c"], "floor"),
        node("Div", ["a", "c"], ["y"], "division"),
    ]
    source, out = save(tmp_path, nodes, {"w": WEIGHT, "tiny": np.float32(1e-12)}), tmp_path / "out.onnx"
    report = to_float16(source, out, feeds=FEEDS)
    assert set(report.islands) == {"floor", "division"}
    np.testing.assert_array_equal(run(out, {"x": np.zeros((1, WIDTH), np.float32)})[0], 0)


def test_a_division_by_almost_nothing(tmp_path):
    nodes = [node("Mul", ["x", "x"], ["a"], "square"), node("Div", ["one", "a"], ["y"], "division")]
    source = save(tmp_path, nodes, {"one": np.float32(1e-3)})
    feeds = [{"x": np.full((1, WIDTH), 0.1, np.float32)}]
    feeds[0]["x"][0, 3] = 1e-3
    assert "must not become 0" in to_float16(source, tmp_path / "out.onnx", feeds=feeds).islands["division"]


def test_nan_weights_and_values_are_named(tmp_path):
    broken = WEIGHT.copy()
    broken[3, 4] = np.nan
    source = save(tmp_path, [node("MatMul", ["x", "w"], ["y"], "product")], {"w": broken})
    with pytest.raises(ExportError, match=r"NaN in w at node product"):
        to_float16(source, tmp_path / "out.onnx", feeds=FEEDS)
    nodes = [node("Sqrt", ["x"], ["root"], "root of less than 0"), node("Relu", ["root"], ["y"], "after")]
    with pytest.raises(ExportError, match=r"NaN in root at node root of less than 0"):
        to_float16(save(tmp_path, nodes, {}), tmp_path / "out.onnx", feeds=FEEDS)
    nodes = [node("Exp", ["a"], ["y"], "power"), node("Mul", ["x", "up"], ["a"], "up")][::-1]
    with pytest.raises(ExportError, match=r"infinity in y at node power"):
        to_float16(save(tmp_path, nodes, {"up": np.float32(100)}), tmp_path / "out.onnx", feeds=FEEDS)
    assert not (tmp_path / "out.onnx").exists()


def test_an_infinite_mask_is_no_fault(tmp_path):
    nodes = [
        node("Greater", ["x", "zero"], ["seen"], "seen"),
        node("Where", ["seen", "x", "never"], ["masked"], "mask"),
        node("Softmax", ["masked"], ["y"], "softmax"),
    ]
    source = save(tmp_path, nodes, {"zero": np.float32(0), "never": np.float32(-np.inf)})
    out = tmp_path / "out.onnx"
    assert to_float16(source, out, feeds=FEEDS).islands == {}
    check_right(source, out)


def test_a_mask_of_the_largest_fp32_number(tmp_path):
    """Only padded texts show it: (1 - mask) * -3.4e38, added to the scores."""
    nodes = [
        node("Gather", ["table", "x"], ["s"], "scores"),
        node("Cast", ["mask"], ["m"], "float", to=TensorProto.FLOAT),
        node("Unsqueeze", ["m", "last"], ["u"], "column"),
        node("Sub", ["one", "u"], ["d"], "dropped"),
        node("Mul", ["d", "least"], ["p"], "penalty"),
        node("Add", ["s", "p"], ["t"], "masked"),
        node("Softmax", ["t"], ["q"], "softmax", axis=1),
        node("Mul", ["q", "s"], ["y"], "after"),
    ]
    tensors = {
        "table": RNG.normal(size=(1000, WIDTH)).astype(np.float32),
        "one": np.float32(1),
        "least": np.finfo(np.float32).min,
        "last": np.array([2]),
    }
    model = onnx.load(save(tmp_path, nodes, tensors, shape=("b", "s"), kind=TensorProto.INT64))
    model.graph.input.append(helper.make_tensor_value_info("mask", TensorProto.INT64, ("b", "s")))
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.shape.CopyFrom(onnx.TensorShapeProto(dim=[{}, {}, {}]))
    source, out = tmp_path / "masked.onnx", tmp_path / "out.onnx"
    onnx.save(model, source)
    report = to_float16(source, out)
    assert set(report.islands) == {"penalty", "masked", "softmax"}
    check_right(source, out, text_feeds(model)[:2])


def test_an_error_too_large_moves_the_worst_nodes_to_fp32(tmp_path):
    """1000 x - 1000 x' loses everything where x and x' differ by less than float16's steps."""
    nodes = [
        node("Add", ["x", "offset"], ["a"], "offset up"),
        node("Sub", ["a", "offset"], ["b"], "offset down"),
        node("MatMul", ["b", "w"], ["y"], "product"),
    ]
    source, out = save(tmp_path, nodes, {"offset": np.float32(1000), "w": WEIGHT}), tmp_path / "out.onnx"
    report = to_float16(source, out, feeds=FEEDS)
    assert {"offset up", "offset down"} <= set(report.islands)
    assert "by itself" in report.islands["offset up"]
    assert report.error < ERROR_BOUND
    check_right(source, out)


def test_weights_are_rounded_to_nearest_and_islands_keep_theirs(tmp_path):
    weight = WEIGHT.copy()
    weight[0, :3] = (1e-9, -1e-9, 3e-8)
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "first"),
        node("Mul", ["a", "large"], ["b"], "overflow"),
        node("MatMul", ["b", "w"], ["y"], "second"),
    ]
    source = save(tmp_path, nodes, {"w": weight, "large": np.float32(2e4)})
    out = tmp_path / "out.onnx"
    to_float16(source, out, feeds=FEEDS)
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(out).graph.initializer}
    np.testing.assert_array_equal(tensors["w"], weight.astype(np.float16))
    readers = {item.name: item.input[1] for item in onnx.load(out).graph.node if item.op_type == "MatMul"}
    np.testing.assert_array_equal(tensors[readers["second"]], weight)


def test_control_flow_reads_float16_values_around_it(tmp_path):
    value = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
    branches = {
        name: helper.make_graph([node(kind, ["a", "w"], ["inner"], name)], name, [], [value])
        for name, kind in (("then_branch", "MatMul"), ("else_branch", "MatMul"))
    }
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "before"),
        node("If", ["yes"], ["c"], "choice", **branches),
        node("Relu", ["c"], ["y"], "after"),
    ]
    source, out = save(tmp_path, nodes, {"w": WEIGHT, "yes": np.array(True)}), tmp_path / "out.onnx"
    assert set(to_float16(source, out, feeds=FEEDS).islands) == {"choice"}
    check_right(source, out)


def test_a_graph_that_is_not_what_was_asked_for_is_refused(tmp_path):
    source = save(tmp_path, OVERFLOW, FACTORS)
    model = prepared(onnx.load(source))
    values = measure(model, FEEDS)
    written = convert(model, values, ["overflow"])
    verify(written, ["overflow"], values, model)
    with pytest.raises(ExportError, match=r"overflow \(Mul\) should read and write tensor\(float16\)"):
        verify(written, [], values, model)
    with pytest.raises(ExportError, match=r"also \(Relu\) should read and write tensor\(float\)"):
        verify(written, ["overflow", "also"], values, model)


def test_text_feeds_are_padded_and_long(tmp_path):
    nodes = [node("Gather", ["table", "x"], ["r"], "rows"), node("ReduceMean", ["r"], ["y"], axes=[1], keepdims=0)]
    table = RNG.normal(size=(1000, WIDTH)).astype(np.float32)
    path = save(tmp_path, nodes, {"table": table}, shape=("b", "s"), kind=TensorProto.INT64)
    model = onnx.load(path)
    model.graph.input.append(helper.make_tensor_value_info("mask", TensorProto.INT64, ("b", "s")))
    feeds = text_feeds(model)
    assert feeds[-1]["x"].shape == (1, 512)
    assert 0 < feeds[0]["mask"].mean() < 1
    small = onnx.load(save(tmp_path, nodes, {"table": table[:10]}, shape=("b", "s"), kind=TensorProto.INT64))
    assert [feed["x"].shape for feed in text_feeds(small)] == [(2, 5)]
    with pytest.raises(ExportError, match="needs calibration inputs"):
        to_float16(save(tmp_path, OVERFLOW, FACTORS), tmp_path / "out.onnx")


def test_inputs_and_constants_in_every_form(tmp_path):
    """Resize reads its scales in fp32, a Constant node is a weight, and an input goes to an island and elsewhere."""
    up = node("Constant", [], ["up"], "", value=numpy_helper.from_array(np.float32(3e4)))
    nodes = [
        up,
        node("Conv", ["x", "w"], ["a"], ""),
        node("Resize", ["a", "", "scales"], ["b"], "resize", mode="nearest"),
        node("Mul", ["x", "up"], ["c"], "large"),
        node("ReduceMax", ["c"], ["d"], "largest", axes=[1, 2, 3], keepdims=1),
        node("Mul", ["d", "less"], ["e"], "small"),
        node("Add", ["b", "e"], ["y"], ""),
        node("ReduceSum", ["x", "axes"], ["z"], "sum", keepdims=0),
    ]
    tensors = {
        "w": RNG.normal(size=(8, 3, 3, 3)).astype(np.float32),
        "scales": np.array([1, 1, 2, 2], np.float32),
        "less": np.float32(1e-4),
        "axes": np.array([1, 2, 3]),
    }
    path = save(tmp_path, nodes, tensors, outputs=("y", "z"), shape=("n", 3, 8, 8))
    model = onnx.load(path)
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, (8, 3, 3, 3)))
    source, out = tmp_path / "source.onnx", tmp_path / "out.onnx"
    onnx.save(model, source)
    feeds = [{"x": RNG.normal(size=(2, 3, 8, 8)).astype(np.float32)}]
    report = to_float16(source, out, feeds=feeds)
    assert set(report.islands) == {"large", "largest", "small"}
    types = {tensor.name: tensor.data_type for tensor in onnx.load(out).graph.initializer}
    assert (types["w"], types["up"]) == (TensorProto.FLOAT16, TensorProto.FLOAT)
    check_right(source, out, feeds)


def test_auto_goes_on_without_an_fp16_that_cannot_be_written(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from edge_convert.convert.recipes import ladder

    tried, said = [], []

    class Search:
        def __init__(self, *_, **__):
            pass

        def attempt(self, name, build, measure):
            tried.append(name)
            if name == "fp16" or broken == name:
                raise ExportError("float16 gives NaN.")
            return SimpleNamespace(refused=name == "int8")

        def found(self):
            return tried[-1]

    monkeypatch.setattr(ladder, "Search", Search)
    profile = SimpleNamespace(gate_bounds=lambda *_: {})
    request = SimpleNamespace(profile=profile, progress=said.append)
    rungs = lambda search: [(name, None) for name in ("int8", "fp16", "fp32")]  # noqa: E731
    broken = None
    assert ladder._climb(request, "feature-extraction", rungs, None, None, tmp_path) == "fp32"
    assert said == ["fp16 is left out: float16 gives NaN."]
    broken = "int8"
    with pytest.raises(ExportError):
        ladder._climb(request, "feature-extraction", rungs, None, None, tmp_path)
