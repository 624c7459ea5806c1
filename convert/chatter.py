"""Keep the terminal readable: library chatter goes into a log file, our own progress to the user.

Exporters print from Python, from C++ and through `logging` and `warnings`; only redirecting the file
descriptors catches all four. Uses the standard library, and rich for the progress line.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@dataclass(frozen=True, slots=True)
class Capture:
    """Where the chatter goes (`log`) and where the user still reads (`terminal`, the real stderr)."""

    log: Path
    terminal: IO[str]

    def has_text(self) -> bool:
        """Whether anything was written to the log so far."""
        return self.log.is_file() and self.log.stat().st_size > 0


def new_log() -> Path:
    """A new empty log file in the temporary folder; the caller removes or keeps it."""
    handle, name = tempfile.mkstemp(prefix="edge-convert-", suffix=".log")
    os.close(handle)
    return Path(name)


@contextlib.contextmanager
def captured(log: Path) -> Iterator[Capture]:
    """Append everything that is written to fd 1, fd 2, `logging` and `warnings` inside the block to `log`.

    The previous state is restored on every exit. `Capture.terminal` is a duplicate of the real stderr, or
    `sys.stderr` itself where that is not file descriptor 2 (a test runner, a notebook).
    """
    _flush()
    sink = log.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
    saved_stdout, saved_stderr = sys.stdout, sys.stderr
    saved = {number: _duplicate(number) for number in (1, 2)}
    own = _fileno(saved_stderr) == 2 and saved[2] is not None
    terminal: IO[str] = open(os.dup(2), "w", encoding="utf-8", errors="replace") if own else saved_stderr  # noqa: SIM115
    handler = logging.StreamHandler(sink)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    try:
        with warnings.catch_warnings():
            root.addHandler(handler)
            warnings.showwarning = _warning_writer(sink)
            for number in (1, 2):
                os.dup2(sink.fileno(), number)
            sys.stdout = sys.stderr = sink
            yield Capture(log=log, terminal=terminal)
    finally:
        sys.stdout, sys.stderr = saved_stdout, saved_stderr
        root.removeHandler(handler)
        sink.flush()
        _flush()
        for number, copy in saved.items():
            if copy is None:
                os.close(number)
            else:
                os.dup2(copy, number)
                os.close(copy)
        if own:
            terminal.close()
        _detach_handlers(sink, saved_stderr)
        sink.close()


class Stages:
    """Progress of a command on stderr: a spinner with elapsed time on a terminal, plain lines elsewhere.

    Call it with the text of each stage as the stage begins.
    """

    def __init__(self, stream: IO[str], *, quiet: bool = False) -> None:
        self._stream = stream
        self._quiet = quiet
        self._started = self._stage_started = time.perf_counter()
        self._text: str | None = None
        self._live: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Stages:
        if not self._quiet and self._stream.isatty():
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            console = Console(file=self._stream, highlight=False)
            self._live = Progress(
                *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        return self

    def __call__(self, text: str) -> None:
        """Begin the stage `text`."""
        if self._quiet:
            return
        self._finish_stage()
        self._text, self._stage_started = text, time.perf_counter()
        if self._live is None:
            self._stream.write(f"[{self._stage_started - self._started:7.1f} s] {text}\n")
            self._stream.flush()
        else:
            self._task = self._live.add_task(text, total=None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if kind is None:
            self._finish_stage()
        if self._live is not None:
            self._live.stop()

    def _finish_stage(self) -> None:
        if self._live is None or self._task is None:
            return
        self._live.console.print(f"{time.perf_counter() - self._stage_started:7.1f} s  {self._text}", markup=False)
        self._live.remove_task(self._task)
        self._task = None


def _warning_writer(sink: IO[str]) -> Callable[..., None]:
    """A `warnings.showwarning` that writes to `sink`, even where a test runner has put its own."""

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_rest: object) -> None:
        sink.write(warnings.formatwarning(message, category, filename, lineno))

    return show


def _detach_handlers(sink: IO[str], replacement: IO[str]) -> None:
    """Handlers that libraries made inside the block hold the sink, which is about to close; repoint them."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is sink:
                handler.setStream(replacement)


def _duplicate(number: int) -> int | None:
    try:
        return os.dup(number)
    except OSError:
        return None


def _fileno(stream: IO[str]) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _flush() -> None:
    """Empty Python's and the C library's buffers into the descriptors they now point at."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
