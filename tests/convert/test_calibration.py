"""The ranges that calibration finds, and the random tokens that show outliers."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_convert.convert.calibration import (
    METHODS,
    Histogram,
    activation_ranges,
    channel_peaks,
    entropy,
    least_squares,
    minmax,
    observe,
    percentile,
    token_feeds,
)

EVEN = Histogram(np.ones(2048), -1.0, 3.0)
BELL = np.exp(-np.square(np.linspace(-30, 30, 2048)) / 2) * 1e6
TAIL = Histogram(np.append(BELL[:-1], 1.0), -30.0, 30.0)  # one value far out


def test_the_range_of_least_error_cuts_a_far_tail_but_not_an_even_spread() -> None:
    assert least_squares(EVEN) == (-1.0, 3.0)
    low, high = least_squares(TAIL)
    assert -10 < low < -4
    assert 4 < high < 30


def test_minmax_percentile_and_entropy() -> None:
    assert minmax(TAIL) == (-30, 30)
    assert percentile(EVEN) == pytest.approx((-1, 3), abs=0.01)
    low, high = percentile(TAIL)
    assert (low, high) == pytest.approx((-3.72, 3.72), abs=0.1)  # a normal distribution's 0.01 % ends
    low, high = entropy(EVEN)
    assert (low, high) == pytest.approx((-1, 3), rel=0.05)
    low, high = entropy(TAIL)
    assert high < 15
    assert low > -15


@pytest.mark.parametrize("method", METHODS)
def test_every_method_stays_within_what_was_observed_and_keeps_zero(method: str) -> None:
    rng = np.random.default_rng(3)
    for low, high in ((-2.0, 5.0), (0.0, 6.0), (-4.0, 0.0), (0.0, 0.0)):
        histogram = Histogram(rng.uniform(0, 9, 2048), low, high)
        found = METHODS[method](histogram)
        assert low <= found[0] <= 0 <= found[1] <= high


def graph_of(nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], **tensors: np.ndarray) -> onnx.ModelProto:
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    constants = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_ranges_are_of_what_operators_read_and_write() -> None:
    weight = np.eye(4, dtype=np.float32).reshape(4, 4, 1, 1)
    model = graph_of(
        [
            helper.make_node("Conv", ["x", "w"], ["inside"], "c0"),
            helper.make_node("Conv", ["inside", "w"], ["bounded"], "c1"),
            helper.make_node("Relu", ["bounded"], ["positive"], "relu"),
            helper.make_node("Conv", ["positive", "w"], ["y"], "c2"),
        ],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 8, 8])],
        w=weight,
    )
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.uniform(-2, 3, (1, 4, 8, 8)).astype(np.float32)} for _ in range(4)]
    histograms = observe(model, feeds)
    assert list(histograms) == ["x", "inside", "positive"]
    for method in METHODS:
        found = activation_ranges(histograms, method)
        assert found["inside"] == pytest.approx((-2, 3), abs=0.3), method
        assert found["positive"] == (histograms["positive"].low, histograms["positive"].high), method


def test_peaks_are_the_largest_of_each_channel() -> None:
    model = graph_of(
        [helper.make_node("Neg", ["x"], ["z"]), helper.make_node("Abs", ["z"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
    )
    feeds = [{"x": np.array(rows, np.float32)} for rows in ([[1, -5]], [[-3, 2], [2, 2]])]
    peaks = channel_peaks(model, ["x", "z"], feeds)
    assert {name: list(value) for name, value in peaks.items()} == {"x": [3, 5], "z": [3, 5]}


def test_random_tokens_fit_the_encoder_and_every_opening_token_opens_one() -> None:
    names = ("input_ids", "attention_mask", "token_type_ids")
    model = graph_of(
        [
            helper.make_node("Gather", ["words", "input_ids"], ["word"]),
            helper.make_node("Gather", ["types", "token_type_ids"], ["type"]),
            helper.make_node("Add", ["word", "type"], ["sum"]),
            helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMean", ["mask"], ["share"]),
            helper.make_node("Mul", ["sum", "share"], ["y"]),
        ],
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "t"]) for name in names],
        words=np.ones((300, 4), np.float32),
        types=np.ones((2, 4), np.float32),
    )
    feeds = token_feeds(model)
    session = ort.InferenceSession(model.SerializeToString())
    assert all(np.all(session.run(None, feed)[0] == 2) for feed in feeds)
    assert sorted(token for feed in feeds for token in feed["input_ids"][:, 0]) == list(range(256))


def test_no_random_tokens_for_a_graph_of_floats() -> None:
    model = graph_of(
        [helper.make_node("Neg", ["x"], ["y"])], [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])]
    )
    assert token_feeds(model) == []
