"""Numbers that compare a bundle with the original, in pure NumPy and float64.

Every function takes the original (or expected) values first and raises ValueError for shapes that do
not match or for nothing to compare: an empty comparison has no value, least of all a perfect one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def log_softmax(logits: Array) -> Array:
    """Log-probabilities in nats, float64, over the last axis."""
    values = np.asarray(logits, dtype=np.float64)
    values = values - values.max(axis=-1, keepdims=True)
    result: Array = values - np.log(np.exp(values).sum(axis=-1, keepdims=True))
    return result


def softmax(logits: Array) -> Array:
    """Probabilities, float64, over the last axis."""
    result: Array = np.exp(log_softmax(logits))
    return result


def kl_divergence(expected: Array, found: Array) -> Array:
    """KL(expected || found) in nats per row of logits (..., V) -> (...); never below 0."""
    _check_pair(expected, found)
    log_p, log_q = log_softmax(expected), log_softmax(found)
    p = np.exp(log_p)
    # Where p underflows to 0 the term is 0 even if log_p is -inf; where it is NaN it stays NaN.
    terms = np.where(p == 0, 0.0, p * (log_p - log_q))
    result: Array = np.maximum(terms.sum(axis=-1), 0.0)
    return result


def coarse_kl(top_ids: Array, top_log_probabilities: Array, found: Array) -> Array:
    """KL in nats over K kept classes and one class for all others: a lower bound of the full KL.

    `top_ids` (S, K) int, `top_log_probabilities` (S, K) of the original, `found` logits (S, V) -> (S,).
    """
    if top_ids.shape != top_log_probabilities.shape or len(top_ids) != len(found) or not top_ids.size:
        raise ValueError(f"shapes do not match: {top_ids.shape}, {top_log_probabilities.shape}, {found.shape}")
    log_p = np.asarray(top_log_probabilities, dtype=np.float64)
    log_q = np.take_along_axis(log_softmax(found), np.asarray(top_ids, dtype=np.int64), axis=-1)
    p, q = np.exp(log_p), np.exp(log_q)
    rest_p = np.clip(1.0 - p.sum(axis=-1), 1e-12, 1.0)
    rest_q = np.clip(1.0 - q.sum(axis=-1), 1e-12, 1.0)
    kept = np.where(p == 0, 0.0, p * (log_p - log_q)).sum(axis=-1)
    result: Array = np.maximum(kept + rest_p * np.log(rest_p / rest_q), 0.0)
    return result


def top1_agreement(expected: Array, found: Array) -> float:
    """Share (0..1) of rows of logits (..., V) whose largest entry is the same."""
    _check_pair(expected, found)
    if not (np.isfinite(expected).all() and np.isfinite(found).all()):
        return float("nan")
    return float(np.mean(np.argmax(expected, axis=-1) == np.argmax(found, axis=-1)))


def negative_log_likelihood(logits: Array, ids: Array) -> Array:
    """Nats per predicted token: logits (S, V) at positions 0..S-1 and ids (S,) -> (S - 1,)."""
    if len(logits) != len(ids) or len(ids) < 2:
        raise ValueError(f"need as many logits as ids and at least 2, found {len(logits)} and {len(ids)}")
    chosen = np.take_along_axis(log_softmax(logits[:-1]), np.asarray(ids)[1:, None], axis=-1)
    result: Array = -chosen[:, 0]
    return result


def perplexity(nll: Array) -> float:
    """exp of the mean of `nll` (nats)."""
    if not np.size(nll):
        raise ValueError("no tokens to take the perplexity of")
    return float(np.exp(np.mean(nll)))


def cosine(expected: Array, found: Array) -> Array:
    """Cosine similarity per row: (N, D), (N, D) -> (N,); a zero vector gives 0."""
    _check_pair(expected, found)
    a, b = np.asarray(expected, dtype=np.float64), np.asarray(found, dtype=np.float64)
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    dots = (a * b).sum(axis=-1)
    result: Array = np.divide(dots, norms, out=np.zeros_like(dots), where=norms != 0)
    return result


def probability_error(expected: Array, found: Array) -> Array:
    """Absolute error of the softmax at the original's top class, per row of logits (N, C) -> (N,).

    A mean over all classes would be near 0 for any model with many classes; this one is not.
    """
    _check_pair(expected, found)
    top = np.argmax(expected, axis=-1)[..., None]
    difference = np.take_along_axis(softmax(expected), top, -1) - np.take_along_axis(softmax(found), top, -1)
    result: Array = np.abs(difference[..., 0])
    return result


def percentile(values: Array | Sequence[float], share: float) -> float:
    """The `share` (0..100) percentile with linear interpolation."""
    data = np.asarray(values, dtype=np.float64)
    if not data.size:
        raise ValueError("no values to take a percentile of")
    return float(np.percentile(data, share))


def _check_pair(expected: Array, found: Array) -> None:
    if np.shape(expected) != np.shape(found):
        raise ValueError(f"shapes do not match: {np.shape(expected)} and {np.shape(found)}")
    if not np.size(expected):
        raise ValueError("nothing to compare")
