"""The images that calibrate never judge; the ranges that calibration finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_convert.convert.calibration import (
    activation_ranges,
    calibration_images,
    channel_peaks,
    judging_images,
    least_error_range,
    token_feeds,
)
from edge_convert.runtime.errors import ConversionError, UsageError


def make_folder(folder: Path, count: int) -> Path:
    folder.mkdir()
    for index in range(count):
        (folder / f"{index:02}.PNG").touch()
    (folder / "notes.md").touch()
    return folder


@pytest.mark.parametrize("count", [8, 9, 10, 31])
def test_every_image_is_used_once(tmp_path: Path, count: int) -> None:
    folder = make_folder(tmp_path / "images", count)
    calibration, judging = calibration_images(folder), judging_images(folder)
    assert not set(calibration) & set(judging)
    assert len(calibration) + len(judging) == count
    assert len(judging) == count // 3


def test_too_few_images(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"has 7 images.*at least 8"):
        calibration_images(make_folder(tmp_path / "images", 7))


def test_no_folder(tmp_path: Path) -> None:
    assert judging_images(None) == []
    with pytest.raises(UsageError, match="--calibration"):
        calibration_images(None)
    with pytest.raises(ConversionError, match="does not exist"):
        judging_images(tmp_path / "nowhere")


def test_the_range_of_least_error_cuts_a_far_tail_but_not_an_even_spread() -> None:
    even = np.ones(2048)
    assert least_error_range(even, (-1.0, 3.0)) == (-1.0, 3.0)
    tail = np.exp(-np.square(np.linspace(-30, 30, 2048)) / 2) * 1e6
    tail[-1] = 1
    low, high = least_error_range(tail, (-30.0, 30.0))
    assert -10 < low < -4
    assert 4 < high < 30


def graph_of(nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], **tensors: np.ndarray) -> onnx.ModelProto:
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    constants = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_ranges_are_of_unbounded_values_inside(tmp_path: Path) -> None:
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
    onnx.save(model, tmp_path / "in.onnx")
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.uniform(-2, 3, (1, 4, 8, 8)).astype(np.float32)} for _ in range(4)]
    found = activation_ranges(tmp_path / "in.onnx", feeds)
    assert list(found) == ["inside"]
    assert found["inside"] == pytest.approx((-2, 3), abs=0.2)


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
