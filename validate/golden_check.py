"""What golden data must look like, checked once when they are read: names, dtypes, shapes, ranges, JSON.

A bundle's golden data come from the file system of a device; nothing behind this check has to doubt them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edge_convert.runtime.strict import load_json

if TYPE_CHECKING:
    from edge_convert.runtime.manifest import Manifest

Arrays = dict[str, npt.NDArray[Any]]
_ROUNDING = 1e-3
# Name: kinds of dtype as NumPy's letters, item size in bytes (None: any), number of axes.
_JSON = ("u", 1, 1)
_COUNT = ("iu", None, 0)
_LAYOUT: dict[str, dict[str, tuple[str, int | None, int]]] = {
    "text-generation": {
        "ids": ("i", 8, 1),
        "lengths": ("i", 8, 1),
        "top_ids": ("i", 4, 2),
        "top_log_probabilities": ("f", 4, 2),
        "texts": _JSON,
        "tokens": _JSON,
        "chats": _JSON,
        "rendered": _JSON,
    },
    "feature-extraction": {"texts": _JSON, "tokens": _JSON, "embeddings": ("f", 4, 2)},
    "image-classification": {"pixels": ("u", 1, 3), "frames": ("u", 1, 4), "logits": ("f", 4, 2), "photos": _COUNT},
}


def check_golden(arrays: Arrays, manifest: Manifest) -> None:
    """Raise ValueError, saying what is wrong, unless `arrays` are golden data for the task of `manifest`."""
    for name, (kinds, size, axes) in _LAYOUT[manifest.task].items():
        if name not in arrays:
            raise ValueError(f"it has no {name!r}")
        array = arrays[name]
        right = array.dtype.kind in kinds and size in (None, array.dtype.itemsize) and array.ndim == axes
        if not right:
            raise ValueError(f"{name!r} is {array.dtype} of the shape {array.shape}")
    _CHECKS[manifest.task](arrays, manifest)


def json_of(array: npt.NDArray[Any]) -> Any:
    """The value behind UTF-8 JSON, uint8 (bytes,)."""
    return load_json(array.tobytes().decode("utf-8"))


def _decoder(arrays: Arrays, manifest: Manifest) -> None:
    ids, lengths, top = arrays["ids"], arrays["lengths"], arrays["top_ids"]
    values = arrays["top_log_probabilities"]
    _require(lengths.size > 0 and bool(((lengths >= 1) & (lengths <= ids.size)).all()), "'lengths' has impossible ones")
    _require(int(lengths.sum()) == ids.size, "'lengths' do not add up to the number of ids")
    _require(top.shape == values.shape and len(top) == ids.size and top.size > 0, "its arrays differ in length")
    vocabulary = _output_width(manifest, "decoder") or np.iinfo(np.int32).max
    for name, found in (("ids", ids), ("top_ids", top)):
        _require(0 <= int(found.min()) <= int(found.max()) < vocabulary, f"{name!r} leave the vocabulary")
    ordered = np.sort(top, axis=1)
    _require(not (ordered[:, 1:] == ordered[:, :-1]).any(), "'top_ids' has a token twice")
    _require(bool((values <= _ROUNDING).all()), "'top_log_probabilities' are no logarithms of probabilities")
    totals = np.exp(values.astype(np.float64)).sum(axis=1)
    _require(bool((totals <= 1 + _ROUNDING).all()), "'top_log_probabilities' add up to more than 1")
    _texts_and_tokens(arrays)
    chats = _list(arrays, "chats")
    for chat in chats:
        _require(
            isinstance(chat, list) and bool(chat) and all(_is_message(item) for item in chat), "'chats' has no chats"
        )
    rendered = _list(arrays, "rendered")
    _require(
        len(rendered) == len(chats) and all(item is None or isinstance(item, str) for item in rendered),
        "'rendered' is not one text for each chat",
    )


def _embedder(arrays: Arrays, manifest: Manifest) -> None:
    texts, embeddings = _texts_and_tokens(arrays), arrays["embeddings"]
    width = _output_width(manifest, "encoder") or embeddings.shape[1]
    _require(len(embeddings) == texts and embeddings.shape[1] == width > 0, "'embeddings' has another shape")
    _require(bool(np.isfinite(embeddings).all()), "'embeddings' are not all numbers")


def _classifier(arrays: Arrays, manifest: Manifest) -> None:
    pixels, frames, logits = arrays["pixels"], arrays["frames"], arrays["logits"]
    _require(pixels.size > 0 and pixels.shape[2] == 3, "'pixels' is no picture")
    _require(frames.size > 0 and frames.shape[3] == 3, "'frames' are no pictures")
    width = _output_width(manifest, "classifier") or logits.shape[1]
    _require(len(logits) == len(frames) and logits.shape[1] == width > 0, "'logits' has another shape")
    _require(bool(np.isfinite(logits).all()), "'logits' are not all numbers")
    _require(int(arrays["photos"]) == len(frames) - 1, "'photos' is not the number of frames but one")


_CHECKS: dict[str, Callable[[Arrays, Manifest], None]] = {
    "text-generation": _decoder,
    "feature-extraction": _embedder,
    "image-classification": _classifier,
}


def _texts_and_tokens(arrays: Arrays) -> int:
    """The number of texts, each of which has its list of token ids."""
    texts, tokens = _list(arrays, "texts"), _list(arrays, "tokens")
    _require(bool(texts) and all(isinstance(text, str) for text in texts), "'texts' has no texts")
    _require(len(tokens) == len(texts), "'tokens' is not one list for each text")
    for row in tokens:
        whole = isinstance(row, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in row)
        _require(whole and min(row, default=0) >= 0, "'tokens' has something that is no token id")
    return len(texts)


def _list(arrays: Arrays, name: str) -> list[Any]:
    try:
        value = json_of(arrays[name])
    except ValueError as error:
        raise ValueError(f"{name!r} is not JSON ({error})") from error
    if not isinstance(value, list):
        raise ValueError(f"{name!r} is no list")
    return value


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)


def _output_width(manifest: Manifest, role: str) -> int | None:
    """The last size of the graph's first output; None where it is not fixed."""
    graph = getattr(manifest, "graphs", {}).get(role)
    shape = graph.outputs[0].shape if graph and graph.outputs else ()
    return shape[-1] if shape and isinstance(shape[-1], int) else None


def _require(right: bool, wrong: str) -> None:
    if not right:
        raise ValueError(wrong)
