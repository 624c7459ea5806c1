"""Weight-only quantisation of a decoder graph: every linear layer in a format of its own, the embedding in 8 bits.

Linear layers become MatMulNBits. Zero points that are no integers (`Blocks.fraction`) become further columns of
the same matrix, which meet the sums of the blocks' inputs. Rows of the embedding's bytes and scales are
gathered and multiplied with standard operators (which every runtime has), and a tied head reads the same two tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edge_convert.convert.decoder_passes import drop_unused, find_head, new_value, replace_node
from edge_convert.convert.weight_formats import (
    ROWS_TO_TRY,
    Blocks,
    Bytes,
    Floats,
    WeightFormat,
    half_scales,
    lies_on_grid,
    pack,
    quantise_rows,
)

if TYPE_CHECKING:
    import onnx_ir as ir

_MICROSOFT = "com.microsoft"
_INT8_ZERO = 128
TABLE = "embedding"
# Formats to try in turn: the grid that the weights already lie on, else one that rounds them.
_GRID = WeightFormat(4, 32, "grid")
INT8 = (WeightFormat(8, 32),)
COARSE_TABLE = WeightFormat(8, 64)
INT4 = (_GRID, WeightFormat(4, 32, "shrink"))
INT4_COARSE = (_GRID, WeightFormat(4, 64, "shrink"))
INT4_FINE = (_GRID, WeightFormat(4, 32, "hqq"))
INT4_AGAIN = (WeightFormat(4, 32, "nearest"),)
_GATES = ("/gate_proj/", "/up_proj/", "/gate_up_proj/")  # the largest layers, which bear coarse blocks best


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The formats of a decoder's weights.

    `nodes` names a linear layer's formats (a node's name in the exported graph), tried in order: "grid" formats
    give way to the next where the weights lie on none. None leaves the layer in fp32. `linear` is for the layers
    that it does not name; `table` (always 8 bits) for the embedding and the head.
    """

    linear: tuple[WeightFormat, ...] | None
    table: WeightFormat
    accuracy_level: int
    nodes: Mapping[str, tuple[WeightFormat, ...] | None] = field(default_factory=dict)

    def formats(self, node: str) -> tuple[WeightFormat, ...] | None:
        """The formats to try for the linear layer `node`."""
        return self.nodes.get(node, self.linear)


def uniform_plan(precision: str, model: ir.Model, accuracy_level: int) -> WeightPlan:
    """The plan of `int8` or `int4`; 135 M parameters stay below 100 MB in int4."""
    if precision == "int8":
        return WeightPlan(INT8, WeightFormat(8, 32), accuracy_level)
    names = [str(node.name) for node in linear_layers(model)]
    coarse = {name: INT4_COARSE for name in names if any(part in name for part in _GATES)}
    return WeightPlan(INT4, COARSE_TABLE, accuracy_level, coarse)


def linear_layers(model: ir.Model) -> Iterator[ir.Node]:
    """The nodes that multiply by a constant matrix and are not a head that shares the embedding."""
    for node in list(model.graph):
        weight = node.inputs[1] if node.op_type == "MatMul" and len(node.inputs) == 2 else None
        if weight is not None and weight.const_value is not None and len(weight.const_value.shape) == 2:
            yield node


def rows_shape(node: ir.Node) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer."""
    weight = node.inputs[1]
    assert weight is not None
    assert weight.const_value is not None
    inputs, outputs = (int(size) for size in weight.const_value.shape)
    return outputs, inputs


def rows_of(node: ir.Node, most: int | None = None) -> Floats:
    """The weights of a linear layer as float32 (outputs, inputs); of the outputs at most the first `most`."""
    weight = node.inputs[1]
    assert weight is not None
    assert weight.const_value is not None
    return np.ascontiguousarray(weight.const_value.numpy()[:, :most].T, dtype=np.float32)


def layers_on_grid(model: ir.Model) -> int:
    """How many linear layers lie on a 4-bit grid, as those of a checkpoint that was quantised before do."""
    return sum(lies_on_grid(rows_of(node, ROWS_TO_TRY), _GRID) for node in linear_layers(model))


def quantise_graph(
    model: ir.Model, plan: WeightPlan, progress: Callable[[int], None] = lambda _: None
) -> dict[str, WeightFormat]:
    """Quantise in place, weight by weight; returns the format of every layer that changed (`TABLE`: the embedding).

    `progress` gets the number of layers done.
    """
    head = find_head(model)
    chosen = {TABLE: plan.table} if _quantise_tables(model, head, plan) else {}
    for done, node in enumerate(linear_layers(model), start=1):
        forms = (plan.table,) if node is head else plan.formats(str(node.name))
        if forms is None:
            continue
        rows = rows_of(node)
        form, blocks = first_that_fits(rows, forms)
        assert node.inputs[1] is not None
        replace_node(model, node, _matmul(model, node, str(node.inputs[1].name), blocks, rows.shape, plan))
        chosen[str(node.name)] = form
        del rows
        drop_unused(model)
        progress(done)
    return chosen


def first_that_fits(rows: Floats, forms: tuple[WeightFormat, ...]) -> tuple[WeightFormat, Blocks]:
    """The first of `forms` that the weights can have, and the weights in it; the last must be one without a grid."""
    for form in forms:
        blocks = quantise_rows(rows, form)
        if blocks is not None:
            return form, blocks
    raise ValueError(f"None of {', '.join(map(str, forms))} can hold these weights.")


def _constant(model: ir.Model, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
    """Register `array` as the initializer `name`, once."""
    import onnx_ir as ir

    if name not in model.graph.initializers:
        model.graph.register_initializer(new_value(name, ir.tensor(array, name=name)))
    return model.graph.initializers[name]


def _matmul(
    model: ir.Model, node: ir.Node, name: str, blocks: Blocks, shape: tuple[int, ...], plan: WeightPlan
) -> ir.Node:
    """MatMulNBits over `blocks`, weights float32 `shape` (outputs, inputs), in the place of `node`."""
    import onnx_ir as ir

    x, columns = node.inputs[0], shape[1]
    levels, scales, zeros = blocks.levels, blocks.scales, blocks.zeros
    if blocks.fraction is not None:
        assert x is not None
        x = _with_sums(model, node, x, columns, blocks)
        columns = (levels.shape[1] + blocks.fraction.levels.shape[1]) * blocks.block
        zeros = np.concatenate([_zeros(blocks), _zeros(blocks.fraction)], axis=1)
        levels = np.concatenate([levels, blocks.fraction.levels], axis=1)
        scales = np.concatenate([scales, blocks.fraction.scales], axis=1)
    stored = Blocks(blocks.bits, levels, scales, zeros)
    inputs = [x, _constant(model, f"{name}.packed", pack(levels, blocks.bits)), _scales(model, name, stored)]
    if zeros is not None:
        inputs.append(_constant(model, f"{name}.zeros", pack(zeros, blocks.bits)))
    attributes = {"K": columns, "N": shape[0], "bits": blocks.bits, "block_size": blocks.block}
    if plan.accuracy_level:
        attributes["accuracy_level"] = plan.accuracy_level
    return ir.node("MatMulNBits", inputs, attributes, domain=_MICROSOFT, name=node.name)


def _zeros(blocks: Blocks) -> Bytes:
    middle = np.full(blocks.scales.shape, 1 << (blocks.bits - 1), np.uint8)
    return middle if blocks.zeros is None else blocks.zeros


def _with_sums(model: ir.Model, node: ir.Node, x: ir.Value, columns: int, blocks: Blocks) -> ir.Value:
    """`x` (…, columns), filled to whole blocks, with the sum of each block behind it."""
    import onnx_ir as ir

    assert blocks.fraction is not None
    filled = blocks.levels.shape[1] * blocks.block
    sums = np.zeros((columns, filled - columns + blocks.fraction.levels.shape[1] * blocks.block), np.float32)
    sums[np.arange(columns), filled - columns + np.arange(columns) // blocks.block] = 1
    constant = _constant(model, f"/edge/block_sums_{columns}_{blocks.block}", sums)
    summed = ir.node("MatMul", [x, constant], name=f"{node.name}/block_sums")
    joined = ir.node("Concat", [x, summed.outputs[0]], {"axis": -1}, name=f"{node.name}/with_block_sums")
    for made in (summed, joined):
        made.outputs[0].name = f"{made.name}/output_0"
        model.graph.insert_before(node, made)
    return joined.outputs[0]


def _scales(model: ir.Model, name: str, blocks: Blocks) -> ir.Value:
    """The scales as float32; stored in float16 where that loses nothing, and cast (folded when it is loaded)."""
    import onnx_ir as ir

    stored = _constant(model, f"{name}.scales", half_scales(blocks))
    if stored.dtype == ir.DataType.FLOAT:
        return stored
    cast = next((use.node for use in stored.uses() if use.node.op_type == "Cast"), None)
    if cast is None:
        cast = ir.node("Cast", [stored], {"to": int(ir.DataType.FLOAT)}, name=f"{name}.scales/Cast")
        cast.outputs[0].name = f"{name}.scales/float32"
        model.graph.insert_before(model.graph[0], cast)
    return cast.outputs[0]


def _quantise_tables(model: ir.Model, head: ir.Node, plan: WeightPlan) -> int:
    """Quantise the embedding's table to 8 bits and, if the head shares it, the head from the same blocks."""
    changed = 0
    for node in list(model.graph):
        table = node.inputs[0] if node.op_type == "Gather" and node.inputs else None
        if table is None or table.const_value is None or len(table.const_value.shape) != 2:
            continue
        weights = np.asarray(table.const_value.numpy(), dtype=np.float32)
        blocks = quantise_rows(weights, plan.table)
        assert blocks is not None
        name, shape = str(table.name), weights.shape
        del weights
        if head.op_type == "FusedMatMul" and head.inputs[1] is table:
            replace_node(model, head, _matmul(model, head, name, blocks, shape, plan))
            changed += 1
        _lookup(model, node, name, blocks, shape[1])
        changed += 1
    drop_unused(model)
    return changed


def _lookup(model: ir.Model, node: ir.Node, name: str, blocks: Blocks, columns: int) -> None:
    """Replace a table's Gather: rows of bytes (…, blocks, block) minus 128, times their scales, flattened."""
    import onnx_ir as ir

    base = f"{node.name}/int8"
    ids = node.inputs[1]
    steps: list[ir.Node] = []

    def step(op_type: str, inputs: list[ir.Value | None], **attributes: int) -> ir.Value:
        made = ir.node(op_type, inputs, attributes, name=f"{base}/{op_type}_{len(steps)}")
        made.outputs[0].name = f"{base}/{op_type}_{len(steps)}/output_0"
        steps.append(made)
        return made.outputs[0]

    packed = step("Gather", [_constant(model, f"{name}.packed", blocks.levels), ids], axis=0)
    scales = step("Gather", [_constant(model, f"{name}.scales", half_scales(blocks)), ids], axis=0)
    if half_scales(blocks).dtype == np.float16:
        scales = step("Cast", [scales], to=int(ir.DataType.FLOAT))
    levels = step("Cast", [packed], to=int(ir.DataType.FLOAT))
    zero = _constant(model, "/edge/int8_zero", np.array(_INT8_ZERO, np.float32))
    centred = step("Sub", [levels, zero])
    last = _constant(model, "/edge/last_axis", np.array([-1], np.int64))
    scaled = step("Mul", [centred, step("Unsqueeze", [scales, last])])
    flat = _constant(model, "/edge/flat_row", np.array([0, 0, -1], np.int64))
    if blocks.levels.shape[1] * blocks.block == columns:
        step("Reshape", [scaled, flat])
    else:
        rows = step("Reshape", [scaled, flat])
        start, end = (
            _constant(model, f"/edge/{key}", np.array([at], np.int64))
            for key, at in (("start", 0), ("columns", columns))
        )
        step("Slice", [rows, start, end, last])
    for made in steps[:-1]:
        model.graph.insert_before(node, made)
    replace_node(model, node, steps[-1])


def halve_weights(model: ir.Model) -> int:
    """Store weight matrices in float16 and cast them to float32 in the graph (folded when it is loaded)."""
    import onnx_ir as ir

    changed = 0
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if (
            tensor is None
            or tensor.dtype != ir.DataType.FLOAT
            or len(tensor.shape) != 2
            or name.startswith(("cos_", "sin_"))
        ):
            continue
        limit = np.float32(np.finfo(np.float16).max)
        half = np.clip(tensor.numpy(), -limit, limit).astype(np.float16)
        stored = new_value(f"{name}.half", ir.tensor(half, name=f"{name}.half"))
        cast = ir.node("Cast", [stored], {"to": int(ir.DataType.FLOAT)}, name=f"{name}/Cast")
        cast.outputs[0].name = f"{name}/Cast/output_0"
        value.replace_all_uses_with(cast.outputs[0])
        del model.graph.initializers[name]
        model.graph.register_initializer(stored)
        model.graph.insert_before(model.graph[0], cast)
        changed += 1
    return changed
