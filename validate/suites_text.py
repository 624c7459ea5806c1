"""What is asked of a decoder: accuracy against the original, and invariants that hold for any decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edge_convert.validate import metrics
from edge_convert.validate.gates import GateList
from edge_convert.validate.golden import Golden, unpack_json
from edge_convert.validate.runner import DecoderReference, Messages
from edge_convert.validate.texts import CHATS, load_texts, long_texts

MAX_TOKENS = 128
TEXTS = 12
GREEDY_TOKENS = 24
STEPS = 24
# The same tokens through another kernel (one row or many, whole or in chunks). fp32 differs by summation
# order only; fp16 by its 11 bits; quantised graphs may also quantise the activations of one run together.
SAME_RESULT_KL = {"auto": 0.05, "fp32": 1e-6, "fp16": 1e-3, "int8": 0.03, "int4": 0.2}
_SAME_REASON = "bound by precision: one row and many rows may run in different kernels"

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class DecoderLike(Protocol):
    """The part of `runtime.generate.Decoder` that validation drives."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        ...

    def prefill(self, ids: Any, /) -> Floats:
        """Logits (V,) after `ids` (S,)."""
        ...

    def step(self, token_id: int, /) -> Floats:
        """Logits (V,) after one more token."""
        ...

    def logits_all(self, ids: Any, /) -> Floats:
        """Logits (S, V) of every new position."""
        ...

    def reset(self) -> None:
        """Empty the cache."""
        ...

    def rewind(self, length: int, /) -> None:
        """Keep the first `length` tokens."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderSubject:
    """A decoder bundle that is open, as functions.

    `chunked` makes a decoder over the same session that prefills 7 tokens at a time; `exact` says that
    two equal runs must give equal bits (true on the CPU).
    """

    decoder: DecoderLike
    chunked: Callable[[], DecoderLike]
    encode: Callable[[str], list[int]]
    render: Callable[[Messages], str | None]
    context_length: int
    precision: str
    exact: bool = True


def check_decoder(
    subject: DecoderSubject, reference: DecoderReference, gates: GateList, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Add accuracy and equality gates against `reference`; returns the measurements."""
    progress("comparing tokenizer and chat template with the original")
    texts = load_texts()
    tokens = [(subject.encode(text), reference.tokenize(text)) for text in texts]
    chats = [(render_or_none(subject.render, chat), reference.render(chat)) for chat in CHATS]
    _equalities(gates, tokens, chats)

    progress("comparing logits with the original")
    rendered = [text for _, text in chats if text]
    prompts = [*long_texts(TEXTS), *rendered] if rendered else long_texts(TEXTS + len(CHATS))
    limit = min(MAX_TOKENS, subject.context_length)
    kl, agreed, expected_nll, found_nll = [], [], [], []
    for prompt in prompts:
        ids = np.asarray(reference.tokenize(prompt)[:limit], dtype=np.int64)
        if len(ids) < 2:
            continue
        expected = np.asarray(reference.logits(ids))
        found = _fresh(subject.decoder, ids)
        kl.append(metrics.kl_divergence(expected, found))
        agreed.append((metrics.top1_agreement(expected, found), len(ids)))
        expected_nll.append(metrics.negative_log_likelihood(expected, ids))
        found_nll.append(metrics.negative_log_likelihood(found, ids))
    if not kl:
        gates.not_run("logits", "kl_mean", "no text gave two tokens or more")
        return {}
    divergence = np.concatenate(kl)
    ratio = metrics.perplexity(np.concatenate(found_nll)) / metrics.perplexity(np.concatenate(expected_nll))
    agreement = sum(share * count for share, count in agreed) / sum(count for _, count in agreed)
    gates.declared("logits", "kl_mean", float(divergence.mean()))
    gates.declared("logits", "top1_agreement", agreement)
    gates.declared("logits", "perplexity_ratio", ratio)
    ids = np.asarray(reference.tokenize(prompts[-1])[: max(1, limit - GREEDY_TOKENS)], dtype=np.int64)
    return {
        "prompts": len(kl),
        "tokens": int(divergence.size),
        "kl_nats": {
            "mean": float(divergence.mean()),
            "p99": metrics.percentile(divergence, 99),
            "max": float(divergence.max()),
        },
        "perplexity": metrics.perplexity(np.concatenate(found_nll)),
        "perplexity_original": metrics.perplexity(np.concatenate(expected_nll)),
        "greedy_tokens": min(GREEDY_TOKENS, subject.context_length - len(ids)),
        "greedy_first_difference": first_difference(subject, reference, ids),
    }


def first_difference(subject: DecoderSubject, reference: DecoderReference, ids: Ids) -> int | None:
    """Index of the first greedy token that the original would not have chosen; None if all agree."""
    decoder = subject.decoder
    decoder.reset()
    made = [int(np.argmax(decoder.prefill(ids)))]
    for _ in range(min(GREEDY_TOKENS, subject.context_length - len(ids)) - 1):
        made.append(int(np.argmax(decoder.step(made[-1]))))
    # Up to the first difference both saw the same tokens, so one run of the original answers for all.
    wanted = np.argmax(reference.logits(np.asarray([*ids, *made[:-1]], dtype=np.int64)), axis=-1)[len(ids) - 1 :]
    different = np.flatnonzero(wanted != np.asarray(made))
    return int(different[0]) if different.size else None


def check_decoder_golden(subject: DecoderSubject, golden: Golden, gates: GateList) -> dict[str, Any]:
    """Add accuracy and equality gates against the bundle's golden data; returns the measurements."""
    texts, chats = unpack_json(golden["texts"]), unpack_json(golden["chats"])
    tokens = list(zip(map(subject.encode, texts), unpack_json(golden["tokens"]), strict=True))
    rendered = [render_or_none(subject.render, chat) for chat in chats]
    _equalities(gates, tokens, list(zip(rendered, unpack_json(golden["rendered"]), strict=True)))
    kl, agreed, start = [], [], 0
    for length in golden["lengths"].tolist():
        kept = min(length, subject.context_length)
        found = _fresh(subject.decoder, golden["ids"][start : start + kept])
        top = golden["top_ids"][start : start + kept]
        kl.append(metrics.coarse_kl(top, golden["top_log_probabilities"][start : start + kept], found))
        agreed.append(np.argmax(found, axis=-1) == top[:, 0])
        start += length
    divergence = np.concatenate(kl)
    reason = "lower bound from the most probable tokens in the golden data"
    gates.declared("golden logits", "kl_mean", float(divergence.mean()), reason)
    gates.declared_share("golden logits", "top1_agreement", float(np.concatenate(agreed).mean()), divergence.size)
    return {
        "tokens": int(divergence.size),
        "kl_nats": {"mean": float(divergence.mean()), "max": float(divergence.max())},
    }


def check_decoder_invariants(subject: DecoderSubject, gates: GateList, progress: Callable[[str], None]) -> None:
    """Add the gates that need no original: cached, chunked, rewound and repeated runs give the same."""
    progress("checking cached decoding")
    decoder, bound = subject.decoder, SAME_RESULT_KL[subject.precision]
    ids = np.asarray(subject.encode(long_texts(1)[0])[: min(40, subject.context_length)], dtype=np.int64)
    if len(ids) < 4:
        gates.not_run("cached = uncached", "kl_max", f"the context holds only {len(ids)} tokens")
        return
    whole = _fresh(decoder, ids)
    decoder.reset()
    split = max(1, len(ids) - STEPS)
    stepped = [decoder.prefill(ids[:split])] + [decoder.step(int(token)) for token in ids[split:]]
    difference = _kl_max(whole[split - 1 :], np.stack(stepped))
    gates.at_most("cached = uncached", "kl_max", difference, bound, _SAME_REASON)

    chunked = _fresh(subject.chunked(), ids)
    gates.at_most("chunked prefill = whole", "kl_max", _kl_max(whole, chunked), bound, _SAME_REASON)

    # Walk on with other tokens, go back, and walk the right way: stale cache entries must not matter.
    decoder.reset()
    decoder.prefill(ids[:split])
    for token in ids[::-1][: min(3, len(ids) - split)]:
        decoder.step(int(token))
    decoder.rewind(split)
    again = np.stack([decoder.step(int(token)) for token in ids[split:]])
    gates.at_most("rewind = fresh", "kl_max", _kl_max(np.stack(stepped[1:]), again), min(bound, 1e-6))

    repeated = _fresh(decoder, ids)
    if subject.exact:
        gates.equal("repeated run", "differing_logits", int(np.count_nonzero(whole != repeated)))
    else:
        gates.at_most("repeated run", "kl_max", _kl_max(whole, repeated), bound, "this provider may reorder sums")


def render_or_none(render: Callable[[Messages], str | None], chat: Messages) -> str | None:
    """The rendered chat, or None where the bundle has no chat template."""
    from edge_convert.runtime.errors import EdgeError

    try:
        return render(chat)
    except EdgeError:
        return None


def _equalities(
    gates: GateList,
    tokens: Sequence[tuple[list[int], list[int]]],
    chats: Sequence[tuple[str | None, str | None]],
) -> None:
    differing = sum(list(found) != list(expected) for found, expected in tokens)
    gates.equal("tokenizer = original", "differing_texts", differing)
    neither = all(found is None and expected is None for found, expected in chats)
    differing = sum(found != expected for found, expected in chats)
    gates.equal("chat template = original", "differing_chats", differing, "neither has one" if neither else "")


def _fresh(decoder: DecoderLike, ids: Ids) -> Floats:
    decoder.reset()
    return decoder.logits_all(ids)


def _kl_max(expected: Floats, found: Floats) -> float:
    return float(metrics.kl_divergence(expected, found).max())
