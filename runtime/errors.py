"""Every error the project raises on purpose.

Each leaf takes facts and writes one sentence: what failed, what was found, what to do.
"""

from __future__ import annotations

from collections.abc import Iterable

_SHOWN_CHARACTERS = 100


def clip(text: str) -> str:
    """`text` on one line and short enough for a message; what came from a file may be neither."""
    short = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return "".join(character if character.isprintable() else "?" for character in short)


def shown(value: object) -> str:
    """`repr(value)`, short enough for a message."""
    try:
        return clip(repr(value[: _SHOWN_CHARACTERS + 1] if isinstance(value, (str, bytes)) else value))
    except ValueError:  # an int of more digits than Python writes
        return f"a huge {type(value).__name__}"


class EdgeError(Exception):
    """Root of all errors that are reported to the user as one line, without a traceback."""

    exit_code = 1


class UsageError(EdgeError, ValueError):
    """What the user asked for does not exist or does not fit together (exit code 2)."""

    exit_code = 2


class UnknownNameError(UsageError):
    """A name (target, task, precision, ...) that no table has."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"Unknown {kind} {shown(name)}. Choose one of: {', '.join(map(clip, sorted(known)))}.")


class DeviceError(EdgeError):
    """A device profile is invalid, or the device cannot do what it says."""


# Sends requests to a service elsewhere, runs nothing here, and is compiled into every build.
NOT_FOR_DEVICES = ("AzureExecutionProvider",)


class ProviderUnavailableError(DeviceError):
    """The execution provider that was asked for is not the one running."""

    def __init__(self, provider: str, device: str, found: Iterable[str], hint: str = "") -> None:
        self.provider = provider
        listed = ", ".join(name for name in found if name not in NOT_FOR_DEVICES) or "none"
        advice = hint or ("Install the onnxruntime build that has it, or use a target whose profile allows fallback.")
        super().__init__(f"{provider} is not available here for target {device}; found: {listed}. {advice}")


class BundleError(EdgeError, ValueError):
    """A bundle cannot be opened or written."""


class ManifestError(BundleError):
    """manifest.json is not what its schema says."""


class ChecksumError(BundleError):
    """A file's size or SHA-256 differs from the manifest."""


class FeedError(EdgeError, ValueError):
    """An input's name, dtype or shape does not fit the graph."""


class ContextLengthError(FeedError):
    """More tokens than the cache holds."""

    def __init__(self, needed: int, context: int) -> None:
        super().__init__(
            f"The prompt needs {needed} tokens, and the context holds {context}. "
            "Shorten the prompt or convert with a larger --context."
        )


class InputError(EdgeError, ValueError):
    """A user's text, image or file cannot be used."""


class ConversionError(EdgeError):
    """The source cannot be turned into a bundle."""


class SourceError(ConversionError):
    """The source is missing, empty, truncated or of no known kind."""


class UnsupportedModelError(ConversionError):
    """The architecture or task has no recipe."""


class ExportError(ConversionError):
    """An exporter or a graph pass failed."""


class OutputError(EdgeError):
    """The output folder cannot be written."""


class MissingExtraError(EdgeError, ImportError):
    """A command needs packages that are not installed."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(
            f"The package {module!r} is needed and not installed. Install edge-convert with its extra [{extra}]: "
            f"pip install '.[{extra}]' in its repository, or the wheel's path with [{extra}] behind it."
        )
