"""What validation needs from the original model: one protocol per task.

The original runs in fp32, whatever precision the bundle has. Arrays are NumPy on both sides, so this
module needs none of the host's libraries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL.Image import Image

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
IntArray: TypeAlias = npt.NDArray[np.int64]
FrameArray: TypeAlias = npt.NDArray[np.uint8]
Messages: TypeAlias = Sequence[Mapping[str, Any]]


@runtime_checkable
class DecoderReference(Protocol):
    """The original causal language model."""

    name: str

    def logits(self, ids: IntArray, /) -> FloatArray:
        """Logits float32 (S, V) of every position of `ids` int64 (S,), without a cache."""
        ...

    def tokenize(self, text: str, /) -> list[int]:
        """Token ids of `text` with the special tokens that the original adds."""
        ...

    def render(self, messages: Messages, /) -> str | None:
        """The chat template over `messages` with the generation prompt; None without a template."""
        ...


@runtime_checkable
class EmbedderReference(Protocol):
    """The original text encoder with its pooling and normalisation."""

    name: str
    pad_token_id: int

    def embed(self, texts: Sequence[str], /) -> FloatArray:
        """Unit vectors float32 (N, D), in the order of `texts`."""
        ...

    def tokenize(self, text: str, /) -> list[int]:
        """Token ids of `text`, truncated as the original truncates."""
        ...


@runtime_checkable
class ClassifierReference(Protocol):
    """The original image classifier."""

    name: str

    def logits(self, frames: FrameArray, /) -> FloatArray:
        """Logits float32 (N, C) of `frames` uint8 (N, H, W, 3), RGB."""
        ...

    def preprocess(self, image: Image, /) -> FrameArray:
        """The original's resize and crop of a PIL image: uint8 (H, W, 3), RGB."""
        ...


Reference: TypeAlias = DecoderReference | EmbedderReference | ClassifierReference
