"""ONNX models of one node, to ask ONNX Runtime what it can do here; written by hand, as devices have no onnx package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FLOAT, UINT8, INT8, INT32 = 1, 2, 3, 6  # TensorProto.DataType
Kind = tuple[int, Sequence[int]]  # element type and shape


def one_node_graph(operator: str, reads: Sequence[str], inputs: Mapping[str, Kind], output: Kind) -> bytes:
    """A serialized ONNX model, IR 8 and opset 13, whose node reads `reads` and gives `y`.

    From the field numbers of the public schema (onnx.proto): ModelProto ir_version=1, graph=7, opset_import=8;
    GraphProto node=1, name=2, input=11, output=12; NodeProto input=1, output=2, op_type=4; ValueInfoProto name=1,
    type=2; TypeProto tensor_type=1; Tensor elem_type=1, shape=2; TensorShapeProto dim=1; Dimension dim_value=1.
    """
    node = b"".join(_field(1, name.encode()) for name in reads) + _field(2, b"y") + _field(4, operator.encode())
    graph = _field(1, node) + _field(2, b"g")
    graph += b"".join(_field(11, _value(name, kind)) for name, kind in inputs.items()) + _field(12, _value("y", output))
    return b"\x08\x08" + _field(7, graph) + _field(8, b"\x10\x0d")


def _value(name: str, kind: Kind) -> bytes:
    element, shape = kind
    dimensions = b"".join(_field(1, b"\x08" + _varint(size)) for size in shape)
    tensor = b"\x08" + _varint(element) + _field(2, dimensions)
    return _field(1, name.encode()) + _field(2, _field(1, tensor))


def _field(number: int, payload: bytes) -> bytes:
    """A length-delimited field; number < 16."""
    return bytes([number << 3 | 2]) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    groups = []
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])
