"""Stamping keeps a graph within its target's caps; reading back tells what was really written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from edge_convert.convert.stamp import read_back, stamp
from edge_convert.runtime.device import load_profile
from edge_convert.runtime.errors import ExportError


def write_graph(path: Path, *, opset: int, ir: int) -> Path:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [2, 3], [0.0] * 6)
    packed = helper.make_tensor("p", TensorProto.UINT4, [3], bytes(2), raw=True)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [weight, packed],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    path.write_bytes(model.SerializeToString())
    return path


def test_stamp_lowers_the_ir_version(tmp_path: Path) -> None:
    path = write_graph(tmp_path / "g.onnx", opset=21, ir=13)
    stamp(path, load_profile("jetson"))
    assert onnx.load(path).ir_version == load_profile("jetson").ir_max


def test_stamp_refuses_an_opset_above_the_cap(tmp_path: Path) -> None:
    path = write_graph(tmp_path / "g.onnx", opset=23, ir=13)
    before = path.read_bytes()
    with pytest.raises(ExportError, match=r"opset 23.*at most 21"):
        stamp(path, load_profile("jetson"))
    assert path.read_bytes() == before


def test_read_back_counts_nodes_bytes_and_dims(tmp_path: Path) -> None:
    spec = read_back(write_graph(tmp_path / "g.onnx", opset=21, ir=10))
    assert spec.node_counts == {"MatMul": 1}
    assert spec.initializer_bytes == {"float32": 24, "uint4": 2}
    assert spec.opsets == {"ai.onnx": 21}
    assert [(item.name, item.dtype, item.shape) for item in spec.inputs] == [("x", "float32", ("batch", 2))]


def test_notes_of_the_exporter_are_stripped_at_every_depth(tmp_path: Path) -> None:
    def noted(item: Any) -> Any:
        item.doc_string = "/home/somebody/model.py"
        item.metadata_props.add(key="pkg.torch.onnx.stack_trace", value='File "/home/somebody/model.py", line 3')
        return item

    value = noted(helper.make_tensor_value_info("y", TensorProto.FLOAT, [2]))
    weight = noted(helper.make_tensor("w", TensorProto.FLOAT, [2], [1.0, 2.0]))
    branch = noted(helper.make_graph([noted(helper.make_node("Add", ["x", "w"], ["y"]))], "inner", [], [value]))
    choice = noted(helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch))
    condition = noted(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    x = noted(helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]))
    graph = noted(helper.make_graph([choice], "g", [condition, x], [value], [weight], value_info=[value]))
    model = noted(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10))
    path = tmp_path / "g.onnx"
    onnx.save(model, path)
    stamp(path, load_profile("cpu"))
    assert b"somebody" not in path.read_bytes()
    assert b"stack_trace" not in path.read_bytes()
    onnx.checker.check_model(path, full_check=True)
