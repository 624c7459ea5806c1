"""Stamps a graph with what its target can read, and reads back what was really written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from edge_convert.runtime.device import DeviceProfile
from edge_convert.runtime.errors import ExportError
from edge_convert.runtime.manifest import CacheSpec, GraphSpec, TensorSpec

if TYPE_CHECKING:
    import onnx


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
    )


def _dtype_name(data_type: int) -> str:
    """NumPy's name of an ONNX element type."""
    import onnx

    name = str(onnx.TensorProto.DataType.Name(data_type)).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def _tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Bytes of the tensor's elements; 4-bit types take half a byte each."""
    import math

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
