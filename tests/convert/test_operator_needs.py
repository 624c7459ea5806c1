"""Graphs whose operators are newer than the target's ONNX Runtime."""

from __future__ import annotations

import dataclasses

import pytest
from onnx import helper

from edge_convert.convert.operator_needs import check_needs, needed_onnxruntime
from edge_convert.runtime.device import load_profile
from edge_convert.runtime.errors import ExportError
from edge_convert.runtime.manifest import GraphSpec

JETSON = load_profile("jetson")


def spec(needed: str) -> GraphSpec:
    return GraphSpec("decoder.onnx", (), (), 10, {"ai.onnx": 21}, {}, {}, onnxruntime_min=needed)


@pytest.mark.parametrize(("bits", "needed"), [((4,), ""), ((4, 8), "1.23"), ((), "")])
def test_the_oldest_release_is_that_of_the_newest_operator(bits, needed):
    nodes = [
        helper.make_node("MatMulNBits", ["x", "w", "s"], [f"y{size}"], domain="com.microsoft", bits=size)
        for size in bits
    ]
    model = helper.make_model(helper.make_graph(nodes, "g", [], []))
    assert needed_onnxruntime(model) == needed


def test_a_board_whose_range_begins_earlier_gets_a_warning():
    (warning,) = check_needs(spec("1.23"), JETSON)
    assert "needs ONNX Runtime 1.23 or newer (8-bit MatMulNBits)" in warning
    assert "begins at 1.20" in warning
    assert check_needs(spec(""), JETSON) == ()
    assert check_needs(spec("1.23"), load_profile("jetson-orin-nano-8gb-jp7")) == ()


def test_a_board_whose_range_ends_earlier_is_refused():
    with pytest.raises(ExportError, match=r"needs ONNX Runtime 1.23 or newer .* ends at 1.22"):
        check_needs(spec("1.23"), dataclasses.replace(JETSON, onnxruntime_max="1.22"))
    assert check_needs(spec("1.23"), dataclasses.replace(JETSON, onnxruntime_max="1.23.1"))
