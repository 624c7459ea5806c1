"""Stamps a graph with what its target can read, and reads back what was really written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edge_convert.runtime.device import DeviceProfile
from edge_convert.runtime.errors import ExportError, SourceError
from edge_convert.runtime.manifest import CacheSpec, GraphSpec, TensorSpec

if TYPE_CHECKING:
    import onnx

_LARGE = 1024  # values; smaller constants are biases, scales and shapes
_PASSING = ("Cast", "DequantizeLinear", "QuantizeLinear", "Identity", "Reshape", "Transpose", "Unsqueeze")
_STEPS = 4
_WEIGHTED = (
    "MatMul", "Gemm", "Conv", "ConvTranspose", "Gather", "MatMulNBits", "FusedMatMul", "FusedConv", "MatMulInteger",
    "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul", "QLinearConv", "ConvInteger", "Attention",
    "QAttention", "GatherBlockQuantized",
)  # fmt: skip


def stamp(path: Path, profile: DeviceProfile) -> None:
    """Lower the IR version of the graph at `path` to the target's cap, in place.

    The opset is never relabelled: its operators have the meaning of the version they were exported at,
    so an opset above the cap raises ExportError.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx") and entry.version > profile.opset_max:
            raise ExportError(
                f"{path.name} has opset {entry.version}, and target {profile.name} reads at most "
                f"{profile.opset_max}. Export it at opset {profile.opset_max} or lower."
            )
    if model.ir_version > profile.ir_max:
        model.ir_version = profile.ir_max
        path.write_bytes(model.SerializeToString())


def check_finite(path: Path, name: str) -> None:
    """Raise SourceError if a weight of the exported graph at `path` is no number (NaN), or a matrix has infinities.

    Vectors may hold minus infinity, as masks do. `name` is the source's, for the message.
    """
    import onnx_ir as ir

    for label, value in ir.load(path).graph.initializers.items():
        tensor = value.const_value
        if tensor is None or not tensor.dtype.is_floating_point() or tensor.size < _LARGE:
            continue
        numbers = np.asarray(tensor.numpy(), dtype=np.float32)
        bad = int(np.isnan(numbers).sum()) or (int(np.isinf(numbers).sum()) if numbers.ndim > 1 else 0)
        if bad:
            raise SourceError(
                f"The weight {label} of {name} has {bad} values that are not finite numbers, of {tensor.size}. Training "
                "broke or the file is damaged: give another checkpoint."
            )


def read_back(path: Path, cache: CacheSpec | None = None) -> GraphSpec:
    """The GraphSpec of the file at `path`, from its own bytes."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    initializer_bytes: Counter[str] = Counter()
    for tensor in model.graph.initializer:
        initializer_bytes[_dtype_name(tensor.data_type)] += _tensor_bytes(tensor)
    return GraphSpec(
        file=path.name,
        inputs=tuple(_tensor_spec(value) for value in model.graph.input),
        outputs=tuple(_tensor_spec(value) for value in model.graph.output),
        ir_version=model.ir_version,
        opsets={entry.domain or "ai.onnx": entry.version for entry in model.opset_import},
        node_counts=dict(sorted(Counter(node.op_type for node in model.graph.node).items())),
        initializer_bytes=dict(sorted(initializer_bytes.items())),
        cache=cache,
        formats=weight_formats(model),
    )


def weight_formats(model: onnx.ModelProto) -> dict[str, str]:
    """How each node with a large constant stores it, by the node's name: "int4 block 32", "int8", "fp16", ...

    Casts, dequantisation and changes of shape between the constant and the node are looked through.
    """
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    makers = {name: node for node in model.graph.node for name in node.output}
    found: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type not in _WEIGHTED or not node.name:
            continue
        stored = [_stored(name, tensors, makers) for name in node.input]
        large = [tensor for tensor in stored if tensor is not None and _is_weight(tensor)]
        if not large:
            continue
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        weight = max(large, key=_tensor_bytes)
        if node.op_type == "MatMulNBits":
            found[node.name] = f"int{attributes.get('bits', 4)} block {attributes['block_size']}"
        else:
            name = _dtype_name(weight.data_type)
            found[node.name] = {"float32": "fp32", "float16": "fp16", "uint8": "int8"}.get(name, name)
    return found


def _is_weight(tensor: onnx.TensorProto) -> bool:
    """Whether the constant is a large matrix of the model: no scales, and nothing that a pass of ours added."""
    return math.prod(tensor.dims) >= _LARGE and not tensor.name.startswith("/edge/") and ".scales" not in tensor.name


def _stored(
    name: str, tensors: Mapping[str, onnx.TensorProto], makers: Mapping[str, onnx.NodeProto]
) -> onnx.TensorProto | None:
    """The initializer that the value `name` is made from without arithmetic; None if there is none."""
    for _ in range(_STEPS):
        if name in tensors:
            return tensors[name]
        maker = makers.get(name)
        if maker is None or maker.op_type not in _PASSING or not maker.input:
            return None
        name = maker.input[0]
    return None


def _dtype_name(data_type: int) -> str:
    """NumPy's name of an ONNX element type."""
    import onnx

    name = str(onnx.TensorProto.DataType.Name(data_type)).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def _tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Bytes of the tensor's elements; 4-bit types take half a byte each."""
    import onnx

    count = int(math.prod(tensor.dims))
    if tensor.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4):
        return (count + 1) // 2
    return count * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _tensor_spec(value: onnx.ValueInfoProto) -> TensorSpec:
    kind = value.type.tensor_type
    shape = tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or f"{value.name}_{axis}"
        for axis, dim in enumerate(kind.shape.dim)
    )
    return TensorSpec(value.name, _dtype_name(kind.elem_type), shape)
