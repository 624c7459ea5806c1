from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_convert.convert.calibration import activation_ranges, observe
from edge_convert.convert.fp16 import to_float16
from edge_convert.convert.graph_tools import cpu_session
from edge_convert.convert.mixed_precision import CLOSE, free_outputs, output_errors, put_back, shield, worst
from edge_convert.convert.quantize import (
    _write_dynamic,
    _write_static,
    fold_constants,
    product_costs,
    quantise_dynamic,
    quantise_static,
    rename_output,
    split_outliers,
)
from edge_convert.convert.rounding import columns, compensated
from edge_convert.convert.stamp import read_back
from edge_convert.runtime.errors import ExportError

RNG = np.random.default_rng(0)
TABLE = (RNG.normal(size=(1000, 128)) * RNG.uniform(0.01, 3, (1000, 1))).astype(np.float32)
WEIGHT = RNG.normal(size=(128, 64)).astype(np.float32)


def save(path, nodes, inputs, outputs, tensors):
    graph = helper.make_graph(
        nodes, "g", inputs, outputs, [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return path


@pytest.fixture
def encoder(tmp_path):
    return save(
        tmp_path / "in.onnx",
        [
            helper.make_node("Gather", ["table", "ids"], ["rows"], "gather"),
            helper.make_node("MatMul", ["rows", "weight"], ["out"], "product"),
        ],
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", 64])],
        {"table": TABLE, "weight": WEIGHT},
    )


@pytest.fixture
def network(tmp_path):
    return save(
        tmp_path / "in.onnx",
        [
            helper.make_node("Pad", ["x", "pads"], ["padded"], "pad"),
            helper.make_node("Conv", ["padded", "w1"], ["a"], "conv1", kernel_shape=[3, 3]),
            helper.make_node("BatchNormalization", ["a", "g", "b", "m", "v"], ["n"], "norm"),
            helper.make_node("Relu", ["n"], ["r"], "relu"),
            helper.make_node("Conv", ["r", "w2"], ["y"], "conv2", kernel_shape=[1, 1]),
        ],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 8, 8])],
        {
            "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64),
            "w1": RNG.normal(size=(8, 3, 3, 3)).astype(np.float32),
            "w2": RNG.normal(size=(4, 8, 1, 1)).astype(np.float32),
            "g": np.full(8, 1.5, np.float32),
            "b": np.full(8, 0.1, np.float32),
            "m": np.full(8, 0.2, np.float32),
            "v": np.full(8, 0.9, np.float32),
        },
    )


def run(path, feed):
    return cpu_session(path).run(None, feed)[0]


def relative_error(found, wanted):
    return np.sqrt(((found - wanted) ** 2).mean() / (wanted**2).mean())


def operators(path):
    return [node.op_type for node in onnx.load(path).graph.node]


def test_dynamic_int8_is_close_and_small(encoder, tmp_path):
    feed = {"ids": np.arange(1000, dtype=np.int64)}
    out = tmp_path / "out.onnx"
    quantise_dynamic(encoder, out)
    assert out.stat().st_size < encoder.stat().st_size / 3
    assert "MatMulInteger" in operators(out)
    kinds = {tensor.name: tensor.data_type for tensor in onnx.load(out).graph.initializer}
    assert kinds["table_int8"] == TensorProto.INT8
    assert "table" not in kinds
    assert relative_error(run(out, feed), run(encoder, feed)) < 0.03


def test_a_table_keeps_one_scale_per_row(encoder, tmp_path):
    """Rows of very different size stay right, which one scale for the whole table would lose."""
    out = tmp_path / "out.onnx"
    quantise_dynamic(encoder, out, exclude=["product"])
    smallest = int(np.abs(TABLE).max(1).argmin())
    feed = {"ids": np.array([smallest], np.int64)}
    assert relative_error(run(out, feed), run(encoder, feed)) < 0.02


@pytest.fixture
def outliers(tmp_path):
    """Two products that read one value, of which channel 5 reaches forty times as far as the others."""
    size = np.ones(96, np.float32)
    size[5] = 40
    return save(
        tmp_path / "in.onnx",
        [
            helper.make_node("Mul", ["x", "size"], ["sized"], "sizing"),
            helper.make_node("MatMul", ["sized", "w1"], ["y1"], "product1"),
            helper.make_node("MatMul", ["sized", "w2"], ["y2"], "product2"),
            helper.make_node("Sub", ["y1", "y2"], ["y"], "difference"),
        ],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 96])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 32])],
        {"size": size, **{f"w{at}": RNG.normal(size=(96, 32)).astype(np.float32) / size[:, None] for at in (1, 2)}},
    )


def test_splitting_outliers_keeps_the_product_and_makes_it_precise(outliers, tmp_path):
    feeds = [{"x": RNG.uniform(-1, 1, (64, 96)).astype(np.float32)} for _ in range(3)]
    wanted = run(outliers, feeds[0])
    model = onnx.load(outliers)
    assert split_outliers(model, feeds) == 1
    onnx.checker.check_model(model)
    assert {"w1", "w2"}.isdisjoint(tensor.name for tensor in model.graph.initializer)
    split = tmp_path / "split.onnx"
    onnx.save(model, split)
    np.testing.assert_allclose(run(split, feeds[0]), wanted, rtol=1e-4, atol=1e-4)
    errors = []
    for calibration in ([], feeds):
        quantise_dynamic(outliers, tmp_path / "out.onnx", feeds=calibration)
        errors.append(relative_error(run(tmp_path / "out.onnx", feeds[0]), wanted))
    assert errors[1] < errors[0] / 3


def test_an_outlier_a_thousand_times_the_others_is_split_and_its_product_named(tmp_path):
    random = np.random.default_rng(1)
    size = np.ones(96, np.float32)
    size[5] = 1000
    source = save(
        tmp_path / "in.onnx",
        [
            helper.make_node("Mul", ["x", "size"], ["sized"], "sizing"),
            helper.make_node("MatMul", ["sized", "w1"], ["h"], "ruined"),
            helper.make_node("MatMul", ["h", "w2"], ["y"], "harmless"),
        ],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 96])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 32])],
        {
            "size": size,
            "w1": random.normal(size=(96, 32)).astype(np.float32) / size[:, None],
            "w2": random.normal(size=(32, 32)).astype(np.float32),
        },
    )
    feeds = [{"x": random.uniform(-1, 1, (64, 96)).astype(np.float32)} for _ in range(3)]
    wanted, out, errors = run(source, feeds[0]), tmp_path / "out.onnx", []
    costliest = worst(product_costs(source, feeds), 1)
    for given, left in (([], []), (feeds, []), (feeds, costliest)):
        quantise_dynamic(source, out, feeds=given, exclude=left)
        errors.append(relative_error(run(out, feeds[0]), wanted))
    assert errors[0] > 0.5
    assert errors[1] < errors[0] / 2
    assert errors[2] < errors[1] / 4
    assert errors[2] < 0.06
    assert read_back(out).fp32_nodes == ("ruined",)


def test_products_without_outliers_are_not_split(encoder):
    model = onnx.load(encoder)
    before = model.SerializeToString()
    assert split_outliers(model, [{"ids": np.arange(1000, dtype=np.int64)}]) == 0
    assert model.SerializeToString() == before


def test_the_product_that_costs_most_goes_back_to_fp32(outliers, tmp_path):
    model = onnx.load(outliers)
    small = next(tensor for tensor in model.graph.initializer if tensor.name == "w1")
    small.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(small) / 100, "w1"))
    onnx.save(model, outliers)
    feeds = [{"x": RNG.uniform(-1, 1, (64, 96)).astype(np.float32)}]
    costs = product_costs(outliers, feeds)
    assert worst(costs, 2) == ["product2", "product1"]
    quantise_dynamic(outliers, tmp_path / "out.onnx", feeds=feeds, exclude=worst(costs, 1))
    assert operators(tmp_path / "out.onnx").count("MatMulInteger") == 1


def test_costs_are_the_mean_over_evenly_spread_feeds(outliers, tmp_path):
    model = onnx.load(outliers)
    feeds = [{"x": np.full((2, 96), value, np.float32)} for value in range(11)]
    seen = []

    def error(expected, found):
        seen.append(expected[0, 0] / 6)
        return 0.5

    costs = output_errors(
        model, lambda name: _write_dynamic(model, tmp_path / "one.onnx", only=[name]), ["product1"], feeds, error
    )
    assert costs == {"product1": 0.5}
    np.testing.assert_allclose(np.array(seen) / seen[-1], [0, 0.2, 0.4, 0.6, 0.8, 1], atol=1e-5)


def test_dynamic_int8_that_changes_nothing_is_an_error(tmp_path):
    source = save(
        tmp_path / "in.onnx",
        [helper.make_node("Relu", ["x"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
        {},
    )
    with pytest.raises(ExportError, match="changed nothing"):
        quantise_dynamic(source, tmp_path / "out.onnx")


def test_fp16_keeps_the_types_outside(encoder, tmp_path):
    feed = {"ids": np.arange(100, dtype=np.int64)}
    out = tmp_path / "out.onnx"
    to_float16(encoder, out)
    assert out.stat().st_size < encoder.stat().st_size * 0.55
    found = run(out, feed)
    assert found.dtype == np.float32
    assert relative_error(found, run(encoder, feed)) < 2e-3


def test_folding_keeps_the_values_and_drops_pad_and_norm(network, tmp_path):
    out = tmp_path / "out.onnx"
    fold_constants(network, out)
    assert {"Pad", "BatchNormalization"}.isdisjoint(operators(out))
    feed = {"x": RNG.normal(size=(1, 3, 8, 8)).astype(np.float32)}
    np.testing.assert_allclose(run(out, feed), run(network, feed), rtol=1e-4, atol=1e-4)
    assert {entry.domain for entry in onnx.load(out).opset_import} == {""}
    assert onnx.load(out).ir_version == 8


def test_static_int8_is_close_and_leaves_the_first_convolutions(network, tmp_path):
    folded, out = tmp_path / "folded.onnx", tmp_path / "out.onnx"
    fold_constants(network, folded)
    feeds = [{"x": RNG.normal(size=(1, 3, 8, 8)).astype(np.float32)} for _ in range(8)]
    quantise_static(folded, out, feeds, fp32_convolutions=1)
    kinds = {tensor.name: tensor.data_type for tensor in onnx.load(out).graph.initializer}
    assert kinds["w2_quantized"] == TensorProto.INT8
    assert "w1_quantized" not in kinds
    scales = {tensor.name: list(tensor.dims) for tensor in onnx.load(out).graph.initializer}
    assert scales["w2_scale"] == [4]
    assert relative_error(run(out, feeds[0]), run(network, feeds[0])) < 0.05


def test_static_int8_without_feeds_is_one_sentence(network, tmp_path):
    with pytest.raises(ExportError, match="needs calibration feeds"):
        quantise_static(network, tmp_path / "out.onnx", [])


def test_renaming_an_output_that_is_taken_inside(encoder, tmp_path):
    feed = {"ids": np.arange(3, dtype=np.int64)}
    wanted = run(encoder, feed)
    rename_output(encoder, "out", "rows")
    session = ort.InferenceSession(str(encoder))
    assert [value.name for value in session.get_outputs()] == ["rows"]
    np.testing.assert_array_equal(session.run(None, feed)[0], wanted)


def test_weights_are_rounded_so_that_their_errors_cancel():
    """Inputs that move together: the summed error of an output is far below that of nearest rounding."""
    inputs = (RNG.normal(size=(1, 2, 500)).repeat(8, axis=1) + 0.01 * RNG.normal(size=(1, 16, 500))).astype(np.float32)
    rows = RNG.normal(size=(1, 4, 16)).astype(np.float32)
    scale = np.abs(rows).max(2) / 127
    found = compensated(rows, scale, inputs @ inputs.transpose(0, 2, 1))
    assert np.array_equal(found, np.rint(found))
    assert np.abs(found).max() <= 127
    nearest = np.rint(rows / scale[..., None])
    errors = [np.square((rows - integers * scale[..., None]) @ inputs).mean() for integers in (found, nearest)]
    assert errors[0] < errors[1] / 4


@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ((6, 4, 3, 3), {"pads": [1, 0, 1, 2], "strides": [2, 1]}),
        ((8, 1, 3, 3), {"group": 4, "pads": [2, 2, 2, 2], "dilations": [2, 2]}),
        ((6, 2, 1, 1), {"group": 2}),
    ],
)
def test_columns_are_what_a_convolution_multiplies(tmp_path, shape, attributes):
    weights = RNG.normal(size=shape).astype(np.float32)
    node = helper.make_node("Conv", ["x", "w"], ["y"], "conv", kernel_shape=shape[2:], **attributes)
    path = save(
        tmp_path / "in.onnx",
        [node],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 9, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        {"w": weights},
    )
    x = RNG.normal(size=(1, 4, 9, 8)).astype(np.float32)
    groups = attributes.get("group", 1)
    products = weights.reshape(groups, shape[0] // groups, -1) @ columns(node, weights, x)
    np.testing.assert_allclose(products.reshape(-1), run(path, {"x": x}).reshape(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [1, 4])
def test_the_convolution_whose_quantisation_ruins_the_output_stays_fp32(tmp_path, bad):
    """Its first weights are a thousand times the others, for a channel that is always zero."""
    weights = [RNG.normal(size=(8, 8, 1, 1)).astype(np.float32) for _ in range(6)]
    weights[bad - 1][0] = 0
    weights[bad][:, 0] = 1000
    values = ["x", *(f"v{at}" for at in range(5)), "y"]
    source = save(
        tmp_path / "in.onnx",
        [helper.make_node("Conv", [values[at], f"w{at}"], [values[at + 1]], f"c{at}") for at in range(6)],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8, 8, 8])],
        {f"w{at}": value for at, value in enumerate(weights)},
    )
    out = tmp_path / "out.onnx"
    feeds = [{"x": RNG.normal(size=(1, 8, 8, 8)).astype(np.float32)} for _ in range(8)]
    found = quantise_static(source, out, feeds)
    kinds = {tensor.name: tensor.data_type for tensor in onnx.load(out).graph.initializer}
    assert [at for at in range(6) if kinds.get(f"w{at}") == TensorProto.FLOAT] == [bad]
    assert relative_error(run(out, feeds[0]), run(source, feeds[0])) < 0.1
    assert len(found["errors_by_fp32_nodes"]) == 2
    assert found["errors_by_fp32_nodes"]["1"] < found["errors_by_fp32_nodes"]["0"] / 5
    quantise_static(source, out, feeds, fp32_convolutions=0)
    assert relative_error(run(out, feeds[0]), run(source, feeds[0])) > 0.5


def test_the_fewest_nodes_go_back_that_bring_the_output_close():
    costs = {f"n{at}": 1.0 + at for at in range(30)}  # at most 5 of them

    def tried(errors, **options):
        nodes, found = put_back(costs, lambda nodes: errors[len(nodes)], **options)
        return nodes, list(found.items())

    assert tried([CLOSE]) == ([], [("0", CLOSE)])
    assert tried([9, 1, CLOSE / 2, 0]) == (["n29", "n28"], [("0", 9), ("1", 1), ("2", CLOSE / 2)])
    assert tried([9, 8, 7, 6, 7, 8])[0] == ["n29", "n28", "n27"]
    assert tried([0, 0, 0, 0], at_least=3) == (["n29", "n28", "n27"], [("3", 0)])
    assert tried([9] * 30, at_least=8) == ([f"n{29 - at}" for at in range(8)], [("8", 9)])
    assert put_back({"only": 1.0}, lambda nodes: 1.0 - len(nodes), at_least=4) == ([], {"0": 1.0})


def test_onnx_runtime_leaves_fp32_convolutions_between_int8_ones_alone(tmp_path):
    """Its optimiser would give them int8 weights with one scale for all channels."""
    channels = (10.0 ** -np.arange(4)).astype(np.float32).reshape(4, 1, 1, 1)
    weights = {f"w{at}": RNG.normal(size=(4, 1, 3, 3)).astype(np.float32) for at in range(3)}
    weights["w1"] *= channels
    weights["w2"] /= channels
    source = save(
        tmp_path / "in.onnx",
        [
            helper.make_node("Conv", ["x", "w0"], ["a"], "c0", group=4, kernel_shape=[3, 3]),
            helper.make_node("Conv", ["a", "w1"], ["b"], "c1", group=4, kernel_shape=[3, 3]),
            helper.make_node("Relu", ["b"], ["c"], "relu"),
            helper.make_node("Conv", ["c", "w2"], ["y"], "c2", group=4, kernel_shape=[3, 3]),
        ],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 9, 9])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 3, 3])],
        weights,
    )
    out, feed = tmp_path / "out.onnx", {"x": RNG.normal(size=(1, 4, 9, 9)).astype(np.float32)}
    histograms = observe(onnx.load(source), [feed])
    _write_static(source, out, feed, ["c1"], activation_ranges(histograms, "minmax"))
    wanted = cpu_session(out, optimise=False).run(None, feed)[0]
    unshielded = relative_error(run(out, feed), wanted)
    model = onnx.load(out)
    assert shield(model) == 1
    onnx.checker.check_model(model)
    onnx.save(model, out)
    assert unshielded > 0.05
    assert relative_error(run(out, feed), wanted) < unshielded / 4


def test_outputs_are_given_as_they_are_computed(tmp_path):
    """In 256 steps two close logits would be equal; the value is read inside the graph too."""
    pair = ["scale", "zero"]
    model = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Relu", ["x"], ["inner"], "relu"),
                helper.make_node("QuantizeLinear", ["inner", *pair], ["steps"]),
                helper.make_node("DequantizeLinear", ["steps", *pair], ["y"]),
                helper.make_node("Neg", ["inner"], ["z"]),
            ],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("y", "z")],
            [
                numpy_helper.from_array(np.float32(0.1), "scale"),
                numpy_helper.from_array(np.uint8(0), "zero"),
            ],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    assert free_outputs(model) == 1
    onnx.checker.check_model(model)
    assert not model.graph.initializer
    x = np.array([0.51, 0.52], np.float32)
    found = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    np.testing.assert_array_equal(found, [x, -x])
    assert free_outputs(model) == 0
