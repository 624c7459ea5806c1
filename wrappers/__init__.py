"""Text and frames in, typed results out: what an application on the device imports."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_convert.wrappers.embed import TextEmbedder
    from edge_convert.wrappers.image import ImageClassifier
    from edge_convert.wrappers.text import TextGenerator

__all__ = ["ImageClassifier", "TextEmbedder", "TextGenerator"]

_HOME = {"TextGenerator": "text", "TextEmbedder": "embed", "ImageClassifier": "image"}


def __getattr__(name: str) -> Any:
    """Import a wrapper when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
