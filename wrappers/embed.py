"""Texts in, sentence embeddings out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_convert.runtime.bundle import Bundle
from edge_convert.runtime.device import DeviceProfile
from edge_convert.runtime.errors import InputError, ManifestError, UsageError, shown
from edge_convert.runtime.manifest import GraphSpec, TensorSpec
from edge_convert.runtime.session import Session
from edge_convert.runtime.strict import check_range, parse
from edge_convert.wrappers.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TASK = "feature-extraction"
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_MAX_LENGTH = 1 << 20
_MAX_TOKEN = 1 << 31


@dataclass(frozen=True, slots=True)
class EmbedSettings:
    """`Manifest.processing` of a feature-extraction bundle; `max_length` counts the special tokens too."""

    tokenizer: str
    max_length: int
    pad_token_id: int
    pad_token_type_id: int
    dimension: int
    inputs: tuple[str, ...]
    output: str

    def __post_init__(self) -> None:
        check_range("processing.max_length", self.max_length, 1, _MAX_LENGTH)
        check_range("processing.pad_token_id", self.pad_token_id, 0, _MAX_TOKEN)
        check_range("processing.pad_token_type_id", self.pad_token_type_id, 0, _MAX_TOKEN)
        check_range("processing.dimension", self.dimension, 1, _MAX_LENGTH)
        if not set(self.inputs) <= set(_INPUTS) or "input_ids" not in self.inputs:
            raise ManifestError(
                f"processing.inputs in manifest.json is {shown(list(self.inputs))}; known: {', '.join(_INPUTS)}. "
                "Convert the model again."
            )

    @classmethod
    def from_processing(cls, processing: dict[str, Any]) -> EmbedSettings:
        """Parse strictly; raises ManifestError that names the key."""
        settings: EmbedSettings = parse(cls, processing, "processing")
        return settings

    def check_graph(self, spec: GraphSpec) -> None:
        """Raise ManifestError unless the graph has these inputs and this output."""
        inputs = {tensor.name for tensor in spec.inputs}
        output = next((tensor for tensor in spec.outputs if tensor.name == self.output), None)
        if inputs != set(self.inputs) or output is None or output.shape[-1:] not in ((self.dimension,), _named(output)):
            raise ManifestError(
                f"processing in manifest.json has the inputs {', '.join(self.inputs)} and the output "
                f"{shown(self.output)} of {self.dimension} numbers, and the graph has others. Convert the model again."
            )


def _named(tensor: TensorSpec) -> tuple[int | str, ...] | None:
    """The last dimension of `tensor`, if it is one of any size."""
    return tensor.shape[-1:] if tensor.shape and isinstance(tensor.shape[-1], str) else None


class TextEmbedder:
    """One embedding bundle, ready to run.

    >>> embedder = TextEmbedder.load("minilm-cpu-int8")  # doctest: +SKIP
    >>> vectors = embedder.embed(["turn left", "go left"])  # doctest: +SKIP
    >>> float(vectors[0] @ vectors[1])  # doctest: +SKIP
    0.87
    """

    def __init__(self, session: Session, tokenizer: Tokenizer, settings: EmbedSettings) -> None:
        tokenizer.no_padding()
        special = tokenizer.num_special_tokens_to_add(False)
        if settings.max_length < special:  # the tokenizer would then not cut at all
            raise ManifestError(
                f"processing.max_length in manifest.json is {settings.max_length}, and the tokenizer adds {special} "
                "special tokens. Convert the model again."
            )
        tokenizer.enable_truncation(settings.max_length)
        self.session = session
        self.settings = settings
        self._tokenizer = tokenizer

    @classmethod
    def load(
        cls, bundle: Bundle | Path | str, *, profile: DeviceProfile | None = None, threads: int | None = None
    ) -> TextEmbedder:
        """Open a feature-extraction bundle; `profile` overrides where it runs."""
        if not isinstance(bundle, Bundle):
            bundle = Bundle.open(bundle)
        if bundle.manifest.task != TASK:
            raise UsageError(
                f"The bundle's task is {bundle.manifest.task}, and TextEmbedder runs {TASK}. Use its own wrapper."
            )
        settings = EmbedSettings.from_processing(bundle.manifest.processing)
        tokenizer = load_tokenizer(bundle, settings.tokenizer)
        session = bundle.session("encoder", profile=profile, threads=threads)
        settings.check_graph(session.spec)
        return cls(session, tokenizer, settings)

    @property
    def dimension(self) -> int:
        """Length of one embedding."""
        return self.settings.dimension

    def encode_ids(self, text: str) -> list[int]:
        """Token ids with special tokens, cut to `max_length`."""
        return list(self._encode([text])[0][0])

    def embed(self, texts: str | Sequence[str], *, batch_size: int = 16) -> NDArray[np.float32]:
        """Embeddings, float32 (N, D), in the order of `texts`; one text gives (1, D).

        Texts of similar length share a batch, so that little is spent on padding; a text longer than
        the model's `max_length` is cut.
        """
        if not isinstance(batch_size, int) or batch_size < 1:
            raise UsageError(f"batch_size must be a whole number of at least 1; found {shown(batch_size)}.")
        items = [texts] if isinstance(texts, str) else list(texts)
        encoded = self._encode(items)
        vectors = np.empty((len(items), self.settings.dimension), np.float32)
        order = sorted(range(len(items)), key=lambda index: len(encoded[index][0]))
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            outputs = self.session.run(self._feed([encoded[row] for row in rows]))
            vectors[rows] = outputs[self.settings.output]
        return vectors

    def _encode(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """(ids, token type ids) of each text; a text that gives no token at all becomes one pad token."""
        for text in texts:
            if not isinstance(text, str):
                raise InputError(f"A text to embed must be a str; found {type(text).__name__}. Decode it first.")
        settings = self.settings
        # A lone surrogate (from os.fsdecode, broken JSON) has no UTF-8 form; it becomes "?".
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        found = [(encoding.ids, encoding.type_ids) for encoding in self._tokenizer.encode_batch(clean)]
        return [pair if pair[0] else ([settings.pad_token_id], [settings.pad_token_type_id]) for pair in found]

    def _feed(self, rows: Sequence[tuple[list[int], list[int]]]) -> dict[str, NDArray[np.int64]]:
        """The graph's inputs, int64 (batch, sequence), padded on the right to the longest row."""
        settings = self.settings
        shape = (len(rows), max(len(ids) for ids, _ in rows))
        feed = {
            "input_ids": np.full(shape, settings.pad_token_id, np.int64),
            "attention_mask": np.zeros(shape, np.int64),
            "token_type_ids": np.full(shape, settings.pad_token_type_id, np.int64),
        }
        for row, (ids, types) in enumerate(rows):
            feed["input_ids"][row, : len(ids)] = ids
            feed["attention_mask"][row, : len(ids)] = 1
            feed["token_type_ids"][row, : len(ids)] = types
        return {name: feed[name] for name in settings.inputs}
