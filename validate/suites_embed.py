"""What is asked of a text embedder: accuracy against the original, and batch and padding invariants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edge_convert.validate import metrics
from edge_convert.validate.gates import GateList
from edge_convert.validate.golden import Golden, unpack_json
from edge_convert.validate.runner import EmbedderReference
from edge_convert.validate.texts import load_texts, long_texts

# Dynamic int8 takes one activation scale for the whole batch, so a neighbour moves a text's vector;
# fp32 and fp16 may only differ by summation order and rounding.
SAME_RESULT_COSINE = {"auto": 0.98, "fp32": 0.99999, "fp16": 0.9995, "int8": 0.98, "int4": 0.95}
_ONE_SCALE = "dynamic int8 has one activation scale for the whole batch"
_SAME_REASON = {"auto": _ONE_SCALE, "int8": _ONE_SCALE}


class EmbedderLike(Protocol):
    """The part of `wrappers.embed.TextEmbedder` that validation drives."""

    def embed(self, texts: str | Sequence[str], *, batch_size: int = 16) -> npt.NDArray[np.float32]:
        """Unit vectors (N, D)."""
        ...

    def encode_ids(self, text: str) -> list[int]:
        """Token ids of one text."""
        ...


def check_embedder(
    embedder: EmbedderLike, reference: EmbedderReference, gates: GateList, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Add accuracy and equality gates against `reference`; returns the measurements."""
    texts = load_texts()
    progress("comparing the tokenizer with the original")
    tokens = [(embedder.encode_ids(text), reference.tokenize(text)) for text in texts]
    progress("comparing embeddings with the original")
    return _compare("embeddings", embedder, texts, tokens, reference.embed(texts), gates)


def check_embedder_golden(embedder: EmbedderLike, golden: Golden, gates: GateList) -> dict[str, Any]:
    """Add accuracy and equality gates against the bundle's golden data; returns the measurements."""
    texts = unpack_json(golden["texts"])
    tokens = list(zip(map(embedder.encode_ids, texts), unpack_json(golden["tokens"]), strict=True))
    return _compare("golden embeddings", embedder, texts, tokens, golden["embeddings"], gates)


def check_embedder_invariants(
    embedder: EmbedderLike, precision: str, gates: GateList, progress: Callable[[str], None], *, exact: bool = True
) -> None:
    """Add the gates that need no original: padded, batched and repeated runs give the same."""
    progress("checking padding and batches")
    bound, reason = SAME_RESULT_COSINE[precision], _SAME_REASON.get(precision, "")
    short, long = load_texts()[:8], long_texts(1)[0]
    alone = np.concatenate([embedder.embed(text) for text in short])
    padded = np.concatenate([embedder.embed([text, long])[:1] for text in short])
    gates.at_least("padded = unpadded", "cosine_min", _cosine_min(alone, padded), bound, reason)
    batched = embedder.embed(short, batch_size=len(short))
    gates.at_least("batch = single", "cosine_min", _cosine_min(alone, batched), bound, reason)
    again = embedder.embed(short, batch_size=len(short))
    if exact:
        gates.equal("repeated run", "differing_values", int(np.count_nonzero(batched != again)))
    else:
        gates.at_least("repeated run", "cosine_min", _cosine_min(batched, again), bound)


def _compare(
    name: str,
    embedder: EmbedderLike,
    texts: Sequence[str],
    tokens: Sequence[tuple[list[int], list[int]]],
    expected: npt.NDArray[Any],
    gates: GateList,
) -> dict[str, Any]:
    differing = sum(list(ours) != list(theirs) for ours, theirs in tokens)
    gates.equal("tokenizer = original", "differing_texts", differing)
    found = embedder.embed(texts)
    if found.shape != expected.shape:
        gates.equal(name, "differing_dimensions", abs(found.shape[-1] - expected.shape[-1]) or 1)
        return {}
    values = metrics.cosine(expected, found)
    gates.declared(name, "cosine_mean", float(values.mean()))
    gates.declared(name, "cosine_min", float(values.min()))
    norms = np.linalg.norm(found.astype(np.float64), axis=-1)
    return {
        "texts": len(texts),
        "cosine": {"mean": float(values.mean()), "p1": metrics.percentile(values, 1), "min": float(values.min())},
        "norm_error_max": float(np.abs(norms - 1).max()),
    }


def _cosine_min(expected: npt.NDArray[Any], found: npt.NDArray[Any]) -> float:
    return float(metrics.cosine(expected, found).min())
