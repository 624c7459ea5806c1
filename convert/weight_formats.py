"""Block quantisation of one weight matrix: how it is stored, what it costs, and what it stands for.

A matrix is (rows, columns) with `rows` the outputs; a block is `block` neighbouring columns of one row with one
scale. A value is (level - zero) * scale + fraction: levels and zero points are integers, as MatMulNBits stores
them, and the fraction is the part of a zero point that is no integer, one number a block. Its product with
the sum of the block's inputs is what a graph adds: sum (level - zero) * scale * x + fraction * sum x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_ROWS_AT_ONCE = 4096
ROWS_TO_TRY = 64  # before a whole matrix is searched for a grid
# How far a block's range is drawn in; the best by squared error is taken.
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
# Of a block's largest value: products of two float16 numbers in float32 differ by less, other weights by more.
_GRID_ERROR = 3e-6


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a matrix is stored: `bits` 4 or 8, columns a block, and the method that finds levels and scales.

    Methods: "nearest" (range of the block; symmetric at 8 bits), "shrink" (range drawn in for the least squared
    error), "hqq" (half-quadratic quantisation of ONNX Runtime, zero points that are no integers), "grid" (the
    levels that the weights already lie on, without error).
    """

    bits: int
    block: int
    method: str = "nearest"

    def __str__(self) -> str:
        return f"int{self.bits}/{self.block} {self.method}"


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised (rows, columns).

    `levels` uint8 (rows, blocks, block), one a byte; `scales` float32 (rows, blocks); `zeros` uint8
    (rows, blocks) or None for the middle, 2**(bits - 1); `fraction` is the matrix (rows, blocks) of fractions,
    quantised with the same bits and block, or None for none. A fraction is at most half a step, so its own rounding
    leaves 1/30 of a step.
    Columns past the end of the matrix have the value of a zero input, so nothing of them is seen.
    """

    bits: int
    levels: Bytes
    scales: Floats
    zeros: Bytes | None = None
    fraction: Blocks | None = None

    @property
    def block(self) -> int:
        """Columns a block."""
        return int(self.levels.shape[2])


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows as a method leaves them; `fractions` float32 (rows, blocks) are not quantised yet."""

    bits: int
    levels: Bytes
    scales: Floats
    zeros: Bytes | None = None
    fractions: Floats | None = None


def quantise_rows(weights: Floats, form: WeightFormat) -> Blocks | None:
    """Quantise float32 (rows, columns); None if the method is "grid" and the weights lie on none."""
    method = _METHODS[form.method]
    if form.method == "grid" and not lies_on_grid(weights, form):
        return None
    parts = []
    for start in range(0, len(weights), _ROWS_AT_ONCE):
        part = method(_blocked(weights[start : start + _ROWS_AT_ONCE], form.block), form.bits)
        if part is None:
            return None
        parts.append(part)
    return Blocks(
        form.bits,
        np.concatenate([part.levels for part in parts]),
        _halved(np.concatenate([part.scales for part in parts])),
        _joined(parts),
        _fraction(parts, form),
    )


def lies_on_grid(weights: Floats, form: WeightFormat) -> bool:
    """Whether the first rows of float32 (rows, columns) lie on a grid that `form` can hold; cheap."""
    return _grid(_blocked(weights[:ROWS_TO_TRY], form.block), form.bits) is not None


def dequantise_rows(blocks: Blocks, columns: int) -> Floats:
    """The float32 (rows, columns) that `blocks` stand for."""
    levels = blocks.levels.astype(np.float32)
    levels -= np.float32(1 << (blocks.bits - 1)) if blocks.zeros is None else blocks.zeros[:, :, None]
    values = levels * blocks.scales[:, :, None]
    if blocks.fraction is not None:
        values += dequantise_rows(blocks.fraction, blocks.scales.shape[1])[:, :, None]
    return np.ascontiguousarray(values.reshape(len(values), -1)[:, :columns])


def half_scales(blocks: Blocks) -> npt.NDArray[np.float16 | np.float32]:
    """The scales as they are stored: float16 where that loses nothing, else float32."""
    half = blocks.scales.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), blocks.scales) else blocks.scales


def _halved(scales: Floats) -> Floats:
    """Scales rounded to float16 (1/2048 of a scale at most), unless one of them is not a normal float16 number."""
    limits = np.finfo(np.float16)
    normal = (scales == 0) | ((scales >= limits.tiny) & (scales <= limits.max))
    return scales.astype(np.float16).astype(np.float32) if bool(normal.all()) else scales


def stored_bytes(blocks: Blocks) -> int:
    """Bytes of levels, scales, zero points and fraction, as the graph stores them."""
    rows, count, block = blocks.levels.shape
    total = int(rows * count * block * blocks.bits // 8 + half_scales(blocks).nbytes)
    if blocks.zeros is not None:
        total += int(rows * -(-count * blocks.bits // 8))
    return total + (0 if blocks.fraction is None else stored_bytes(blocks.fraction))


def pack(values: Bytes, bits: int) -> Bytes:
    """Along the last axis two 4-bit values a byte, the first in the low half (an odd end with 0); 8 bits as they are."""
    if bits == 8:
        return values
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros((*values.shape[:-1], 1), np.uint8)], axis=-1).astype(np.uint8)
    packed: Bytes = values[..., ::2] | (values[..., 1::2] << np.uint8(4))
    return packed


def _joined(parts: list[_Part]) -> Bytes | None:
    """The zero points of all rows; None if they are the middle everywhere."""
    if all(part.zeros is None for part in parts):
        return None
    middle = 1 << (parts[0].bits - 1)
    return np.concatenate(
        [np.full(part.scales.shape, middle, np.uint8) if part.zeros is None else part.zeros for part in parts]
    )


def _fraction(parts: list[_Part], form: WeightFormat) -> Blocks | None:
    """The fractions of all rows, quantised; None if there are none."""
    if all(part.fractions is None for part in parts):
        return None
    rows = [np.zeros(part.scales.shape, np.float32) if part.fractions is None else part.fractions for part in parts]
    return quantise_rows(np.concatenate(rows), WeightFormat(form.bits, form.block, "shrink"))


def _blocked(weights: Floats, block: int) -> Floats:
    """(rows, columns) as (rows, blocks, block), the last block filled with zeros."""
    rows, columns = weights.shape
    padded = np.pad(weights, ((0, 0), (0, -columns % block))) if columns % block else weights
    return np.asarray(padded, dtype=np.float32).reshape(rows, -1, block)


def _nearest(grouped: Floats, bits: int) -> _Part:
    return _symmetric(grouped, bits) if bits == 8 else _ranged(grouped, bits, _SHRINKS[:1])


def _shrink(grouped: Floats, bits: int) -> _Part:
    return _symmetric(grouped, bits) if bits == 8 else _ranged(grouped, bits, _SHRINKS)


def _symmetric(grouped: Floats, bits: int) -> _Part:
    middle = 1 << (bits - 1)
    scales = np.abs(grouped).max(axis=2) / (middle - 1)
    safe = np.where(scales > 0, scales, 1)
    levels = np.clip(np.rint(grouped / safe[:, :, None]) + middle, 0, 2 * middle - 1)
    return _Part(bits, levels.astype(np.uint8), scales.astype(np.float32))


def _ranged(grouped: Floats, bits: int, shrinks: tuple[float, ...]) -> _Part:
    """Asymmetric with integer zero points: the range with zero inside, drawn in by the best of `shrinks`."""
    top = (1 << bits) - 1
    low, high = np.minimum(grouped.min(axis=2), 0), np.maximum(grouped.max(axis=2), 0)
    best = np.full(low.shape, np.inf, dtype=np.float32)
    levels = np.zeros(grouped.shape, dtype=np.uint8)
    scales, zeros = np.ones(low.shape, dtype=np.float32), np.zeros(low.shape, dtype=np.uint8)
    for shrink in shrinks:
        scale = (high - low) * np.float32(shrink / top)
        scale = np.where(scale > 0, scale, np.float32(1))
        zero = np.clip(np.rint(-low * np.float32(shrink) / scale), 0, top)
        level = np.clip(np.rint(grouped / scale[:, :, None]) + zero[:, :, None], 0, top)
        difference = (level - zero[:, :, None]) * scale[:, :, None] - grouped
        error = np.einsum("rbk,rbk->rb", difference, difference)
        better = error < best
        best = np.where(better, error, best)
        scales, zeros = np.where(better, scale, scales), np.where(better, zero, zeros).astype(np.uint8)
        levels[better] = level[better].astype(np.uint8)
    return _Part(bits, levels, scales.astype(np.float32), zeros)


def _hqq(grouped: Floats, bits: int) -> _Part:
    """Half-quadratic quantisation (Badri and Shaji, 2023) as ONNX Runtime has it, block by block."""
    import torch
    from onnxruntime.quantization.matmul_nbits_quantizer import HQQWeightOnlyQuantizer

    rows, count, block = grouped.shape
    flat = torch.from_numpy(np.ascontiguousarray(grouped.reshape(-1, block)))
    solver = HQQWeightOnlyQuantizer(config=None)  # its settings are for whole graphs
    found, scale, zero = solver.quantize_internal(flat, bits=bits, group_size=block, round_zero=False, axis=1)
    scales = scale.numpy().reshape(rows, count).astype(np.float32)
    exact = zero.numpy().reshape(rows, count).astype(np.float32)
    return _with_fraction(bits, found.numpy().reshape(grouped.shape).astype(np.uint8), scales, -exact * scales)


def _grid(grouped: Floats, bits: int) -> _Part | None:
    """The grid that every block lies on: value = low + level * step with at most 2**bits levels.

    GGUF's types are such grids (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 in blocks of 32, Q4_K and Q5_K in parts of 32, Q6_K of
    16), and so is any checkpoint that was dequantised. The step is the least distance of two values, or
    half or a third of it where a block uses few levels.
    """
    low, high = grouped.min(axis=2), grouped.max(axis=2)
    allowed = _GRID_ERROR * np.maximum(np.abs(low), np.abs(high))
    gaps = np.diff(np.sort(grouped, axis=2), axis=2)
    gaps[gaps <= 2 * allowed[:, :, None]] = np.inf
    least = gaps.min(axis=2)
    step = np.where(np.isfinite(least), least, 1).astype(np.float32)
    levels = np.zeros(grouped.shape, dtype=np.uint8)
    scales = np.ones(low.shape, dtype=np.float32)
    missing = np.ones(low.shape, dtype=bool)
    for divisor in (1, 2, 3):
        top = np.maximum(np.rint((high - low) * divisor / step), 1)
        scale = np.where(high > low, (high - low) / top, 1).astype(np.float32)
        level = np.rint((grouped - low[:, :, None]) / scale[:, :, None])
        error = np.abs(level * scale[:, :, None] + low[:, :, None] - grouped).max(axis=2)
        fits = missing & (error <= allowed) & (level.max(axis=2) < (1 << bits))
        levels[fits] = level[fits].astype(np.uint8)
        scales = np.where(fits, scale, scales)
        missing &= ~fits
        if not missing.any():
            return _with_fraction(bits, levels, scales, low)
    return None


def _with_fraction(bits: int, levels: Bytes, scales: Floats, low: Floats) -> _Part:
    """Blocks of value = low + level * scale: `low` as an integer zero point and what is left."""
    middle, top = 1 << (bits - 1), (1 << bits) - 1
    zeros = np.clip(np.rint(-low / scales), 0, top)
    fractions = (low + zeros * scales).astype(np.float32)
    # Where the zero point is an integer, float32 leaves some millionths of a step.
    fractions[np.abs(fractions) <= 1e-4 * scales] = 0
    if not fractions.any():
        shifted = levels.astype(np.int16) + (middle - zeros).astype(np.int16)[:, :, None]
        if shifted.min() >= 0 and shifted.max() <= top:
            return _Part(bits, shifted.astype(np.uint8), scales.astype(np.float32))
    return _Part(
        bits,
        levels,
        scales.astype(np.float32),
        zeros.astype(np.uint8),
        fractions if fractions.any() else None,
    )


_METHODS: dict[str, Callable[[Floats, int], _Part | None]] = {
    "nearest": _nearest,
    "shrink": _shrink,
    "hqq": _hqq,
    "grid": _grid,
}
