"""Lower precision for encoders and convolutional networks.

Weight-only quantisation of decoders belongs to the text-generation recipe; this module has dynamic int8
(encoders), static int8 in QDQ form (convolutional networks) and fp16.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_convert.convert.mixed_precision import sensitive_nodes, shield
from edge_convert.convert.rounding import copy_weights, round_weights
from edge_convert.runtime.errors import ConversionError, ExportError

if TYPE_CHECKING:
    import onnx

Feed = dict[str, NDArray[Any]]
# Sums over many values, and exponentials: kept in fp32 inside an fp16 graph.
FP32_ISLANDS = (
    "LayerNormalization", "SkipLayerNormalization", "ReduceSum", "ReduceL2", "ReduceMean", "Softmax", "Div",
    "GlobalAveragePool",
)  # fmt: skip


def quantise_dynamic(source: Path, destination: Path, *, exclude: Iterable[str] = (), narrowing: bool = True) -> None:
    """int8 weights per output channel, activations quantised as they come; embedding tables per row.

    Args:
        source: fp32 graph.
        destination: where the int8 graph is written, weights inside.
        exclude: names of nodes that stay in fp32.
        narrowing: False keeps products with more rows than columns in fp32: a feed-forward block's second
            product reads activations with far outliers, which one scale for all of them does not serve. On
            MiniLM this halves the error of the embedding for 10 MB.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    kept = [*exclude, *([] if narrowing else _narrowing_products(onnx.load(source)))]
    with _quietly("dynamic int8"):
        quantize_dynamic(
            source,
            destination,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=kept,
            extra_options={"MatMulConstBOnly": True},
        )
    model = onnx.load(destination)
    _quantise_tables(model)
    onnx.save(model, destination)
    if not any(tensor.data_type == onnx.TensorProto.INT8 for tensor in model.graph.initializer):
        raise ExportError("Dynamic int8 changed nothing: the graph has no matrix product with a constant weight.")


def to_float16(source: Path, destination: Path, *, islands: Iterable[str] = FP32_ISLANDS) -> None:
    """fp16 weights and activations, fp32 inputs and outputs, `islands` computed in fp32.

    Args:
        source: fp32 graph.
        destination: where the fp16 graph is written, weights inside.
        islands: operator types that stay in fp32.
    """
    import onnx
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

    with _quietly("fp16"):
        model = convert_float_to_float16(
            onnx.load(source), keep_io_types=True, op_block_list=[*DEFAULT_OP_BLOCK_LIST, *islands]
        )
    onnx.save(model, destination)


def quantise_static(
    source: Path, destination: Path, feeds: Iterable[Feed], *, fp32_convolutions: int | None = None
) -> None:
    """int8 weights per output channel and int8 activations with fixed scales, in QDQ form.

    Weights are rounded so that errors cancel on the calibration feeds (`rounding`), and the few convolutions
    and products whose quantisation costs most on them stay in fp32 (`mixed_precision`).

    Args:
        source: fp32 graph; convolutions and their activations should already be folded.
        destination: where the int8 graph is written, weights inside.
        feeds: calibration feeds; read once, then held.
        fp32_convolutions: so many of the first convolutions stay in fp32, instead of those measured.
    """
    import onnx

    feeds = list(feeds)
    nodes = onnx.load(source, load_external_data=False).graph.node
    kept = [node.name for node in nodes if node.op_type == "Conv"][: fp32_convolutions or 0]
    with _quietly("static int8"):
        _write_static(source, destination, feeds, kept)
        round_weights(source, destination, feeds)
        if fp32_convolutions is None:
            kept = sensitive_nodes(source, destination, feeds)
            if kept:
                rounded = onnx.load(destination)
                _write_static(source, destination, feeds, kept)
                copy_weights(rounded, destination)
        model = onnx.load(destination)
        if shield(model):
            onnx.save(model, destination)
    if not any(node.op_type == "QuantizeLinear" for node in model.graph.node):
        raise ExportError("Static int8 changed nothing: the graph has no operator that can be quantised.")


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


def _write_static(source: Path, destination: Path, feeds: list[Feed], exclude: list[str]) -> None:
    """Calibrate on `feeds` and write the QDQ graph, the nodes `exclude` in fp32."""
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    quantize_static(
        source,
        destination,
        _reader(iter(feeds)),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=["Conv", "Gemm", "MatMul", "Add", "GlobalAveragePool", "MaxPool", "Clip", "Relu"],
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=CalibrationMethod.MinMax,
        nodes_to_exclude=exclude,
    )


def _reader(feeds: Iterator[Feed]) -> Any:
    """`feeds` in the form that ONNX Runtime's calibrator reads."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc, unused-ignore]
        def get_next(self) -> Feed | None:
            return next(feeds, None)

    return Reader()


def _narrowing_products(model: onnx.ModelProto) -> list[str]:
    """Names of the products with a constant weight that has more rows than columns."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    products = [
        node for node in model.graph.node if node.op_type == "MatMul" and len(shapes.get(node.input[1], ())) == 2
    ]
    return [node.name for node in products if shapes[node.input[1]][0] > shapes[node.input[1]][1]]


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
