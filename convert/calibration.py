"""Random tokens that calibrate encoders, and the ranges that activations take on calibration feeds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_convert.convert.graph_tools import Feed, cpu_session, with_outputs

if TYPE_CHECKING:
    import onnx

Range = tuple[float, float]  # least and largest value that is represented
# Sums stay in fp32: what a residual network carries along is then rounded once a layer, not once more at each sum.
STATIC_OPERATORS = ("Conv", "Gemm", "MatMul", "GlobalAveragePool", "MaxPool", "Clip", "Relu")
_BINS = 2048
_STEPS = 255  # of uint8
_SHARES = np.linspace(0.3, 1, 29)  # of the observed range
_PERCENTILE = 0.9999
_OPENINGS = 256  # vocabularies begin with their special tokens
_TEXT_LENGTH = 24
_TEXTS = 16  # per feed


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often a value lay in each of `counts.size` equal parts between `low` and `high`, around 0.

    `bounded`: a Clip or Relu made it.
    """

    counts: NDArray[np.float64]
    low: float
    high: float
    bounded: bool = False

    @property
    def middles(self) -> NDArray[np.float64]:
        """The middle of each part."""
        count = len(self.counts)
        return self.low + (np.arange(count) + 0.5) * (self.high - self.low) / count


def token_feeds(model: onnx.ModelProto) -> list[Feed]:
    """Random texts (batch, sequence) for an encoder of tokens; empty if the graph reads anything else.

    The first tokens of the vocabulary, among them those that open and close a text, each open one. An input
    that indexes no large table is 1 for a mask and 0 for anything else.
    """
    tables = {tensor.name: tensor.dims[0] for tensor in model.graph.initializer if len(tensor.dims) == 2}
    words = {
        node.input[1]: tables[node.input[0]]
        for node in model.graph.node
        if node.op_type == "Gather" and tables.get(node.input[0], 0) >= _OPENINGS
    }
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in constants]
    integers = {6: np.int32, 7: np.int64}
    kinds = [(value.type.tensor_type.elem_type, len(value.type.tensor_type.shape.dim)) for value in inputs]
    if not any(value.name in words for value in inputs) or any(
        kind not in integers or rank not in (1, 2) for kind, rank in kinds
    ):
        return []
    rng = np.random.default_rng(0)
    feeds = []
    for start in range(0, _OPENINGS, _TEXTS):
        feed: Feed = {}
        for value, (kind, rank) in zip(inputs, kinds, strict=True):
            shape = (_TEXTS, _TEXT_LENGTH)
            tokens = np.full(shape, int("mask" in value.name))
            if value.name in words:
                tokens = rng.integers(0, words[value.name], shape)
                tokens[:, 0] = np.arange(start, start + _TEXTS)
                tokens[:, -1] = tokens[:, 0] + 1
            feed[value.name] = (tokens if rank == 2 else tokens.reshape(-1)).astype(integers[kind])
        feeds.append(feed)
    return feeds


def channel_peaks(model: onnx.ModelProto, names: Sequence[str], feeds: Sequence[Feed]) -> dict[str, NDArray[Any]]:
    """The largest magnitude of each channel (last axis) of the values `names` over the feeds; (channels,) each."""
    peaks: dict[str, NDArray[Any]] = {}
    for name, value in _values(model, names, feeds):
        found = np.abs(value).reshape(-1, value.shape[-1]).max(0)
        peaks[name] = np.maximum(peaks.get(name, found), found)
    return peaks


def observe(model: onnx.ModelProto, feeds: Sequence[Feed]) -> dict[str, Histogram]:
    """Histograms of the values that static quantisation stores: what its operators read and write.

    A value that only a Clip or Relu reads is stored after it, so it is left out; so are the graph's outputs. The feeds
    are run twice, for the extremes and for the counts, of which alone anything is held: 16 kB a value.
    """
    cut = {node.input[0] for node in model.graph.node if node.op_type in ("Clip", "Relu")}
    left_out = cut | {value.name for value in model.graph.output} | {t.name for t in model.graph.initializer} | {""}
    inside = [node for node in model.graph.node if node.op_type in STATIC_OPERATORS]
    names = dict.fromkeys(name for node in inside for name in (*node.input[:2], *node.output) if name not in left_out)
    extremes: dict[str, Range] = {}
    for name, value in _values(model, list(names), feeds):
        low, high = extremes.get(name, (0.0, 0.0))
        extremes[name] = (min(low, float(value.min())), max(high, float(value.max())))
    counts = {name: np.zeros(_BINS) for name in extremes}
    for name, value in _values(model, list(extremes), feeds):
        counts[name] += np.histogram(value, _BINS, extremes[name])[0]
    bounded = {node.output[0] for node in model.graph.node if node.op_type in ("Clip", "Relu")}
    return {name: Histogram(counts[name], *extremes[name], name in bounded) for name in extremes}


def least_squares(histogram: Histogram) -> Range:
    """The part of the extremes whose uint8 steps and cut ends together have the least squared error.

    A few far values otherwise leave all others coarse steps.
    """
    counts, middles = histogram.counts, histogram.middles

    def error(candidate: Range) -> float:
        step = (candidate[1] - candidate[0]) / _STEPS
        cut = np.square(middles - middles.clip(*candidate))
        return float(counts @ cut + counts.sum() * step**2 / 12)

    low, high = histogram.low, histogram.high
    return min(((low * a, high * b) for a, b in itertools.product(_SHARES, _SHARES)), key=error)


def minmax(histogram: Histogram) -> Range:
    """All that was observed."""
    return histogram.low, histogram.high


def percentile(histogram: Histogram) -> Range:
    """All but the share 1 - `_PERCENTILE` of the values at either end."""
    shares = np.cumsum(histogram.counts) / max(histogram.counts.sum(), 1)
    edges = np.linspace(histogram.low, histogram.high, len(shares) + 1)
    low = float(edges[np.searchsorted(shares, 1 - _PERCENTILE)])
    high = float(edges[min(int(np.searchsorted(shares, _PERCENTILE)) + 1, len(shares))])
    return min(low, 0.0), max(high, 0.0)


def entropy(histogram: Histogram) -> Range:
    """The extremes drawn in so that the distribution in uint8 steps has the least KL divergence from the observed one.

    After Migacz 2017 (8-bit inference with TensorRT), for both ends by the same factor.
    """
    counts, middles = histogram.counts, histogram.middles

    def divergence(share: float) -> float:
        low, high = histogram.low * share, histogram.high * share
        steps = np.rint((middles.clip(low, high) - low) / max((high - low) / _STEPS, 1e-30)).astype(int)
        clipped = np.where((middles >= low) & (middles <= high), counts, 0.0)
        full = clipped.copy()
        full[np.searchsorted(middles, low).clip(0, len(full) - 1)] += counts[middles < low].sum()
        full[(np.searchsorted(middles, high) - 1).clip(0, len(full) - 1)] += counts[middles > high].sum()
        used = clipped > 0
        sums = np.bincount(steps[used], clipped[used], _STEPS + 1)
        shared = np.bincount(steps[used], minlength=_STEPS + 1)
        spread_out = np.where(used, sums[steps] / np.maximum(shared[steps], 1), 0.0)
        p = full / max(full.sum(), 1)
        q = np.maximum(spread_out / max(spread_out.sum(), 1), 1e-12)
        return float((p[p > 0] * np.log(p[p > 0] / q[p > 0])).sum())

    share = min(_SHARES.tolist(), key=divergence)
    return histogram.low * share, histogram.high * share


# How the range of an activation follows from its histogram, by name.
METHODS: dict[str, Callable[[Histogram], Range]] = {
    "minmax": minmax,
    "entropy": entropy,
    "percentile": percentile,
    "least squares": least_squares,
}


def activation_ranges(histograms: Mapping[str, Histogram], method: str) -> dict[str, Range]:
    """The range of each value by the method called `method`; what a Clip or Relu gives keeps its extremes."""
    return {
        name: minmax(histogram) if histogram.bounded else METHODS[method](histogram)
        for name, histogram in histograms.items()
    }


def _values(model: onnx.ModelProto, names: Sequence[str], feeds: Sequence[Feed]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Each of the values `names` on each of the feeds, one feed at a time."""
    if not names:
        return
    given = {value.name for value in model.graph.input}
    inside = [name for name in names if name not in given]
    session = cpu_session(with_outputs(model, inside))
    for feed in feeds:
        found = dict(zip(inside, session.run(inside, feed) if inside else [], strict=True))
        yield from ((name, found.get(name, feed.get(name))) for name in names)  # type: ignore[misc]
