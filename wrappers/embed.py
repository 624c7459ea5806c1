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
from edge_convert.runtime.errors import InputError, ManifestError, UsageError
from edge_convert.runtime.session import Session

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TASK = "feature-extraction"


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

    @classmethod
    def from_processing(cls, processing: dict[str, Any]) -> EmbedSettings:
        """Parse; raises ManifestError naming the missing key."""
        try:
            return cls(
                tokenizer=str(processing["tokenizer"]),
                max_length=int(processing["max_length"]),
                pad_token_id=int(processing["pad_token_id"]),
                pad_token_type_id=int(processing.get("pad_token_type_id", 0)),
                dimension=int(processing["dimension"]),
                inputs=tuple(processing["inputs"]),
                output=str(processing["output"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ManifestError(
                f"The manifest's processing settings do not describe an embedder ({type(error).__name__}: {error}). "
                "Convert the model again."
            ) from error


class TextEmbedder:
    """One embedding bundle, ready to run.

    >>> embedder = TextEmbedder.load("minilm-cpu-int8")  # doctest: +SKIP
    >>> vectors = embedder.embed(["turn left", "go left"])  # doctest: +SKIP
    >>> float(vectors[0] @ vectors[1])  # doctest: +SKIP
    0.87
    """

    def __init__(self, session: Session, tokenizer: Tokenizer, settings: EmbedSettings) -> None:
        tokenizer.no_padding()
        tokenizer.enable_truncation(settings.max_length)
        self.session = session
        self.settings = settings
        self._tokenizer = tokenizer

    @classmethod
    def load(
        cls, bundle: Bundle | Path | str, *, profile: DeviceProfile | None = None, threads: int | None = None
    ) -> TextEmbedder:
        """Open a feature-extraction bundle; `profile` overrides where it runs."""
        from tokenizers import Tokenizer

        if not isinstance(bundle, Bundle):
            bundle = Bundle.open(Path(bundle))
        if bundle.manifest.task != TASK:
            raise UsageError(
                f"The bundle's task is {bundle.manifest.task}, and TextEmbedder runs {TASK}. Use its own wrapper."
            )
        settings = EmbedSettings.from_processing(bundle.manifest.processing)
        tokenizer = Tokenizer.from_file(str(bundle.file(settings.tokenizer)))
        return cls(bundle.session("encoder", profile=profile, threads=threads), tokenizer, settings)

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
        if batch_size < 1:
            raise UsageError(f"batch_size must be at least 1; found {batch_size}.")
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
