"""Reads back from a written graph how each weight is stored and what its nodes compute in; asks no converter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

_LARGE = 1024  # values; smaller constants are biases, scales and shapes
_PASSING = ("Cast", "DequantizeLinear", "QuantizeLinear", "Identity", "Reshape", "Transpose", "Unsqueeze")
_STEPS = 4
_PRODUCTS = (
    "MatMul", "Gemm", "Conv", "ConvTranspose", "MatMulNBits", "FusedMatMul", "FusedConv", "Attention", "FusedGemm",
)  # fmt: skip
_INTEGER_PRODUCTS = (
    "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul", "QLinearConv", "ConvInteger",
    "QAttention", "QGemm",
)  # fmt: skip
_LOOKUPS = ("Gather", "GatherBlockQuantized")
_INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy_level
_FLOATS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def weight_formats(model: onnx.ModelProto) -> dict[str, str]:
    """How each node with a large constant stores it, by the node's name: "int4 block 32", "int8", "fp16", ...

    Casts, dequantisation and changes of shape between the constant and the node are looked through.
    """
    stored = _Stored(model)
    found: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type not in (*_PRODUCTS, *_INTEGER_PRODUCTS, *_LOOKUPS) or not node.name:
            continue
        large = [tensor for tensor in stored.weights(node) if math.prod(tensor.dims) >= _LARGE]
        if not large:
            continue
        weight = max(large, key=tensor_bytes)
        if node.op_type == "MatMulNBits":
            found[node.name] = f"int{_number(node, 'bits', 4)} block {_number(node, 'block_size', 0)}"
        else:
            name = dtype_name(weight.data_type)
            found[node.name] = {"uint8": "int8", **_FLOATS}.get(name, name)
    return found


def product_types(model: onnx.ModelProto) -> dict[str, str]:
    """What each product with a weight (matrix product, convolution) computes in: "int8", "fp16", "fp32", by its name.

    int8: its activations and weights are 8-bit integers when they meet, whatever the weight is stored in.
    """
    return _products(model, value_types(model))


def fp32_nodes(model: onnx.ModelProto) -> tuple[str, ...]:
    """Names of the nodes that compute in fp32 in a graph whose products are narrower; empty if none is.

    With products in float16 every node counts that reads or writes float32, but for casts. With products in int8 the
    other products with a weight do; what lies between them is fp32 as a rule.
    """
    types = value_types(model)
    products = _products(model, types)
    if "fp16" in products.values():
        inside = [node for node in model.graph.node if node.op_type != "Cast"]
        return tuple(dict.fromkeys(_label(node) for node in inside if _computed(node, types) == "fp32"))
    if "int8" in products.values():
        return tuple(name for name, kind in products.items() if kind == "fp32")
    return ()


def value_types(model: onnx.ModelProto) -> dict[str, str]:
    """The element type (NumPy's name) of every value of the main graph, from the operators' schemas.

    Operators that ONNX has no schema of write what their first floating-point input is.
    """
    graph = model.graph
    types = {tensor.name: dtype_name(tensor.data_type) for tensor in graph.initializer}
    types |= {value.name: dtype_name(value.type.tensor_type.elem_type) for value in graph.input}
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    for node in graph.node:
        for at, name in enumerate(node.output):
            kind = _output_type(node, at, types, opsets)
            if name and kind is not None:
                types[name] = kind
    return types


def dtype_name(data_type: int) -> str:
    """NumPy's name of an ONNX element type."""
    import onnx

    name = str(onnx.TensorProto.DataType.Name(data_type)).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Bytes of the tensor's elements; 4-bit types take half a byte each."""
    import onnx

    count = int(math.prod(tensor.dims))
    if tensor.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4):
        return (count + 1) // 2
    return count * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


class _Stored:
    """The constants of a graph and what is made from them without arithmetic."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self.makers = {name: node for node in model.graph.node for name in node.output}

    def weights(self, node: onnx.NodeProto) -> list[onnx.TensorProto]:
        """The constants that `node` reads and that are of the model: no scales, and nothing that a pass of ours added."""
        found = [self._constant(name) for name in node.input]
        return [
            tensor
            for tensor in found
            if tensor is not None and not tensor.name.startswith("/edge/") and ".scales" not in tensor.name
        ]

    def _constant(self, name: str) -> onnx.TensorProto | None:
        """The initializer that the value `name` is made from; None if there is none."""
        for _ in range(_STEPS):
            if name in self._tensors:
                return self._tensors[name]
            maker = self.makers.get(name)
            if maker is None or maker.op_type not in _PASSING or not maker.input:
                return None
            name = maker.input[0]
        return None


def _products(model: onnx.ModelProto, types: Mapping[str, str]) -> dict[str, str]:
    stored = _Stored(model)
    found: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type not in (*_PRODUCTS, *_INTEGER_PRODUCTS):
            continue
        if not any(len(tensor.dims) > 1 for tensor in stored.weights(node)):
            continue
        makers = [stored.makers.get(name) for name in node.input[:2]]
        integers = all(maker is not None and maker.op_type == "DequantizeLinear" for maker in makers)
        rounded = node.op_type == "MatMulNBits" and _number(node, "accuracy_level", 0) == _INT8_ACTIVATIONS
        if node.op_type in _INTEGER_PRODUCTS or integers or rounded:
            found[_label(node)] = "int8"
        elif (kind := _computed(node, types)) is not None:
            found[_label(node)] = kind
    return found


def _label(node: onnx.NodeProto) -> str:
    """The node's name, or that of the first value it writes."""
    return str(node.name or node.output[0])


def _number(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == name), default)


def _computed(node: onnx.NodeProto, types: Mapping[str, str]) -> str | None:
    """The floating-point type that a node writes, else the one that it reads; None if it has none."""
    for name in (*node.output[:1], *node.input):
        if types.get(name) in _FLOATS:
            return _FLOATS[types[name]]
    return None


def _output_type(node: onnx.NodeProto, at: int, types: Mapping[str, str], opsets: Mapping[str, int]) -> str | None:
    """The element type of the output number `at`; None if it cannot be told."""
    import onnx

    attributes = {attribute.name: attribute for attribute in node.attribute}
    for name in ("to", "dtype"):
        if name in attributes:
            return dtype_name(attributes[name].i)
    if "value" in attributes and attributes["value"].HasField("t"):  # Constant and ConstantOfShape
        return dtype_name(attributes["value"].t.data_type)
    for name, first in (("then_branch", 0), ("body", 1 if node.op_type == "Loop" else 0)):
        if name in attributes:
            return dtype_name(attributes[name].g.output[at + first].type.tensor_type.elem_type)
    if node.op_type in ("Constant", "ConstantOfShape"):
        return "int64" if {"value_int", "value_ints"} & set(attributes) else "float32"
    try:
        domain = "" if node.domain == "ai.onnx" else node.domain
        schema = onnx.defs.get_schema(node.op_type, opsets.get(domain, opsets.get("ai.onnx", 1)), domain)
    except onnx.defs.SchemaError:
        return next((types[name] for name in node.input if types.get(name) in _FLOATS), None)
    wanted = schema.outputs[min(at, len(schema.outputs) - 1)].type_str
    allowed = [str(kind) for item in schema.type_constraints if item.type_param_str == wanted
               for kind in item.allowed_type_strs] or [str(wanted)]  # fmt: skip
    if len(allowed) == 1:  # no type variable, or one that stands for one type only
        only = allowed[0][len("tensor(") : -1]
        return {"float": "float32", "double": "float64"}.get(only, only)
    for index, name in enumerate(node.input):
        if name in types and schema.inputs[min(index, len(schema.inputs) - 1)].type_str == wanted:
            return types[name]
    return None
