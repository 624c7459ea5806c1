"""Library chatter goes to the log from Python, C, logging and warnings; the terminal stays usable."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from edge_convert.convert.chatter import Stages, captured


def test_chatter_of_every_kind_lands_in_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    with captured(log) as capture:
        print("from python")
        os.write(1, b"from fd one\n")
        os.write(2, b"from fd two\n")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        warnings.warn("from warnings", stacklevel=1)
        logging.getLogger("somebody").warning("from logging")
        capture.terminal.write("for the user\n")
        capture.terminal.flush()
    print("afterwards")
    out, err = capfd.readouterr()
    text = log.read_text()
    for expected in ("python", "fd one", "fd two", "a child", "warnings", "logging"):
        assert f"from {expected}" in text
    assert out == "afterwards\n"
    assert err == "for the user\n"


def test_state_comes_back_after_an_exception(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before, handlers = sys.stdout, list(logging.getLogger().handlers)
    descriptors = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    with pytest.raises(KeyboardInterrupt), captured(tmp_path / "log"):
        raise KeyboardInterrupt
    assert sys.stdout is before
    assert logging.getLogger().handlers == handlers
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) == descriptors
    os.write(2, b"visible\n")
    assert capfd.readouterr().err == "visible\n"


def test_a_handler_made_inside_still_works_afterwards(tmp_path: Path) -> None:
    logger = logging.getLogger("edge_convert_test_handler")
    logger.propagate = False
    with captured(tmp_path / "log"):
        handler = logging.StreamHandler()
        logger.addHandler(handler)
    try:
        assert not handler.stream.closed
    finally:
        logger.removeHandler(handler)


def test_stages_are_plain_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    with Stages(stream) as progress:
        progress("first [bold]")
        progress("second")
    lines = stream.getvalue().splitlines()
    assert [line.partition("] ")[2] for line in lines] == ["first [bold]", "second"]


def test_quiet_stages_write_nothing() -> None:
    stream = io.StringIO()
    with Stages(stream, quiet=True) as progress:
        progress("first")
    assert stream.getvalue() == ""


def test_stages_on_a_terminal_keep_finished_stages() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with Stages(stream) as progress:
        progress("first [bold]")
        progress("second")
    text = stream.getvalue()
    assert "first [bold]" in text
    assert "second" in text
