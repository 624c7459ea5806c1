"""Token ids to text piece by piece: never half a character, never a part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_WINDOW = 16


class Detokenizer:
    """Turns a stream of token ids into text pieces that add up to the whole text.

    Args:
        decode: From token ids to text, for any part of the sequence.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._emitted = 0
        self._clean = 0

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; empty while a character is incomplete."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        complete = text.rstrip(_REPLACEMENT)
        piece = complete[self._emitted :]
        self._emitted = max(self._emitted, len(complete))
        if len(complete) == len(text):
            self._shorten()
        return piece

    def _shorten(self) -> None:
        """Drop ids that no longer matter, at a place where no character was incomplete; keep some as context."""
        if len(self._ids) < _WINDOW:
            return
        if 0 < self._clean < len(self._ids):
            kept = self._ids[self._clean :]
            self._emitted, self._ids = len(self._decode(kept)), kept
        self._clean = len(self._ids)


class StopStrings:
    """Holds text back while it may become a stop string, and ends it before the first one.

    Args:
        stops: Strings that are not empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that is certain not to belong to a stop string; `stopped` becomes true at the first one."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            # The first to end, as if the text had come character by character.
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What is still held back, when no more text will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
