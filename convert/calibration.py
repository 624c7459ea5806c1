"""What calibrates: the user's sample images, or random tokens, and the ranges that activations take on them.

Images that calibrate and images that judge never overlap.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_convert.convert.graph_tools import Feed, cpu_session, with_outputs
from edge_convert.runtime.errors import ConversionError, UsageError

if TYPE_CHECKING:
    import onnx

Range = tuple[float, float]  # least and largest value that is represented
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
MIN_IMAGES = 8
_JUDGE_EVERY = 3  # the third, sixth, ... image by name is held out of calibration
_BINS = 2048
_STEPS = 255  # of uint8
_SHARES = np.linspace(0.3, 1, 29)  # of the observed range
_OPENINGS = 256  # vocabularies begin with their special tokens
_TEXT_LENGTH = 24
_TEXTS = 16  # per feed


def image_files(folder: Path) -> list[Path]:
    """The image files directly in `folder`, by name; raises ConversionError if it is no folder."""
    if not folder.is_dir():
        raise ConversionError(f"The calibration folder {folder} does not exist. Pass --calibration DIR with photos.")
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)


def calibration_images(folder: Path | None) -> list[Path]:
    """The images that calibrate; UsageError without a folder, ConversionError below `MIN_IMAGES`."""
    if folder is None:
        raise UsageError(
            "int8 of an image classifier needs sample photos to measure its activations. Pass --calibration DIR."
        )
    files = image_files(folder)
    if len(files) < MIN_IMAGES:
        raise ConversionError(
            f"The calibration folder {folder} has {len(files)} images ({', '.join(SUFFIXES)}), and at least "
            f"{MIN_IMAGES} are needed. Add photos like those the camera will see."
        )
    return [path for index, path in enumerate(files, start=1) if index % _JUDGE_EVERY]


def judging_images(folder: Path | None) -> list[Path]:
    """The images that judge the result: those that never calibrate; empty without a folder."""
    return [] if folder is None else image_files(folder)[_JUDGE_EVERY - 1 :: _JUDGE_EVERY]


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


def activation_ranges(source: Path, feeds: Sequence[Feed]) -> dict[str, Range]:
    """Ranges of least squared error for uint8 of the unbounded activations inside a convolutional network.

    A few far values otherwise leave all others coarse steps. Values that a Clip or Relu bounds are left out, and
    so are the outputs. Feeds are run twice, for the extremes and for histograms, of which alone anything is held.
    """
    import onnx

    model = onnx.load(source)
    bounded = {node.input[0] for node in model.graph.node if node.op_type in ("Clip", "Relu")}
    bounded |= {value.name for value in model.graph.output}
    kinds = ("Conv", "Gemm", "MatMul", "Add")
    made = [node.output[0] for node in model.graph.node if node.op_type in kinds]
    names = [name for name in made if name not in bounded]
    extremes: dict[str, Range] = {}
    for name, value in _values(model, names, feeds):
        low, high = extremes.get(name, (0.0, 0.0))
        extremes[name] = (min(low, float(value.min())), max(high, float(value.max())))
    counts = {name: np.zeros(_BINS) for name in extremes}
    for name, value in _values(model, list(extremes), feeds):
        counts[name] += np.histogram(value, _BINS, extremes[name])[0]
    return {name: least_error_range(counts[name], extremes[name]) for name in extremes}


def least_error_range(counts: NDArray[Any], extremes: Range) -> Range:
    """The part of `extremes` whose uint8 steps and cut ends together have the least squared error.

    Args:
        counts: histogram (bins,) between the extremes.
        extremes: least and largest value, around 0.
    """
    low, high = extremes
    middles = low + (np.arange(len(counts)) + 0.5) * (high - low) / len(counts)

    def error(candidate: Range) -> float:
        step = (candidate[1] - candidate[0]) / _STEPS
        cut = np.square(middles - middles.clip(*candidate))
        return float(counts @ cut + counts.sum() * step**2 / 12)

    return min(((low * a, high * b) for a, b in itertools.product(_SHARES, _SHARES)), key=error)


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
