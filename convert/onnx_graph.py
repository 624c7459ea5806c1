"""Graph work on a user's ONNX file: load it, bring its opset into the target's range, put nodes around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_convert.convert.graph_tools import cpu_session
from edge_convert.convert.interrupt import raise_if_interrupted
from edge_convert.convert.quantize import fold_constants
from edge_convert.runtime.errors import ExportError, UnsupportedModelError

if TYPE_CHECKING:
    import onnx

OPSET_MIN = 13  # from here on, axes are inputs and the quantisers know every operator
INNER = "model_"
_MAX_BYTES = 2**31 - 1
_QUANTISED = (
    "DequantizeLinear", "QuantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearMatMul",
    "QLinearConv", "MatMulNBits", "MatMulBnb4", "GatherBlockQuantized", "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat", "QAttention", "QGemm",
)  # fmt: skip


class Original:
    """The user's file as it is, in ONNX Runtime on the CPU, int8 products exact.

    Args:
        path: The ONNX file; its external data is read from its own folder.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._session = cpu_session(path)
        except Exception as error:
            raise_if_interrupted(error)
            raise UnsupportedModelError(f"ONNX Runtime cannot load {path.name}: {first_line(error)}") from error
        self.name = path.name
        self.inputs: dict[str, tuple[str, tuple[int | str | None, ...]]] = {
            value.name: (value.type, tuple(value.shape)) for value in self._session.get_inputs()
        }
        self.outputs: dict[str, str] = {value.name: value.type for value in self._session.get_outputs()}

    def run(self, output: str, feed: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """The value of `output`; raises UnsupportedModelError if the graph fails on `feed`."""
        try:
            found = self._session.run([output], dict(feed))[0]
        except Exception as error:
            raise_if_interrupted(error)
            raise UnsupportedModelError(f"{self.name} fails on a sample input: {first_line(error)}") from error
        return np.asarray(found)


def load_graph(path: Path, opset_max: int) -> onnx.ModelProto:
    """The model at `path` with its weights, functions inlined, and its opset in OPSET_MIN..`opset_max`.

    Raises UnsupportedModelError above 2 GiB and ExportError if the opset cannot be changed.
    """
    import onnx
    from onnx import inliner

    size = sum(file.stat().st_size for file in (path, *external_files(path)))
    if size > _MAX_BYTES:
        raise UnsupportedModelError(
            f"{path.name} has {size / 2**30:.1f} GiB with its data, and ONNX files up to 2 GiB are converted."
        )
    model = onnx.load(path)
    if model.functions:
        model = inliner.inline_local_functions(model)
    return _change_opset(model, path.name, opset_max)


def external_files(path: Path) -> list[Path]:
    """The external data files of the model at `path`, each once, by name."""
    import onnx
    from onnx.external_data_helper import _get_all_tensors, uses_external_data

    model = onnx.load(path, load_external_data=False)
    tensors = [tensor for tensor in _get_all_tensors(model) if uses_external_data(tensor)]
    return [path.parent / name for name in sorted({entry.value for t in tensors for entry in t.external_data
                                                   if entry.key == "location"})]  # fmt: skip


def reduced_precision(model: onnx.ModelProto) -> str | None:
    """What shows that the model's weights are not fp32 any more, or None."""
    import onnx

    found = sorted({node.op_type for node in model.graph.node} & set(_QUANTISED))
    if found:
        return f"already quantised ({found[0]})"
    half = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    if any(tensor.data_type in half for tensor in model.graph.initializer):
        return "already in half precision"
    return None


def strip_softmax(model: onnx.ModelProto, output: str) -> str:
    """The value whose softmax `output` is, or `output` itself."""
    for node in model.graph.node:
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), -1)
        if output in node.output and node.op_type == "Softmax" and axis in (1, -1):
            return str(node.input[0])
    return output


def to_float32(value: str, output: str, kind: str) -> onnx.NodeProto:
    """The node that gives `value`, of ONNX Runtime's type `kind`, the name `output` and the type float32."""
    from onnx import TensorProto, helper

    if kind == "tensor(float)":
        return helper.make_node("Identity", [value], [output])
    return helper.make_node("Cast", [value], [output], to=TensorProto.FLOAT)


def opset_of(model: onnx.ModelProto) -> int:
    """Version of the standard operators."""
    return max((int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=1)


def surround(
    model: onnx.ModelProto,
    *,
    front: Sequence[onnx.NodeProto],
    back: Sequence[onnx.NodeProto],
    constants: Mapping[str, NDArray[Any]],
    inputs: Sequence[onnx.ValueInfoProto],
    output: onnx.ValueInfoProto,
) -> onnx.ModelProto:
    """`model` with every name behind the prefix INNER, between `front` and `back`, with new inputs and one output."""
    import onnx
    from onnx import compose, numpy_helper

    wrapped = compose.add_prefix(model, INNER)
    graph = wrapped.graph
    nodes = _used([*front, *graph.node, *back], output.name)
    for index, node in enumerate(nodes):
        node.name = node.name or f"{node.op_type}_{index}"
    for field, values in (
        (graph.node, nodes),
        (graph.input, inputs),
        (graph.output, [output]),
        (graph.value_info, ()),
    ):
        kept = [type(value).FromString(value.SerializeToString()) for value in values]
        del field[:]
        field.extend(kept)
    weights = [*graph.initializer, *(numpy_helper.from_array(value, name) for name, value in constants.items())]
    needed = {name for node in nodes for name in _reads(node)}
    kept = [weight for weight in weights if weight.name in needed]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    assert isinstance(wrapped, onnx.ModelProto)
    return wrapped


def write_graph(model: onnx.ModelProto, path: Path, *, fold: bool) -> None:
    """Write `model` to `path`, its constants folded if asked; every node gets a name."""
    import onnx

    if not fold:
        onnx.save(model, path)
        return
    raw = path.with_name(f"raw_{path.name}")
    onnx.save(model, raw)
    try:
        fold_constants(raw, path)
    finally:
        raw.unlink()
    folded = onnx.load(path)
    for index, node in enumerate(folded.graph.node):
        node.name = node.name or f"{node.op_type}_{index}"
    onnx.save(folded, path)


def first_line(error: BaseException) -> str:
    """The start of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _used(nodes: Sequence[onnx.NodeProto], output: str) -> list[onnx.NodeProto]:
    """Those of the sorted `nodes` that `output` depends on."""
    needed, kept = {output}, []
    for node in reversed(nodes):
        if needed & set(node.output):
            kept.append(node)
            needed |= _reads(node)
    return kept[::-1]


def _reads(node: onnx.NodeProto) -> set[str]:
    """Names of the values that a node reads, those of its subgraphs (and their own values) included."""
    graphs = [graph for attribute in node.attribute for graph in (attribute.g, *attribute.graphs)]
    inner = {name for graph in graphs for child in graph.node for name in _reads(child)}
    return {*node.input, *inner, *(value.name for graph in graphs for value in graph.output)} - {""}


def _change_opset(model: onnx.ModelProto, name: str, opset_max: int) -> onnx.ModelProto:
    from onnx import version_converter

    found = opset_of(model)
    wanted = min(max(found, OPSET_MIN), opset_max)
    if wanted == found:
        return model
    try:
        changed = version_converter.convert_version(model, wanted)
    except (RuntimeError, ValueError, TypeError, version_converter.ConvertError) as error:
        raise ExportError(
            f"{name} has opset {found}, and it could not be brought to opset {wanted} ({first_line(error)}). "
            f"Export it at opset {wanted}."
        ) from error
    return changed
