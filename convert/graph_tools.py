"""What several stages do with an ONNX graph in memory: run it here on calibration feeds, look at values inside."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_convert.runtime.int8 import exact_int8

if TYPE_CHECKING:
    import onnx

Feed = dict[str, NDArray[Any]]
Item = TypeVar("Item")


def cpu_session(
    graph: Path | onnx.ModelProto,
    *,
    optimise: bool = True,
    threads: int | None = None,
    settings: Mapping[str, str] | None = None,
) -> Any:
    """An ONNX Runtime session on the CPU, whatever the target; int8 products are exact on any CPU.

    Args:
        graph: a file, or a model in memory without external data.
        optimise: False runs the operators one by one as they are written.
        threads: of the session; None for ONNX Runtime's own choice.
        settings: session configuration entries by ONNX Runtime's names.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if threads is not None:
        options.intra_op_num_threads = threads
    for name, value in {**exact_int8(), **(settings or {})}.items():
        options.add_session_config_entry(name, value)
    content = str(graph) if isinstance(graph, Path) else graph.SerializeToString()
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """A copy of the graph that also gives the values `names`; its inputs are no such values."""
    from onnx import helper

    probed = copy.deepcopy(model)
    known = {value.name for value in (*probed.graph.output, *probed.graph.input)}
    probed.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in known)
    return probed


def replace_items(field: Any, items: Sequence[Any]) -> None:
    """Put copies of `items` into a repeated field in place of what it holds."""
    kept = [copy.deepcopy(item) for item in items]
    del field[:]
    field.extend(kept)


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` of the items, evenly spread."""
    if not items:
        return []
    return [items[at] for at in np.linspace(0, len(items) - 1, min(most, len(items))).astype(int)]


def inner_graphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs inside a node of control flow."""
    return [graph for item in node.attribute for graph in ([item.g] if item.HasField("g") else item.graphs)]
