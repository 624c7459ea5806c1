"""Weight-only quantisation of a decoder graph: blocks along the input dim, 8 or 4 bits, one scale a block.

Linear layers become MatMulNBits. The embedding is kept in 8 bits: rows of bytes and of scales are gathered
and multiplied with standard operators (which every runtime has), and a tied head reads the same two tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edge_convert.convert.decoder_passes import drop_unused, find_head, new_value, replace_node

if TYPE_CHECKING:
    import onnx_ir as ir

_MICROSOFT = "com.microsoft"
_ROWS_AT_ONCE = 4096
_INT8_ZERO = 128
# How far an int4 block's range is drawn in; the best by squared error is taken.
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Bits and block sizes: `bits` for linear layers, always 8 for the embedding and the head.

    `gate_block` is for the gate and up projections, which are the largest and bear coarse blocks best.
    """

    bits: int
    block: int
    gate_block: int
    table_block: int
    accuracy_level: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Quantised (rows, columns) in MatMulNBits' layout.

    `packed` uint8 (rows, blocks, block * bits / 8), `scales` float32 (rows, blocks), `zeros` uint8
    (rows, ceil(blocks * bits / 8)) or None for the symmetric zero point 2**(bits - 1).
    """

    packed: Bytes
    scales: Floats
    zeros: Bytes | None


def quantise_graph(model: ir.Model, plan: WeightPlan) -> int:
    """Quantise every MatMul with a constant weight and the embedding in place; returns how many nodes changed."""
    head = find_head(model)
    changed = _quantise_tables(model, head, plan)
    for node in list(model.graph):
        if node.op_type != "MatMul" or len(node.inputs) != 2:
            continue
        weight = node.inputs[1]
        if weight is None or weight.const_value is None or len(weight.const_value.shape) != 2:
            continue
        rows = np.ascontiguousarray(weight.const_value.numpy().T, dtype=np.float32)
        bits, block = (8, plan.table_block) if node is head else (plan.bits, _block(node, plan))
        replace_node(
            model, node, _matmul(model, node, str(weight.name), quantise_rows(rows, bits, block), rows.shape, plan)
        )
        changed += 1
        del rows
        drop_unused(model)
    return changed


def _block(node: ir.Node, plan: WeightPlan) -> int:
    name = node.name or ""
    return plan.gate_block if "/gate_proj/" in name or "/up_proj/" in name or "/gate_up_proj/" in name else plan.block


def quantise_rows(weights: Floats, bits: int, block: int) -> Blocks:
    """Quantise float32 (rows, columns) in blocks of `block` columns; the last block is padded with zeros.

    8 bits is symmetric (zero point 128). 4 bits has a zero point a block, and the block's range is shrunk
    by the factor with the least squared error.
    """
    parts = [
        _quantise(weights[start : start + _ROWS_AT_ONCE], bits, block)
        for start in range(0, len(weights), _ROWS_AT_ONCE)
    ]
    zeros = None if bits == 8 else np.concatenate([part.zeros for part in parts if part.zeros is not None])
    return Blocks(np.concatenate([p.packed for p in parts]), np.concatenate([p.scales for p in parts]), zeros)


def dequantise_rows(blocks: Blocks, columns: int) -> Floats:
    """The float32 (rows, columns) that `blocks` stands for."""
    count = blocks.scales.shape[1]
    if blocks.zeros is None:
        levels = blocks.packed.astype(np.float32) - _INT8_ZERO
    else:
        levels = _unpack(blocks.packed).astype(np.float32)
        levels -= _unpack(blocks.zeros)[:, :count, None].astype(np.float32)
    values = levels * blocks.scales[:, :, None]
    return np.ascontiguousarray(values.reshape(len(values), -1)[:, :columns])


def _quantise(weights: Floats, bits: int, block: int) -> Blocks:
    rows, columns = weights.shape
    padded = np.pad(weights, ((0, 0), (0, -columns % block))) if columns % block else weights
    grouped = np.asarray(padded, dtype=np.float32).reshape(rows, -1, block)
    if bits == 8:
        scales = np.abs(grouped).max(axis=2) / 127
        safe = np.where(scales > 0, scales, 1)
        levels = np.rint(grouped / safe[:, :, None]) + _INT8_ZERO
        return Blocks(levels.astype(np.uint8), scales.astype(np.float32), None)
    low, high = np.minimum(grouped.min(axis=2), 0), np.maximum(grouped.max(axis=2), 0)
    best = np.full(low.shape, np.inf, dtype=np.float32)
    levels = np.zeros(grouped.shape, dtype=np.uint8)
    scales, zeros = np.ones(low.shape, dtype=np.float32), np.zeros(low.shape, dtype=np.uint8)
    for shrink in _SHRINKS:
        scale = (high - low) * np.float32(shrink / 15)
        scale = np.where(scale > 0, scale, np.float32(1))
        zero = np.clip(np.rint(-low * np.float32(shrink) / scale), 0, 15)
        level = np.clip(np.rint(grouped / scale[:, :, None]) + zero[:, :, None], 0, 15)
        difference = (level - zero[:, :, None]) * scale[:, :, None] - grouped
        error = np.einsum("rbk,rbk->rb", difference, difference)
        better = error < best
        best = np.where(better, error, best)
        scales, zeros = np.where(better, scale, scales), np.where(better, zero, zeros).astype(np.uint8)
        levels[better] = level[better].astype(np.uint8)
    return Blocks(_pack(levels), scales.astype(np.float32), _pack(zeros))


def _pack(levels: Bytes) -> Bytes:
    """Two 4-bit values a byte along the last axis, the first in the low half; an odd end is padded with 0."""
    if levels.shape[-1] % 2:
        levels = np.concatenate([levels, np.zeros((*levels.shape[:-1], 1), np.uint8)], axis=-1).astype(np.uint8)
    packed: Bytes = levels[..., ::2] | (levels[..., 1::2] << np.uint8(4))
    return packed


def _unpack(packed: Bytes) -> Bytes:
    levels: Bytes = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1).reshape(*packed.shape[:-1], -1)
    return levels


def _constant(model: ir.Model, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
    """Register `array` as the initializer `name`, once."""
    import onnx_ir as ir

    if name not in model.graph.initializers:
        model.graph.register_initializer(new_value(name, ir.tensor(array, name=name)))
    return model.graph.initializers[name]


def _matmul(
    model: ir.Model, node: ir.Node, name: str, blocks: Blocks, shape: tuple[int, ...], plan: WeightPlan
) -> ir.Node:
    import onnx_ir as ir

    bits, block = (8, blocks.packed.shape[2]) if blocks.zeros is None else (4, 2 * blocks.packed.shape[2])
    inputs = [node.inputs[0], _constant(model, f"{name}.packed", blocks.packed)]
    inputs.append(_constant(model, f"{name}.scales", blocks.scales))
    if blocks.zeros is not None:
        inputs.append(_constant(model, f"{name}.zeros", blocks.zeros))
    attributes = {"K": shape[1], "N": shape[0], "bits": bits, "block_size": block}
    if plan.accuracy_level:
        attributes["accuracy_level"] = plan.accuracy_level
    return ir.node("MatMulNBits", inputs, attributes, domain=_MICROSOFT, name=node.name)


def _quantise_tables(model: ir.Model, head: ir.Node, plan: WeightPlan) -> int:
    """Quantise the embedding's table to 8 bits and, if the head shares it, the head from the same blocks."""
    changed = 0
    for node in list(model.graph):
        table = node.inputs[0] if node.op_type == "Gather" and node.inputs else None
        if table is None or table.const_value is None or len(table.const_value.shape) != 2:
            continue
        weights = np.asarray(table.const_value.numpy(), dtype=np.float32)
        blocks = quantise_rows(weights, 8, plan.table_block)
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

    packed = step("Gather", [_constant(model, f"{name}.packed", blocks.packed), ids], axis=0)
    scales = step("Gather", [_constant(model, f"{name}.scales", blocks.scales), ids], axis=0)
    levels = step("Cast", [packed], to=int(ir.DataType.FLOAT))
    zero = _constant(model, "/edge/int8_zero", np.array(_INT8_ZERO, np.float32))
    centred = step("Sub", [levels, zero])
    last = _constant(model, "/edge/last_axis", np.array([-1], np.int64))
    scaled = step("Mul", [centred, step("Unsqueeze", [scales, last])])
    flat = _constant(model, "/edge/flat_row", np.array([0, 0, -1], np.int64))
    if blocks.packed.shape[1] * blocks.packed.shape[2] == columns:
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
