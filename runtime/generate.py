"""The decode loop: one IO binding, buffers bound once, and per token only what changed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from edge_convert.runtime.cache import KVCache
from edge_convert.runtime.errors import (
    BundleError,
    ContextLengthError,
    DeviceError,
    FeedError,
    InputError,
    UsageError,
    shown,
)
from edge_convert.runtime.sampling import GenerationConfig, Sampler

if TYPE_CHECKING:
    from edge_convert.runtime.session import Session

FinishReason = Literal["stop", "length", "cancelled"]
_NEEDED_INPUTS = {"input_ids", "seqlens_k", "total_sequence_length"}
_KNOWN_INPUTS = _NEEDED_INPUTS | {"position_ids", "logits_positions"}


class Decoder:
    """A decoder graph with its cache: takes token ids, gives the next token's logits. For one thread at a time.

    Args:
        session: Of a graph with a `CacheSpec` whose past and present share their buffers.
        chunk_tokens: Most tokens that one run takes during prefill; bounds the activations' memory.

    Attributes:
        vocab_size: Width of the logits; ids are below it.
        turn: Counts the calls that changed what the cache holds, so that a generation sees that another took over.
    """

    def __init__(self, session: Session, *, chunk_tokens: int = 512) -> None:
        spec = session.spec
        if spec.cache is None:
            raise BundleError("The graph has no key/value cache. Convert the model for text-generation.")
        if chunk_tokens < 1:
            raise UsageError(f"chunk_tokens={chunk_tokens} is not possible. Use 1 or more.")
        names = {tensor.name for tensor in spec.inputs} - set(spec.cache.past)
        logits = next((tensor for tensor in spec.outputs if tensor.name == "logits"), None)
        unknown = sorted(names - _KNOWN_INPUTS)
        if unknown or not names >= _NEEDED_INPUTS or logits is None:
            raise BundleError(
                f"The decoder has the inputs {', '.join(sorted(names))}, which this runtime cannot drive. "
                "Convert the model again with this version."
            )
        if not isinstance(logits.shape[-1], int) or logits.dtype not in ("float32", "float16"):
            raise BundleError("The decoder's logits are not float of a fixed vocabulary. Convert the model again.")
        _check_cache_inputs(session)
        self.session = session
        self.chunk_tokens = min(chunk_tokens, spec.cache.max_length)
        self.vocab_size = logits.shape[-1]
        self.turn = 0
        self._cache = KVCache(spec.cache, device_type=session.device_type)
        self._binding: Any = session.ort.io_binding()
        self._cache.bind(self._binding)
        self._has_positions = "logits_positions" in names
        self._ids = np.zeros((1, self.chunk_tokens), np.int64)
        self._last_position = np.zeros(1, np.int32)  # GroupQueryAttention's seqlens_k: total length - 1
        self._total_length = np.zeros((), np.int32)
        self._positions = np.arange(spec.cache.max_length, dtype=np.int64) if "position_ids" in names else None
        self._kept = np.arange(self.chunk_tokens, dtype=np.int64)
        self._logits_dtype: Any = np.dtype(logits.dtype)
        self._last = np.empty((1, self.vocab_size), self._logits_dtype)
        self._last_is_bound = False
        # On the CPU a bound input is the buffer itself; elsewhere ONNX Runtime copies when binding, so bind anew.
        self._keeps_inputs = session.device_type == "cpu"
        self._bound: dict[str, tuple[tuple[int, ...], int]] = {}

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._cache.length

    @property
    def context_length(self) -> int:
        """Tokens that the cache holds."""
        return self._cache.max_length

    @property
    def cache_bytes(self) -> int:
        """Size of the cache in bytes."""
        return self._cache.nbytes

    def reset(self) -> None:
        """Forget all tokens, and end every generation that still reads from this decoder."""
        self.turn += 1
        self._cache.reset()

    def rewind(self, length: int) -> None:
        """Forget all tokens after the first `length`, and end every generation that reads from this decoder."""
        self._cache.rewind(length)
        self.turn += 1

    def prefill(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Append token ids, int64 (S,), and return the last one's logits, float32 (vocab,)."""
        tokens = self._checked(ids)
        self.turn += 1
        for start in range(0, len(tokens), self.chunk_tokens):
            self._run(tokens[start : start + self.chunk_tokens])
        return self._last_logits().copy()

    def step(self, token_id: int) -> npt.NDArray[np.float32]:
        """Append one token id and return its logits, float32 (vocab,)."""
        logits = self.step_view(token_id).copy()
        self.turn += 1
        return logits

    def step_view(self, token_id: int) -> npt.NDArray[np.float32]:
        """`step` for the loop: does not count as a turn, and gives no copy.

        A fresh array of a vocabulary's size costs more than the rest of the loop; the next run overwrites this one.
        """
        try:
            token = operator.index(token_id)
        except TypeError as error:
            raise FeedError(f"A token id is a whole number; found {shown(token_id)}.") from error
        if isinstance(token_id, bool):
            raise FeedError(f"A token id is a whole number; found {token_id}.")
        if not 0 <= token < self.vocab_size:
            raise self._unknown(token_id)
        self._cache.reserve(1)
        self._run(token)
        return self._last_logits()

    def _last_logits(self) -> npt.NDArray[np.float32]:
        """The last token's logits: the decoder's own buffer if it is float32, overwritten by the next run."""
        logits: npt.NDArray[np.float32] = self._last[0].astype(np.float32, copy=False)
        return logits

    def logits_all(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Append token ids, int64 (S,), and return every one's logits, float32 (S, vocab)."""
        tokens = self._checked(ids)
        self.turn += 1
        logits = np.empty((len(tokens), self.vocab_size), self._logits_dtype)
        for start in range(0, len(tokens), self.chunk_tokens):
            stop = min(start + self.chunk_tokens, len(tokens))
            self._run(tokens[start:stop], logits[start:stop])
        return logits.astype(np.float32, copy=False)

    def _checked(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        tokens = _token_array(ids)
        for token in (int(tokens.min()), int(tokens.max())):
            if not 0 <= token < self.vocab_size:
                raise self._unknown(token)
        self._cache.reserve(tokens.size)
        return tokens.astype(np.int64, copy=False)

    def _unknown(self, token: int) -> FeedError:
        return FeedError(
            f"Token id {shown(token)} is outside the vocabulary of {self.vocab_size}. Use the bundle's tokenizer."
        )

    def _run(self, tokens: npt.NDArray[np.int64] | int, out: npt.NDArray[Any] | None = None) -> None:
        """Run at most `chunk_tokens` new ids; logits of all of them go to `out`, or of the last one to `_last`."""
        count = 1 if isinstance(tokens, int) else len(tokens)
        past = self._cache.length
        total = past + count
        self._ids[0, :count] = tokens
        self._last_position[0], self._total_length[()] = total - 1, total
        self._bind_input("input_ids", (1, count), self._ids)
        self._bind_input("seqlens_k", (1,), self._last_position)
        self._bind_input("total_sequence_length", (), self._total_length)
        if self._positions is not None:
            self._bind_input("position_ids", (1, count), self._positions[past:])
        rows: npt.NDArray[Any] = self._last if out is None else out
        if self._has_positions:
            first = count - 1 if out is None else 0
            self._bind_input("logits_positions", (len(rows),), self._kept[first:])
        elif len(rows) != count:
            rows = np.empty((count, self.vocab_size), self._logits_dtype)
        if rows is not self._last or not self._last_is_bound:
            shape = (1, *rows.shape)
            self._binding.bind_output("logits", "cpu", 0, self._logits_dtype.type, shape, rows.ctypes.data)
            self._last_is_bound = rows is self._last
        try:
            self.session.ort.run_with_iobinding(self._binding)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise DeviceError(f"Running {self.session.spec.file} on {total} tokens failed: {reason}") from error
        if out is None and rows is not self._last:
            self._last[0] = rows[-1]
        self._cache.advance(count)

    def _bind_input(self, name: str, shape: tuple[int, ...], buffer: npt.NDArray[Any]) -> None:
        place = (shape, int(buffer.ctypes.data))
        if self._keeps_inputs and self._bound.get(name) == place:
            return
        self._binding.bind_input(name, "cpu", 0, buffer.dtype.type, *place)
        self._bound[name] = place


def _token_array(ids: Any) -> npt.NDArray[Any]:
    """`ids` as an array of whole numbers (S,); their range is not looked at."""
    try:
        tokens = np.asarray(ids)
    except (ValueError, TypeError) as error:  # rows of several lengths
        raise FeedError("Token ids must be whole numbers (S,); found lists of several lengths.") from error
    if tokens.size == 0:
        raise InputError("There are no tokens to run. Give a text that is not empty.")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise FeedError(f"Token ids must be whole numbers (S,); found {tokens.dtype} {tokens.shape}.")
    return tokens


def _check_cache_inputs(session: Session) -> None:
    """Raise BundleError unless the cache's tensors are inputs and outputs of the graph, of the cache's sizes."""
    cache = session.spec.cache
    assert cache is not None
    inputs = {tensor.name: tensor for tensor in session.spec.inputs}
    outputs = {tensor.name: tensor for tensor in session.spec.outputs}
    wanted = (None, cache.kv_heads, None, cache.head_dim)
    for name, tensor in [*((n, inputs.get(n)) for n in cache.past), *((n, outputs.get(n)) for n in cache.present)]:
        fits = tensor is not None and tensor.dtype == cache.dtype and len(tensor.shape) == len(wanted)
        if (
            tensor is None
            or not fits
            or any(
                size is not None and isinstance(dim, int) and dim != size
                for dim, size in zip(tensor.shape, wanted, strict=True)
            )
        ):
            raise BundleError(f"The cache's tensor {shown(name)} does not fit the graph. Convert the model again.")


def generate(
    decoder: Decoder,
    prompt_ids: Sequence[int] | npt.NDArray[np.int64],
    config: GenerationConfig,
    *,
    cancel: Callable[[], bool] | None = None,
) -> Generator[int, None, FinishReason]:
    """Yield token ids that follow the prompt, one by one, from an empty cache.

    Stop tokens end the generation and are not yielded; stop strings are the text wrapper's work. The
    generator's return value (`yield from`, `StopIteration.value`) says why it ended: "stop", "length" (of
    `max_tokens` or of the context) or "cancelled". `cancel` is asked before every run of the graph.

    Raises:
        ContextLengthError: The prompt is longer than the context; nothing has run.
        UsageError: Something else ran on the same decoder before this one ended, or `config` is no config.
    """
    if not isinstance(config, GenerationConfig):
        raise UsageError(f"The settings must be a GenerationConfig; found {type(config).__name__}.")
    prompt = _token_array(prompt_ids)
    if prompt.size > decoder.context_length:
        raise ContextLengthError(prompt.size, decoder.context_length)
    decoder.reset()
    logits = None
    for start in range(0, prompt.size, decoder.chunk_tokens):
        if cancel is not None and cancel():
            return "cancelled"
        logits = decoder.prefill(prompt[start : start + decoder.chunk_tokens])
    assert logits is not None
    turn = decoder.turn
    sampler = Sampler(config, prompt)
    stops = frozenset(config.stop_token_ids)
    for made in range(1, config.max_tokens + 1):
        token = sampler(logits)
        if token in stops:
            return "stop"
        yield token
        if made == config.max_tokens or (decoder.length == decoder.context_length and decoder.turn == turn):
            return "length"
        if cancel is not None and cancel():
            return "cancelled"
        if decoder.turn != turn:
            raise UsageError("Another generation or call used this decoder in between. Finish one before the next.")
        logits = decoder.step_view(token)
    return "length"
