"""Lower precision for encoders and convolutional networks.

Weight-only quantisation of decoders belongs to the text-generation recipe and fp16 to `fp16`; this module has
dynamic int8 (encoders) and static int8 in QDQ form (convolutional networks).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_convert.convert.calibration import (
    METHODS,
    STATIC_OPERATORS,
    Range,
    activation_ranges,
    channel_peaks,
    observe,
    token_feeds,
)
from edge_convert.convert.graph_tools import Feed, replace_items
from edge_convert.convert.mixed_precision import (
    OutputError,
    cosine_error,
    free_outputs,
    output_errors,
    put_back,
    shield,
    static_costs,
)
from edge_convert.convert.rounding import copy_weights, round_weights
from edge_convert.convert.saturation import weight_limit
from edge_convert.runtime.errors import ConversionError, ExportError

if TYPE_CHECKING:
    import onnx

_CHANNELS_PER_COPY = 64  # channels of a product's input for each that is added to divide outliers
_MIN_COPIES = 8
_WORTH_SPLITTING = 1.5  # of the peak
_WORTH_ROUNDING = 1.5  # of the least error with weights rounded to nearest
_BISECTIONS = 40


def quantise_dynamic(
    source: Path,
    destination: Path,
    *,
    exclude: Iterable[str] = (),
    feeds: Iterable[Feed] | None = None,
    reduce_range: bool = False,
) -> None:
    """int8 weights per output channel, activations quantised as they come; embedding tables per row.

    Activation channels with outliers are split first (`split_outliers`), so that one scale serves them all.

    Args:
        source: fp32 graph.
        destination: where the int8 graph is written, weights inside.
        exclude: names of nodes that stay in fp32.
        feeds: calibration feeds that show where the outliers are; None for random tokens (`token_feeds`), empty
            for no splitting.
        reduce_range: weights of products use 7 bits (`saturation`).
    """
    import onnx

    model = onnx.load(source)
    feeds = token_feeds(model) if feeds is None else list(feeds)
    kept = list(exclude)
    with _quietly("dynamic int8"):
        if feeds:
            split_outliers(model, feeds, exclude=kept)
        model = _write_dynamic(model, destination, exclude=kept, reduce_range=reduce_range)
    _quantise_tables(model)
    onnx.save(model, destination)
    if not any(tensor.data_type == onnx.TensorProto.INT8 for tensor in model.graph.initializer):
        raise ExportError("Dynamic int8 changed nothing: the graph has no matrix product with a constant weight.")


def product_costs(
    source: Path, feeds: Sequence[Feed], *, reduce_range: bool = False, output_error: OutputError = cosine_error
) -> dict[str, float]:
    """What dynamic int8 of each product with a constant weight costs by itself (`output_errors`).

    Args:
        source: fp32 graph; outliers are split as `quantise_dynamic` does.
        feeds: calibration feeds.
        reduce_range: weights use 7 bits (`saturation`).
        output_error: error of one feed's output.
    """
    import onnx

    model = onnx.load(source)
    with _quietly("dynamic int8"), TemporaryDirectory() as folder:
        if tokens := token_feeds(model):
            split_outliers(model, tokens)
        names = [node.name for node in _products(model)]
        path = Path(folder) / "alone.onnx"

        def alone(name: str) -> onnx.ModelProto:
            return _write_dynamic(model, path, only=[name], reduce_range=reduce_range)

        return output_errors(model, alone, names, feeds, output_error=output_error)


def split_outliers(model: onnx.ModelProto, feeds: Sequence[Feed], *, exclude: Iterable[str] = ()) -> int:
    """Divide the input channels of products that reach far beyond the others among several, in place.

    One channel of a transformer's activations often is ten times the others, in one token of each text, and one
    scale for all then leaves the others few steps. Here such a channel x becomes n channels x / n, each with the
    weights of x: the same product in fp32, and n times the steps (after Zhao et al. 2019, outlier channel
    splitting). Products are left alone where that gains less than a factor of `_WORTH_SPLITTING`.

    Args:
        model: fp32 graph.
        feeds: calibration feeds, from which each channel's peak is taken.
        exclude: names of products that stay as they are.

    Returns:
        How many inputs of products were split.
    """
    from onnx import helper, numpy_helper

    left_out = set(exclude)
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in _products(model):
        if node.name not in left_out:
            readers.setdefault(node.input[0], []).append(node)
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    new: dict[str, list[onnx.NodeProto]] = {}
    for value, peaks in channel_peaks(model, list(readers), feeds).items():
        copies = _copies(peaks, max(_MIN_COPIES, len(peaks) // _CHANNELS_PER_COPY))
        if peaks.max() < _WORTH_SPLITTING * (peaks / copies).max():
            continue
        again = np.repeat(np.arange(len(peaks)), copies - 1)
        scale, index, divided, copied, wide = (
            f"{value}_{end}" for end in ("share", "again", "divided", "copied", "wide")
        )
        graph.initializer.append(numpy_helper.from_array((1 / copies).astype(np.float32), scale))
        graph.initializer.append(numpy_helper.from_array(again, index))
        new[readers[value][0].name] = [
            helper.make_node("Mul", [value, scale], [divided], divided),
            helper.make_node("Gather", [divided, index], [copied], copied, axis=-1),
            helper.make_node("Concat", [divided, copied], [wide], wide, axis=-1),
        ]
        for node in readers[value]:
            weight = numpy_helper.to_array(weights[node.input[1]])
            node.input[0], node.input[1] = wide, f"{node.name}_wide_weight"
            graph.initializer.append(numpy_helper.from_array(np.concatenate([weight, weight[again]]), node.input[1]))
    nodes = [step for node in graph.node for step in (*new.get(node.name, ()), node)]
    replace_items(graph.node, nodes)
    used = {name for node in graph.node for name in node.input}
    replace_items(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in used])
    return len(new)


def quantise_static(
    source: Path,
    destination: Path,
    feeds: Iterable[Feed],
    *,
    fp32_convolutions: int | None = None,
    fp32_nodes: int = 0,
    reduce_range: bool = False,
) -> dict[str, Any]:
    """int8 weights per output channel and int8 activations with fixed scales, in QDQ form; graph outputs stay fp32.

    Weights are rounded so that errors cancel on the feeds (`rounding`). Ranges of activations are those of the
    calibration method (`calibration.METHODS`) whose graph then errs least on them, and of the convolutions and products
    whose quantisation costs most on them as few stay in fp32 as bring the output close to the original's
    (`mixed_precision.put_back`).

    Args:
        source: fp32 graph; convolutions and their activations should already be folded.
        destination: where the int8 graph is written, weights inside.
        feeds: calibration feeds; read once, then held.
        fp32_convolutions: so many of the first convolutions stay in fp32, instead of those measured.
        fp32_nodes: so many of the costliest convolutions and products stay in fp32 at least.
        reduce_range: weights use 7 bits (`saturation`).

    Returns:
        What was measured, as plain values. `calibration`: the method that was `chosen` and, by method, the squared
        error of the first output over its square with weights rounded to nearest (`errors_nearest`) and so that errors
        cancel (`errors`, of the methods that were not far worse before). `costs`: what quantising each node alone costs,
        on the same scale; `errors_by_fp32_nodes`: the error by how many of the costliest are in fp32.
    """
    import onnx

    feeds = list(feeds)
    if not feeds:
        raise ExportError("Static int8 needs calibration feeds to measure activations, and there are none.")
    original = onnx.load(source)
    kept = [node.name for node in original.graph.node if node.op_type == "Conv"][: fp32_convolutions or 0]
    with _quietly("static int8"):
        histograms = observe(original, feeds)
        ranges = {method: activation_ranges(histograms, method) for method in METHODS}

        def write(method: str) -> onnx.ModelProto:
            return _write_static(source, destination, feeds[0], kept, ranges[method], reduce_range=reduce_range)

        def write_rounded(method: str) -> onnx.ModelProto:
            write(method)
            round_weights(source, destination, feeds, limit=weight_limit(reduce_range=reduce_range))
            return onnx.load(destination)

        nearest = output_errors(original, write, list(METHODS), feeds)
        close = [method for method in METHODS if nearest[method] <= _WORTH_ROUNDING * min(nearest.values())]
        errors = output_errors(original, write_rounded, close, feeds)
        best = min(close, key=lambda method: errors[method])
        if best != close[-1]:  # that is what was written last
            write_rounded(best)
        rounded = onnx.load(destination)
        found: dict[str, Any] = {"calibration": {"chosen": best, "errors": errors, "errors_nearest": nearest}}
        if fp32_convolutions is None:

            def leave(nodes: Sequence[str]) -> onnx.ModelProto:
                _write_static(source, destination, feeds[0], nodes, ranges[best], reduce_range=reduce_range)
                copy_weights(rounded, destination)
                return onnx.load(destination)

            found["costs"] = static_costs(original, rounded, feeds)
            nodes, found["errors_by_fp32_nodes"] = put_back(
                found["costs"],
                lambda nodes: output_errors(original, lambda _: leave(nodes), ["left"], feeds)["left"],
                at_least=fp32_nodes,
            )
            leave(nodes)
        model = onnx.load(destination)
        shield(model)
        onnx.save(model, destination)
    if not any(node.op_type == "QuantizeLinear" for node in model.graph.node):
        raise ExportError("Static int8 changed nothing: the graph has no operator that can be quantised.")
    return found


def fold_constants(source: Path, destination: Path) -> None:
    """Fold constants, batch norms and paddings into the operators before them, with standard operators only.

    Args:
        source: fp32 graph as the exporter wrote it.
        destination: where the folded graph is written, weights inside.
    """
    import onnx
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(destination)
    options.log_severity_level = 3
    with _quietly("the folded graph"):
        ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    model = onnx.load(destination)
    used = {node.domain for node in model.graph.node} | {""}
    kept = [entry for entry in model.opset_import if entry.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    model.ir_version = min(model.ir_version, onnx.load(source, load_external_data=False).ir_version)
    onnx.save(model, destination)


def rename_output(path: Path, name: str, wanted: str) -> None:
    """Call the graph's output `name` `wanted`, in place; a value inside that has that name gets another."""
    import onnx

    model = onnx.load(path)
    new = {name: wanted, wanted: f"{wanted}_inner"}
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [new.get(value, value) for value in names]
    for value in (*model.graph.output, *model.graph.value_info):
        value.name = new.get(value.name, value.name)
    onnx.save(model, path)


def _write_static(
    source: Path,
    destination: Path,
    feed: Feed,
    exclude: Sequence[str],
    ranges: Mapping[str, Range],
    *,
    reduce_range: bool = False,
) -> onnx.ModelProto:
    """Write and return the QDQ graph with activations in `ranges`, the nodes `exclude` in fp32."""
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    quantize_static(
        source,
        destination,
        _reader(iter([feed])),  # asked for, though every range is given
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=list(STATIC_OPERATORS),
        per_channel=True,
        reduce_range=reduce_range,  # of the weights; activations keep 8 bits
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=CalibrationMethod.MinMax,
        nodes_to_exclude=list(exclude),
        extra_options={
            "TensorQuantOverrides": {
                name: [{"rmin": np.float32(low), "rmax": np.float32(high)}] for name, (low, high) in ranges.items()
            }
        },
    )
    model = onnx.load(destination)
    free_outputs(model)
    onnx.save(model, destination)
    return model


def _reader(feeds: Iterator[Feed]) -> Any:
    """`feeds` in the form that ONNX Runtime's calibrator reads."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc, unused-ignore]
        def get_next(self) -> Feed | None:
            return next(feeds, None)

    return Reader()


def _write_dynamic(
    model: onnx.ModelProto,
    destination: Path,
    *,
    exclude: Sequence[str] = (),
    only: Sequence[str] = (),
    reduce_range: bool = False,
) -> onnx.ModelProto:
    """Write and return the graph with int8 products: all but `exclude`, or `only` these."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        copy.deepcopy(model),
        destination,
        op_types_to_quantize=["MatMul"],
        per_channel=True,
        reduce_range=reduce_range,
        weight_type=QuantType.QInt8,
        nodes_to_quantize=list(only),
        nodes_to_exclude=list(exclude),
        extra_options={"MatMulConstBOnly": True},
    )
    return onnx.load(destination)


def _products(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The matrix products with a constant fp32 matrix on the right and a computed left side."""
    matrices = {tensor.name for tensor in model.graph.initializer if tensor.data_type == 1 and len(tensor.dims) == 2}
    known = {tensor.name for tensor in model.graph.initializer}
    return [
        node
        for node in model.graph.node
        if node.op_type == "MatMul" and node.input[1] in matrices and node.input[0] not in known
    ]


def _copies(peaks: NDArray[Any], extra: int) -> NDArray[np.int64]:
    """Into how many each channel is divided so that the largest peak is least, with `extra` channels more in all."""
    low, high = 0.0, float(peaks.max())
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        fits = np.ceil(peaks / max(middle, 1e-12)).clip(1).sum() - len(peaks) <= extra
        low, high = (low, middle) if fits else (middle, high)
    return np.ceil(peaks / max(high, 1e-12)).clip(1).astype(np.int64)


def _quantise_tables(model: onnx.ModelProto, min_elements: int = 100_000) -> None:
    """Store each large embedding table as int8 with one fp32 scale per row, in place.

    Gather(table) becomes Cast(Gather(int8 table)) * Gather(scales): plain operators, so every ONNX
    Runtime release runs it.
    """
    from onnx import helper, numpy_helper

    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    uses: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            uses.setdefault(name, []).append(node)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        table = tensors.get(node.input[0]) if node.op_type == "Gather" else None
        if table is None or not _is_table(table, node, uses[table.name], min_elements):
            nodes.append(node)
            continue
        name, indices, output = table.name, node.input[1], node.output[0]
        values = numpy_helper.to_array(table)
        scales = np.maximum(np.abs(values).max(axis=1, keepdims=True), 1e-12) / 127
        integers = np.rint(values / scales).astype(np.int8)
        graph.initializer.remove(table)
        graph.initializer.append(numpy_helper.from_array(integers, f"{name}_int8"))
        graph.initializer.append(numpy_helper.from_array(scales.astype(np.float32), f"{name}_scale"))
        nodes += [
            helper.make_node("Gather", [f"{name}_int8", indices], [f"{output}_row_int8"], f"{node.name}_int8", axis=0),
            helper.make_node(
                "Gather", [f"{name}_scale", indices], [f"{output}_row_scale"], f"{node.name}_scale", axis=0
            ),
            helper.make_node("Cast", [f"{output}_row_int8"], [f"{output}_row_cast"], f"{node.name}_cast", to=1),
            helper.make_node("Mul", [f"{output}_row_cast", f"{output}_row_scale"], [output], f"{node.name}_mul"),
        ]
    del graph.node[:]
    graph.node.extend(nodes)


def _is_table(table: onnx.TensorProto, node: onnx.NodeProto, users: list[onnx.NodeProto], min_elements: int) -> bool:
    """Whether `node` alone looks rows up in a large fp32 matrix."""
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
    large = len(table.dims) == 2 and table.dims[0] * table.dims[1] >= min_elements
    return table.data_type == 1 and large and axis == 0 and len(users) == 1


@contextmanager
def _quietly(stage: str) -> Iterator[None]:
    """Keep the quantiser's own warnings off the root logger, and turn its failures into one line."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    except (RuntimeError, ValueError, AttributeError, KeyError, TypeError) as error:
        if isinstance(error, ConversionError):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ExportError(f"Writing {stage} failed: {reason[:200]}") from error
    finally:
        root.setLevel(level)
