"""edge-convert: one command from a checkpoint to a proven bundle, and a small runtime that runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Bundle", "GenerationConfig", "ImageClassifier", "Session", "TextEmbedder", "TextGenerator", "__version__"]

if TYPE_CHECKING:
    from edge_convert.runtime import Bundle, GenerationConfig, Session
    from edge_convert.wrappers import ImageClassifier, TextEmbedder, TextGenerator

_HOME = {
    "Bundle": "edge_convert.runtime",
    "GenerationConfig": "edge_convert.runtime",
    "Session": "edge_convert.runtime",
    "ImageClassifier": "edge_convert.wrappers",
    "TextEmbedder": "edge_convert.wrappers",
    "TextGenerator": "edge_convert.wrappers",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import edge_convert` costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'edge_convert' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
