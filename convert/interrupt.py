"""What a broad `except` must hand on: the user's Ctrl-C and a full disk, however deep a library wrapped them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_TEXTS = tuple(os.strerror(number) for number in _FULL)


def raise_if_interrupted(error: BaseException) -> None:
    """Raise KeyboardInterrupt if `error` is one or was caused by one; torch wraps it during an export."""
    for link in _chain(error):
        if isinstance(link, KeyboardInterrupt):
            raise KeyboardInterrupt from error


def raise_if_disk_full(error: BaseException) -> None:
    """Raise the OSError of a full disk or quota if `error` is one or was caused by one.

    Libraries in Rust and C++ keep only its text, so that is looked at too.
    """
    for link in _chain(error):
        if isinstance(link, OSError) and link.errno in _FULL:
            raise link
        for number, text in zip(_FULL, _FULL_TEXTS, strict=True):
            if not isinstance(link, OSError) and text in str(link):
                raise OSError(number, text) from error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error` and everything it was raised from or while handling, each once."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [link.__cause__, link.__context__]
