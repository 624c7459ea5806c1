"""int8 weights rounded so that the errors within one output cancel on the calibration data.

Rounding to the nearest step treats every weight alone. Here weights are rounded one input at a time, and the
error of each is taken up by the weights of the same output that are still to come, as far as their inputs move
together (Frantar et al. 2022, GPTQ). Graph, scales and speed stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_convert.convert.graph_tools import cpu_session, spread, with_outputs

if TYPE_CHECKING:
    import onnx

Floats = NDArray[np.float32]
MAX_FEEDS = 64
MAX_POSITIONS = 256  # read per frame and convolution
_DAMPING = 0.01  # of the mean square of the inputs
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Weights:
    """A Conv or Gemm of the fp32 graph whose weights the int8 graph holds quantised."""

    node: onnx.NodeProto
    original: Floats
    quantised: onnx.TensorProto  # in the int8 graph
    scale: Floats  # per output


def round_weights(source: Path, quantised: Path, feeds: Sequence[dict[str, NDArray[Any]]], *, limit: int = 127) -> int:
    """Round the int8 weights of `quantised` anew, in place; returns how many tensors changed.

    Args:
        source: the fp32 graph that `quantised` was made from.
        quantised: int8 graph in QDQ form, one scale per output.
        feeds: calibration feeds, of which `MAX_FEEDS` are read, evenly spread.
        limit: largest magnitude of an integer.
    """
    import onnx
    from onnx import numpy_helper

    model, original = onnx.load(quantised), onnx.load(source)
    found = _find(original, model)
    outside = {value.name for value in original.graph.input}
    names = [name for name in dict.fromkeys(entry.node.input[0] for entry in found) if name not in outside]
    session = cpu_session(with_outputs(original, names))
    moments: list[Floats] = []
    for feed in spread(feeds, MAX_FEEDS):
        values = {**feed, **dict(zip(names, session.run(names, feed) if names else [], strict=True))}
        squares = [_moment(columns(entry.node, entry.original, values[entry.node.input[0]])) for entry in found]
        moments = [old + new for old, new in zip(moments, squares, strict=True)] if moments else squares
    for entry, moment in zip(found, moments, strict=True):
        rows = _rows(entry)
        scale = np.broadcast_to(entry.scale, (rows.shape[0] * rows.shape[1],)).reshape(rows.shape[:2])
        rounded = compensated(rows, scale, moment, limit)
        integers = _from_rows(entry, rounded).astype(np.int8)
        entry.quantised.CopyFrom(numpy_helper.from_array(integers, entry.quantised.name))
    onnx.save(model, quantised)
    return len(moments)


def copy_weights(rounded: onnx.ModelProto, destination: Path) -> None:
    """Put the int8 weights of `rounded` into `destination`, made from the same fp32 graph, in place."""
    import onnx

    model = onnx.load(destination)
    known = {tensor.name: tensor for tensor in rounded.graph.initializer if tensor.data_type == 3 and tensor.dims}
    for tensor in model.graph.initializer:
        if tensor.data_type == 3 and tensor.name in known and len(tensor.dims) > 1:
            tensor.CopyFrom(known[tensor.name])
    onnx.save(model, destination)


def compensated(rows: Floats, scale: Floats, moment: Floats, limit: int = 127) -> Floats:
    """Integers (groups, outputs, inputs) near `rows` / `scale` that keep each output's error small.

    Args:
        rows: weights (groups, outputs, inputs).
        scale: (groups, outputs), one step of each output.
        moment: (groups, inputs, inputs), the sum of products of the inputs.
        limit: largest magnitude of an integer.
    """
    inputs = rows.shape[2]
    moment = moment.astype(np.float64)
    diagonal = np.einsum("gii->gi", moment)  # a view
    order = np.argsort(-diagonal.mean(0), kind="stable")
    diagonal += _DAMPING * diagonal.mean(1, keepdims=True) + 1e-6 * diagonal.mean() + 1e-12
    moment = moment[:, order][:, :, order]
    # The factor U of moment^-1 = U^T U: row i has what the error of weight i does to those after it.
    factor = np.linalg.cholesky(np.linalg.inv(moment)).transpose(0, 2, 1).astype(np.float32)
    left = np.ascontiguousarray(rows[:, :, order].transpose(0, 2, 1), np.float32)  # inputs before outputs
    step = np.maximum(scale, np.finfo(np.float32).tiny)
    result = np.empty_like(left)
    for start in range(0, inputs, _BLOCK):
        stop = min(start + _BLOCK, inputs)
        errors = np.empty_like(left[:, start:stop])
        for at in range(start, stop):
            result[:, at] = np.clip(np.rint(left[:, at] / step), -limit, limit)
            errors[:, at - start] = (left[:, at] - result[:, at] * step) / factor[:, at, at, None]
            left[:, at + 1 : stop] -= factor[:, at, at + 1 : stop, None] * errors[:, at - start, None]
        left[:, stop:] -= factor[:, start:stop, stop:].transpose(0, 2, 1) @ errors
    restored = np.empty_like(rows, np.float32)
    restored[:, :, order] = result.transpose(0, 2, 1)
    return restored


def columns(node: onnx.NodeProto, weights: Floats, values: Floats) -> Floats:
    """What the weights multiply, (groups, inputs, positions), at most `MAX_POSITIONS` positions spread evenly."""
    if node.op_type != "Conv":
        flat = values.reshape(-1, values.shape[-1])
        return _thin(np.ascontiguousarray(flat.T))[None]
    attributes = {attribute.name: attribute for attribute in node.attribute}

    def numbers(name: str, default: list[int]) -> list[int]:
        return list(attributes[name].ints) if name in attributes else default

    kernel = list(weights.shape[2:])
    spatial = len(kernel)
    pads, strides, dilations = (
        numbers(name, [one] * count)
        for name, one, count in (("pads", 0, 2 * spatial), ("strides", 1, spatial), ("dilations", 1, spatial))
    )
    groups = attributes["group"].i if "group" in attributes else 1
    padded = np.pad(values, [(0, 0), (0, 0), *zip(pads[:spatial], pads[spatial:], strict=True)])
    windows = np.lib.stride_tricks.sliding_window_view(
        padded,
        tuple((side - 1) * gap + 1 for side, gap in zip(kernel, dilations, strict=True)),
        axis=tuple(range(2, 2 + spatial)),
    )  # type: ignore[call-overload, unused-ignore]
    every = (*(slice(None, None, stride) for stride in strides), *(slice(None, None, gap) for gap in dilations))
    windows = windows[(slice(None), slice(None), *every)]
    batch, places = windows.shape[0], windows.shape[2 : 2 + spatial]
    count = batch * int(np.prod(places))
    chosen: tuple[Any, ...] = np.unravel_index(
        np.linspace(0, count - 1, min(count, MAX_POSITIONS)).astype(int), (batch, *places)
    )
    taken = windows[(chosen[0], slice(None), *chosen[1:])]  # (positions, channels, *kernel)
    return np.ascontiguousarray(taken.reshape(len(taken), groups, -1).transpose(1, 2, 0))


def _thin(flat: Floats) -> Floats:
    count = flat.shape[1]
    return flat[:, np.linspace(0, count - 1, min(count, MAX_POSITIONS)).astype(int)]


def _moment(inputs: Floats) -> Floats:
    product: Floats = inputs @ inputs.transpose(0, 2, 1)
    return product


def _axis(node: onnx.NodeProto) -> int:
    """The axis of the weights along which the outputs lie."""
    if node.op_type == "Conv":
        return 0
    return 0 if any(attribute.name == "transB" and attribute.i for attribute in node.attribute) else 1


def _rows(entry: Weights) -> Floats:
    """The weights as (groups, outputs, inputs)."""
    weights = entry.original
    if entry.node.op_type != "Conv":
        return (weights if _axis(entry.node) == 0 else np.ascontiguousarray(weights.T))[np.newaxis]
    groups = next((attribute.i for attribute in entry.node.attribute if attribute.name == "group"), 1)
    rows: Floats = weights.reshape(groups, weights.shape[0] // groups, -1)
    return rows


def _from_rows(entry: Weights, rows: Floats) -> Floats:
    if entry.node.op_type != "Conv":
        return rows[0] if _axis(entry.node) == 0 else np.ascontiguousarray(rows[0].T)
    weights: Floats = rows.reshape(entry.original.shape)
    return weights


def _find(source: onnx.ModelProto, quantised: onnx.ModelProto) -> list[Weights]:
    """The convolutions and products with constant weights that are int8, each used once, in `quantised`."""
    from onnx import numpy_helper

    tensors = {tensor.name: tensor for tensor in quantised.graph.initializer}
    originals = {tensor.name: tensor for tensor in source.graph.initializer}
    makers = {node.output[0]: node for node in quantised.graph.node if node.op_type == "DequantizeLinear"}
    inside = {node.name: node for node in quantised.graph.node}
    uses: dict[str, int] = {}
    for node in source.graph.node:
        for name in node.input:
            uses[name] = uses.get(name, 0) + 1
    found = []
    for node in source.graph.node:
        if node.op_type not in ("Conv", "Gemm") or node.name not in inside or uses[node.input[1]] > 1:
            continue
        if any(attribute.name == "transA" and attribute.i for attribute in node.attribute):
            continue
        if any(attribute.name == "auto_pad" and attribute.s not in (b"", b"NOTSET") for attribute in node.attribute):
            continue
        maker = makers.get(inside[node.name].input[1])
        tensor = tensors.get(maker.input[0]) if maker is not None else None
        if maker is None or tensor is None or node.input[1] not in originals or tensor.data_type != 3:
            continue
        original = numpy_helper.to_array(originals[node.input[1]])
        scale = numpy_helper.to_array(tensors[maker.input[1]]).reshape(-1)
        found.append(Weights(node, original, tensor, scale))
    return found
