"""What quantising each node costs, which nodes to leave in fp32 for it, and how to keep ONNX Runtime from them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_convert.convert.graph_tools import Feed, cpu_session, replace_items, spread

if TYPE_CHECKING:
    import onnx

Scales = tuple[NDArray[Any], NDArray[Any]]  # scale and zero point
OutputError = Callable[[NDArray[Any], NDArray[Any]], float]  # of the original's output and the other's
MAX_FEEDS = 6
# Squared error of the output over its square at which no more nodes go back to fp32: 25 dB. Islands cost time at their
# edges, and below it they bought EfficientNet-Lite0 no top-1 agreement (docs/quantisation.md).
CLOSE = 10**-2.5
_AT_MOST = 1 / 6  # of the convolutions and products


def relative_error(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """Sum of squared differences over the sum of squares."""
    return float(np.square(expected - found).sum() / max(np.square(expected).sum(), 1e-30))


def cosine_error(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """Sum over the rows (..., D) of 1 - cosine."""
    lengths = np.linalg.norm(expected, axis=-1) * np.linalg.norm(found, axis=-1)
    return float((1 - (expected * found).sum(-1) / np.maximum(lengths, 1e-12)).sum())


def output_errors(
    original: onnx.ModelProto,
    build: Callable[[str], onnx.ModelProto],
    names: Iterable[str],
    feeds: Sequence[Feed],
    output_error: OutputError = relative_error,
) -> dict[str, float]:
    """The error of the first output, mean over the feeds, of each of the graphs that `build` gives by name.

    Args:
        original: fp32 graph.
        build: gives the graph called by the name, such as that with only the node of that name quantised.
        names: of the graphs; one at a time is held.
        feeds: calibration feeds; `MAX_FEEDS` of them, evenly spread, are run once per graph.
        output_error: error of one feed's output.
    """
    chosen = spread(feeds, MAX_FEEDS)
    expected = _run(original, chosen)
    return {
        name: float(np.mean([output_error(*pair) for pair in zip(expected, _run(build(name), chosen), strict=True)]))
        for name in names
    }


def worst(costs: dict[str, float], count: int) -> list[str]:
    """The `count` nodes that cost most, worst first."""
    return sorted(costs, key=lambda name: costs[name], reverse=True)[: max(count, 0)]


def static_costs(original: onnx.ModelProto, quantised: onnx.ModelProto, feeds: Sequence[Feed]) -> dict[str, float]:
    """What static int8 of each Conv and Gemm costs by itself (`output_errors`).

    The fp32 graph is run with that node's input, weights and output as in `quantised`, made from it in QDQ form.
    """
    nodes = _candidates(original, quantised)
    return output_errors(original, lambda node: _alone(original, quantised, node), nodes, feeds)


def put_back(
    costs: dict[str, float], error: Callable[[list[str]], float], *, at_least: int = 0
) -> tuple[list[str], dict[str, float]]:
    """The nodes to leave in fp32, worst first: the fewest with which the output is `CLOSE`.

    At most `_AT_MOST` of the nodes, and never all. If those do not suffice, as many as err least.

    Args:
        costs: of each node alone (`static_costs`).
        error: of the graph with these nodes in fp32.
        at_least: so many are left in fp32 anyway, as far as there are more.

    Returns:
        The nodes, and the errors by how many of the worst are in fp32 (as text, for JSON), as far as they were tried.
    """
    least = min(at_least, len(costs) - 1)
    order = worst(costs, max(least, min(math.ceil(len(costs) * _AT_MOST), len(costs) - 1)))
    errors: dict[str, float] = {}
    for count in range(least, len(order) + 1):
        errors[str(count)] = error(order[:count])
        if errors[str(count)] <= CLOSE:
            break
    return order[: int(min(errors, key=errors.__getitem__))], errors


def free_outputs(model: onnx.ModelProto) -> int:
    """Give the graph's outputs as they are computed instead of in 256 steps, in place; returns how many.

    Otherwise logits that lie closer than a step are equal, and their order is that of the classes.
    """
    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output}
    count = 0
    for output in graph.output:
        reader = makers.get(output.name)
        writer = makers.get(reader.input[0]) if reader is not None and reader.op_type == "DequantizeLinear" else None
        if reader is None or writer is None or writer.op_type != "QuantizeLinear":
            continue
        inner = writer.input[0]
        graph.node.remove(reader)
        graph.node.remove(writer)
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [output.name if name == inner else name for name in names]
        count += 1
    _drop_unread(graph)
    return count


def shield(model: onnx.ModelProto) -> int:
    """Keep ONNX Runtime from quantising the fp32 Conv and Gemm nodes of a QDQ graph, in place; returns how many.

    Between a DequantizeLinear and a QuantizeLinear its optimiser (WeightBiasQuantization) gives such a node int8
    weights with one scale for the whole tensor, which ruins depthwise convolutions. It leaves nodes alone whose
    input has a scale per channel: here the same scale, once for each channel.
    """
    from onnx import helper, numpy_helper

    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    nodes: list[onnx.NodeProto] = []
    count = 0
    for node in graph.node:
        maker = makers.get(node.input[0]) if node.op_type in ("Conv", "ConvTranspose", "Gemm") else None
        weights = tensors.get(node.input[1]) if maker is not None else None
        if maker is not None and weights is not None and maker.op_type == "DequantizeLinear" and weights.data_type == 1:
            prefix = f"{node.output[0]}_shielded"
            channels = _input_channels(node, weights)
            names = [f"{prefix}_scale", f"{prefix}_zero_point"]
            for name, old in zip(names, maker.input[1:3], strict=True):
                value = numpy_helper.to_array(tensors[old])
                graph.initializer.append(numpy_helper.from_array(np.full(channels, value, value.dtype), name))
            nodes.append(
                helper.make_node("DequantizeLinear", [maker.input[0], *names], [prefix], f"{prefix}_dq", axis=1)
            )
            node.input[0] = prefix
            count += 1
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    _drop_unread(graph)
    return count


def _drop_unread(graph: onnx.GraphProto) -> None:
    """Remove the DequantizeLinear nodes and the constants that nothing reads any more."""
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for node in [node for node in graph.node if node.op_type == "DequantizeLinear" and node.output[0] not in read]:
        graph.node.remove(node)
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    replace_items(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in read])


def _input_channels(node: onnx.NodeProto, weights: onnx.TensorProto) -> int:
    numbers = {attribute.name: attribute.i for attribute in node.attribute}
    if node.op_type == "Conv":
        return int(weights.dims[1] * numbers.get("group", 1))
    return int(weights.dims[1] if node.op_type == "Gemm" and numbers.get("transB", 0) else weights.dims[0])


def _candidates(original: onnx.ModelProto, model: onnx.ModelProto) -> list[str]:
    """Conv and Gemm nodes of both graphs, int8 in `model`."""
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    inside = {
        node.name
        for node in model.graph.node
        if node.op_type in ("Conv", "Gemm") and all(makers.get(n) == "DequantizeLinear" for n in node.input[:2])
    }
    return [node.name for node in original.graph.node if node.name in inside]


def _alone(original: onnx.ModelProto, model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The fp32 graph with the node `name` alone quantised as it is in `model`."""
    from onnx import helper

    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    makers = {output: node for node in model.graph.node for output in node.output}
    inside = next(node for node in model.graph.node if node.name == name)
    writer = next(
        (n for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == inside.output[0]), None
    )
    graph = copy.deepcopy(original)
    node = next(node for node in graph.graph.node if node.name == name)
    before: list[onnx.NodeProto] = []
    after: list[onnx.NodeProto] = []

    def through(value: str, wanted: str, pair: Sequence[str], *, quantise: bool, axis: int = 1) -> list[onnx.NodeProto]:
        """Nodes that read `value`, quantise it if asked and dequantise it into `wanted`."""
        known = {tensor.name for tensor in graph.graph.initializer}
        graph.graph.initializer.extend(tensors[item] for item in pair if item not in known)
        steps = []
        if quantise:
            steps.append(helper.make_node("QuantizeLinear", [value, *pair], [f"{wanted}_integers"], axis=axis))
            value = f"{wanted}_integers"
        return [*steps, helper.make_node("DequantizeLinear", [value, *pair], [wanted], axis=axis)]

    reader, weights = makers[inside.input[0]], makers[inside.input[1]]
    before += through(node.input[0], "alone_input", reader.input[1:3], quantise=True)
    axis = next((attribute.i for attribute in weights.attribute if attribute.name == "axis"), 1)
    integers = tensors[weights.input[0]]
    graph.graph.initializer.append(integers)
    before += through(integers.name, "alone_weights", weights.input[1:3], quantise=False, axis=axis)
    node.input[0], node.input[1] = "alone_input", "alone_weights"
    if writer is not None:
        wanted = node.output[0]
        node.output[0] = "alone_output"
        after += through("alone_output", wanted, writer.input[1:3], quantise=True)
    at = next(index for index, other in enumerate(graph.graph.node) if other.name == name)
    replace_items(graph.graph.node, [*graph.graph.node[:at], *before, node, *after, *graph.graph.node[at + 1 :]])
    return graph


def _run(model: onnx.ModelProto, feeds: Sequence[Feed]) -> list[NDArray[np.float32]]:
    """The first output for each feed, without optimisations across quantised nodes."""
    session = cpu_session(model, optimise=False)
    name = session.get_outputs()[0].name
    return [session.run([name], feed)[0] for feed in feeds]
