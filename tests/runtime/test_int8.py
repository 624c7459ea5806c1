from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from edge_convert.runtime import int8
from edge_convert.runtime.one_node import FLOAT, INT8, INT32, UINT8, one_node_graph


def product(entries: dict[str, str]) -> bool:
    """Whether a dynamic product of large values is exact in a session with these entries."""
    weights = np.full((64, 8), 127, np.int8)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, ["n", 64])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.INT32, ["n", 8])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    for name, value in entries.items():
        options.add_session_config_entry(name, value)
    x = np.full((1, 64), 255, np.uint8)
    (found,) = ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})
    return bool((found == x.astype(np.int32) @ weights.astype(np.int32)).all())


def test_saturation_is_what_a_session_without_entries_does() -> None:
    assert int8.saturates() is not product({})


def test_the_entries_make_products_exact() -> None:
    assert product(int8.exact_int8())


@pytest.mark.parametrize("saturating", [True, False])
def test_entries_only_where_the_cpu_saturates(monkeypatch: pytest.MonkeyPatch, saturating: bool) -> None:
    monkeypatch.setattr(int8, "saturates", lambda: saturating)
    assert int8.exact_int8() == ({"session.x64quantprecision": "1"} if saturating else {})


def test_where_it_cannot_be_asked_exact_kernels_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "one_node_graph", lambda *_: one_node_graph("NoSuchOperator", (), {}, (FLOAT, (1,))))
    assert int8.saturates.__wrapped__() is True


def test_one_node_graphs_are_valid_onnx() -> None:
    data = one_node_graph(
        "MatMulInteger", ("a", "b"), {"a": (UINT8, (4, 300)), "b": (INT8, (300, 1000))}, (INT32, (4, 1000))
    )
    model = onnx.load_from_string(data)
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.input] == ["a", "b"]
    assert [d.dim_value for d in model.graph.input[1].type.tensor_type.shape.dim] == [300, 1000]
