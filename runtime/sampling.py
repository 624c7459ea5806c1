"""How the next token is chosen: settings with the OpenAI/vLLM names, and a NumPy sampler."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_convert.runtime.errors import DeviceError, UsageError, shown

# Candidates below these fractions of the largest probability are left out first; almost always enough for top_p.
_NUCLEUS_CUTS = (1e-2, 1e-4, 0.0)


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Settings of one generation; raises UsageError when a value is out of its range.

    Attributes:
        max_tokens: Most tokens to generate, >= 1.
        temperature: In [0, 100]; 0 is greedy; otherwise logits are divided by it.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of most likely tokens whose probabilities sum to at least this, in (0, 1].
        repetition_penalty: In [0.01, 100]; positive logits of tokens in prompt or output are divided by it, negative
            ones multiplied.
        frequency_penalty: In [-2, 2]; subtracted once for each time that a token was generated.
        presence_penalty: In [-2, 2]; subtracted once if a token was generated.
        seed: Same seed, same tokens; None draws a new one.
        stop: Strings that end the text; they are not part of it.
        stop_token_ids: Token ids that end the generation, beside the model's own.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        stop: Any = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else _items("stop", stop))
        object.__setattr__(self, "stop_token_ids", _items("stop_token_ids", self.stop_token_ids))
        for name in ("max_tokens", "top_k", *(("seed",) if self.seed is not None else ())):
            object.__setattr__(self, name, _integer(name, getattr(self, name)))
        object.__setattr__(self, "stop_token_ids", tuple(_integer("stop_token_ids", i) for i in self.stop_token_ids))
        _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _check("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _check("seed", self.seed, self.seed is None or self.seed >= 0, "0 or more, or None")
        for name, low, high, wanted in (
            ("temperature", 0.0, 100.0, "0 (greedy) to 100"),
            ("top_p", 0.0, 1.0, "more than 0 and at most 1"),
            ("repetition_penalty", 0.01, 100.0, "0.01 to 100 (1 is off)"),
            ("frequency_penalty", -2.0, 2.0, "from -2 to 2"),
            ("presence_penalty", -2.0, 2.0, "from -2 to 2"),
        ):
            value = getattr(self, name)
            number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            _check(name, value, number and bool(low <= value <= high), wanted)  # false for NaN too
            object.__setattr__(self, name, float(value))
        _check("top_p", self.top_p, self.top_p > 0, "more than 0 and at most 1")
        for text in self.stop:
            _check("stop", text, isinstance(text, str) and text != "", "strings that are not empty")
        for token in self.stop_token_ids:
            _check("stop_token_ids", token, token >= 0, "ids of 0 or more")


def _check(name: str, value: object, good: bool, wanted: str) -> None:
    if not good:
        raise UsageError(f"{name}={shown(value)} is not possible. Use {wanted}.")


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise UsageError(f"{name}={shown(value)} is not possible. Use a whole number.")
    try:
        return operator.index(value)
    except TypeError as error:
        raise UsageError(f"{name}={shown(value)} is not possible. Use a whole number.") from error


def _items(name: str, value: Any) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError as error:
        raise UsageError(f"{name}={shown(value)} is not possible. Use a list or tuple.") from error


class Sampler:
    """Chooses one token after the other for one generation, and remembers them for the penalties.

    The order is vLLM's: penalties, then argmax (temperature 0) or temperature, top-k, top-p and a draw.
    """

    def __init__(self, config: GenerationConfig, prompt_ids: Sequence[int] | npt.NDArray[np.int64] = ()) -> None:
        self.config = config
        self._random = np.random.default_rng(config.seed)
        self._prompt = np.asarray(prompt_ids, np.int64)
        self._repeats = config.repetition_penalty != 1.0
        self._counts_output = config.frequency_penalty != 0.0 or config.presence_penalty != 0.0
        self._penalised = self._repeats or self._counts_output
        self._seen: npt.NDArray[np.bool_] | None = None
        self._counts: npt.NDArray[np.int32] | None = None

    def __call__(self, logits: npt.NDArray[np.float32]) -> int:
        """The next token id from the logits, float32 (vocab,), which are left as they are."""
        if self._penalised:
            logits = self._with_penalties(logits)
        best = int(logits.argmax())
        if not math.isfinite(logits[best]):
            raise DeviceError(
                f"The model's logits are not numbers (found {logits[best]}). "
                "Run edge-convert selftest on the bundle, or convert with a higher precision."
            )
        token = best if self.config.temperature == 0 else self._draw(logits, float(logits[best]))
        if self._seen is not None and self._counts is not None:
            self._seen[token] = True
            self._counts[token] += 1
        return token

    def _with_penalties(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        if self._seen is None or self._counts is None:
            self._seen, self._counts = np.zeros(logits.size, np.bool_), np.zeros(logits.size, np.int32)
            self._seen[self._prompt] = True
        logits = logits.copy()
        if self._repeats:
            seen = np.flatnonzero(self._seen)
            values, penalty = logits[seen], np.float32(self.config.repetition_penalty)
            with np.errstate(over="ignore"):
                logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        if self._counts_output:
            made = np.flatnonzero(self._counts)
            logits[made] -= self.config.frequency_penalty * self._counts[made] + self.config.presence_penalty
        return logits

    def _draw(self, logits: npt.NDArray[np.float32], highest: float) -> int:
        config = self.config
        tokens: npt.NDArray[np.intp] | None = None
        if 0 < config.top_k < logits.size:
            tokens = np.argpartition(logits, -config.top_k)[-config.top_k :]
            logits = logits[tokens]
        # In float64: with a temperature near 0 the quotient leaves float32's range, and exp(-inf) is 0 as it should be.
        with np.errstate(over="ignore"):
            weights = np.exp((logits.astype(np.float64) - highest) / config.temperature)
        if config.top_p < 1.0:
            kept = _nucleus(weights, config.top_p)
            weights, tokens = weights[kept], kept if tokens is None else tokens[kept]
        summed = weights.cumsum()
        index = int(summed.searchsorted(self._random.random() * summed[-1], side="right"))
        index = min(index, summed.size - 1)
        return index if tokens is None else int(tokens[index])


def _nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.intp]:
    """Indices of the largest weights (the largest is 1), the fewest whose share reaches `top_p`; most likely first."""
    wanted = top_p * float(weights.sum())
    candidates = np.arange(0)
    for cut in _NUCLEUS_CUTS:
        candidates = np.flatnonzero(weights >= cut)
        if float(weights[candidates].sum()) >= wanted:
            break
    chosen = weights[candidates]
    order = np.argsort(-chosen, kind="stable")
    count = int(chosen[order].cumsum().searchsorted(wanted, side="left")) + 1
    return candidates[order[:count]]
