"""Prompts and chats in, text out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_convert.runtime.bundle import Bundle
from edge_convert.runtime.errors import BundleError, InputError, ManifestError, UsageError
from edge_convert.runtime.generate import Decoder, FinishReason, generate
from edge_convert.runtime.sampling import GenerationConfig
from edge_convert.runtime.strict import check_range, parse
from edge_convert.wrappers.chat import ChatTemplate, Message
from edge_convert.wrappers.detokenize import Detokenizer, StopStrings
from edge_convert.wrappers.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from edge_convert.runtime.device import DeviceProfile

Cancel = Callable[[], bool]
_MAX_TOKEN = 1 << 31


@dataclass(frozen=True, slots=True)
class TextSettings:
    """`Manifest.processing` of a text-generation bundle; ids are token ids, lengths are in tokens."""

    tokenizer: str
    eos_token_ids: tuple[int, ...]
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    bos_token_id: int | None = None
    context_length: int | None = None
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        for token in self.eos_token_ids:
            check_range("An id of processing.eos_token_ids", token, 0, _MAX_TOKEN)
        if self.bos_token_id is not None:
            check_range("processing.bos_token_id", self.bos_token_id, 0, _MAX_TOKEN)
        if self.context_length is not None:
            check_range("processing.context_length", self.context_length, 1, _MAX_TOKEN)

    @classmethod
    def from_processing(cls, processing: dict[str, Any]) -> TextSettings:
        """Parse strictly; raises ManifestError that names the key."""
        settings: TextSettings = parse(cls, processing, "processing")
        return settings

    def check_decoder(self, vocab_size: int, context_length: int) -> None:
        """Raise ManifestError for an id or a length that the decoder does not have."""
        for token in (*self.eos_token_ids, *([] if self.bos_token_id is None else [self.bos_token_id])):
            if token >= vocab_size:
                raise ManifestError(
                    f"processing in manifest.json has the token id {token}, and the vocabulary has {vocab_size}. "
                    "Convert the model again."
                )
        if self.context_length is not None and self.context_length > context_length:
            raise ManifestError(
                f"processing.context_length in manifest.json is {self.context_length}, and the cache holds "
                f"{context_length} tokens. Convert the model again."
            )


@dataclass(frozen=True, slots=True)
class TextResult:
    """One generated text and how it came about.

    Attributes:
        text: Without the prompt, special tokens and stop string; never ends in half a character.
        token_ids: All generated ids without the stop token.
        finish_reason: "stop", "length" or "cancelled".
        prompt_tokens: Length of the prompt in tokens.
        ttft_ms: From the call to the first token, in milliseconds.
        tokens_per_s: Speed after the first token; 0 when there are fewer than two.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    ttft_ms: float
    tokens_per_s: float


class TextGenerator:
    """A text-generation bundle, ready to run. One generation at a time, from one thread.

    Args:
        decoder: The bundle's decoder.
        tokenizer: A `tokenizers.Tokenizer`.
        processing: The manifest's `processing` of a text-generation bundle.
        template: The chat template, if the model has one.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Any, *, processing: dict[str, Any], template: ChatTemplate | None = None
    ) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        self._template = template
        self.settings = TextSettings.from_processing(processing)
        tokenizer.no_truncation()
        tokenizer.no_padding()

    @classmethod
    def load(
        cls, bundle: str | Path | Bundle, *, profile: DeviceProfile | None = None, threads: int | None = None
    ) -> TextGenerator:
        """Open a bundle (checking every file) and start its session.

        Args:
            bundle: A bundle or its folder.
            profile: Where to run; the bundle's own target by default.
            threads: Of the session; by default what this process may use.
        """
        if not isinstance(bundle, Bundle):
            bundle = Bundle.open(bundle)
        manifest = bundle.manifest
        if manifest.task != "text-generation":
            raise BundleError(f"The bundle is for {manifest.task}, not text-generation. Use the wrapper for its task.")
        settings = TextSettings.from_processing(manifest.processing)
        tokenizer = load_tokenizer(bundle, settings.tokenizer)
        template = None
        if settings.chat_template is not None:
            special = {name: getattr(settings, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
            template = ChatTemplate(bundle.read_text(settings.chat_template), special)
        decoder = Decoder(bundle.session("decoder", profile=profile, threads=threads))
        settings.check_decoder(decoder.vocab_size, decoder.context_length)
        return cls(decoder, tokenizer, processing=manifest.processing, template=template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""
        if not isinstance(text, str):
            raise InputError(f"A prompt must be a string; found {type(text).__name__}.")
        special = add_special_tokens and self.settings.add_special_tokens
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError("The prompt is not valid Unicode (a lone surrogate). Decode it as UTF-8 first.")
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt text that the model's chat template makes of `messages`."""
        if self._template is None:
            raise InputError("This model has no chat template. Use generate() with a plain prompt.")
        return self._template.render(messages, add_generation_prompt)

    def generate(
        self, prompt: str, config: GenerationConfig | None = None, *, cancel: Cancel | None = None
    ) -> TextResult:
        """Continue `prompt`; greedy and at most 256 tokens by default."""
        return self._collect(lambda: self.encode(prompt), config, cancel)

    def stream(
        self, prompt: str, config: GenerationConfig | None = None, *, cancel: Cancel | None = None
    ) -> Iterator[str]:
        """Like `generate`, piece by piece as the text becomes certain. Closing the iterator ends the generation."""
        return (piece for _, piece in self._pieces(self.encode(prompt), _checked(config), cancel) if piece)

    def chat(
        self, messages: Sequence[Message], config: GenerationConfig | None = None, *, cancel: Cancel | None = None
    ) -> TextResult:
        """The assistant's answer to `messages`, each with `role` and `content`."""
        return self._collect(lambda: self.encode(self.render(messages), False), config, cancel)

    def stream_chat(
        self, messages: Sequence[Message], config: GenerationConfig | None = None, *, cancel: Cancel | None = None
    ) -> Iterator[str]:
        """Like `chat`, piece by piece as the text becomes certain."""
        ids = self.encode(self.render(messages), False)
        return (piece for _, piece in self._pieces(ids, _checked(config), cancel) if piece)

    def _collect(
        self, encode: Callable[[], list[int]], config: GenerationConfig | None, cancel: Cancel | None
    ) -> TextResult:
        config = _checked(config)
        started = time.perf_counter()
        ids = encode()
        pieces: list[str] = []
        tokens: list[int] = []
        first = last = started
        events = self._pieces(ids, config, cancel)
        while True:
            try:
                token, piece = next(events)
            except StopIteration as end:
                reason: FinishReason = end.value
                break
            pieces.append(piece)
            if token is not None:
                last = time.perf_counter()
                first = last if not tokens else first
                tokens.append(token)
        speed = (len(tokens) - 1) / (last - first) if len(tokens) > 1 else 0.0
        return TextResult("".join(pieces), tuple(tokens), reason, len(ids), (first - started) * 1000, speed)

    def _pieces(
        self, ids: list[int], config: GenerationConfig, cancel: Cancel | None
    ) -> Generator[tuple[int | None, str], None, FinishReason]:
        """Each generated id with the text that became certain; at the end None with what was held back."""
        if not ids and self.settings.bos_token_id is not None:
            ids = [self.settings.bos_token_id]
        if not ids:
            raise InputError("The prompt is empty. Give a text with at least one token.")
        stop_ids = (*config.stop_token_ids, *self.settings.eos_token_ids)
        tokens = generate(self.decoder, ids, dataclasses.replace(config, stop_token_ids=stop_ids), cancel=cancel)
        text, stops = Detokenizer(self.decode), StopStrings(config.stop)
        while True:
            try:
                token = next(tokens)
            except StopIteration as end:
                reason: FinishReason = end.value
                break
            yield token, stops.push(text.push(token))
            if stops.stopped:
                tokens.close()
                return "stop"
        if held := stops.flush():
            yield None, held
        return reason


def _checked(config: Any) -> GenerationConfig:
    """`config` itself, or the defaults for None; UsageError for anything else."""
    if config is None:
        return GenerationConfig()
    if not isinstance(config, GenerationConfig):
        raise UsageError(f"The settings must be a GenerationConfig; found {type(config).__name__}.")
    return config
