"""Stamps a graph with what its target can read, and reads back what was really written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_convert.convert.graph_tools import inner_graphs
from edge_convert.convert.operator_needs import needed_onnxruntime
from edge_convert.convert.precisions import dtype_name, fp32_nodes, product_types, tensor_bytes, weight_formats
from edge_convert.runtime.device import DeviceProfile
from edge_convert.runtime.errors import ExportError, SourceError
from edge_convert.runtime.manifest import CacheSpec, GraphSpec, TensorSpec

if TYPE_CHECKING:
    import onnx

_LARGE = 1024  # values; smaller constants are biases, scales and shapes


def stamp(path: Path, profile: DeviceProfile) -> None:
    """Lower the IR version of the graph at `path` to the target's cap and strip its notes, in place.

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
    model.ir_version = min(model.ir_version, profile.ir_max)
    strip_notes(model)
    path.write_bytes(model.SerializeToString())


def strip_notes(model: onnx.ModelProto) -> None:
    """Remove documentation and metadata from the model and all that is in it, in place.

    torch's exporter writes stack traces there: paths and lines of code of the machine that converted.
    """
    for part in (model, *model.functions, *_graphs_in(model.graph)):
        _strip(part)
        for values in ("node", "initializer", "input", "output", "value_info"):
            for item in getattr(part, values, ()):
                if not isinstance(item, str):  # a function's inputs are names
                    _strip(item)


def _strip(item: Any) -> None:
    item.ClearField("doc_string")
    item.ClearField("metadata_props")


def _graphs_in(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """`graph` and the graphs inside its nodes of control flow, at every depth."""
    yield graph
    for node in graph.node:
        for inner in inner_graphs(node):
            yield from _graphs_in(inner)


def check_finite(path: Path, name: str) -> None:
    """Raise SourceError if a weight of the exported graph at `path` is no number (NaN), or a large matrix has infinities.

    Vectors and small matrices may hold minus infinity, as masks do. `name` is the source's, for the message.
    """
    import onnx_ir as ir

    for label, value in ir.load(path).graph.initializers.items():
        tensor = value.const_value
        if tensor is None or not tensor.dtype.is_floating_point():
            continue
        numbers = np.asarray(tensor.numpy(), dtype=np.float32)
        large = numbers.ndim > 1 and numbers.size >= _LARGE
        bad = int(np.isnan(numbers).sum()) or (int(np.isinf(numbers).sum()) if large else 0)
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
        initializer_bytes[dtype_name(tensor.data_type)] += tensor_bytes(tensor)
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
        products=dict(sorted(Counter(product_types(model).values()).items())),
        fp32_nodes=fp32_nodes(model),
        onnxruntime_min=needed_onnxruntime(model),
    )


def _tensor_spec(value: onnx.ValueInfoProto) -> TensorSpec:
    kind = value.type.tensor_type
    shape = tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or f"{value.name}_{axis}"
        for axis, dim in enumerate(kind.shape.dim)
    )
    return TensorSpec(value.name, dtype_name(kind.elem_type), shape)
