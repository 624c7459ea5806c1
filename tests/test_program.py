"""The program as a shell starts it: closed streams, a full device, Ctrl-C wherever it lands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from edge_convert.console import Group
from edge_convert.runtime.errors import ExportError

PROGRAM = [sys.executable, "-m", "edge_convert"]


def run(arguments: str, redirection: str = "") -> subprocess.CompletedProcess[str]:
    command = f"{' '.join(PROGRAM)} {arguments} {redirection}"
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("redirection", "code"),
    [
        (">&-", 0),
        pytest.param(
            ">/dev/full", 1, marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
        ),
    ],
    ids=["closed", "full"],
)
def test_an_output_that_cannot_be_written(redirection: str, code: int) -> None:
    done = run("targets", redirection)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "unexpected" not in done.stderr
    assert len(done.stderr.splitlines()) == code


def test_an_empty_source_is_wrong_usage() -> None:
    done = run("model '' --target cpu")
    assert done.returncode == 2
    assert done.stderr.startswith("error: The source is empty.")


def group_that_raises(error: BaseException) -> click.Group:
    @click.group(cls=Group)
    def program() -> None:
        """A program with one command."""

    @program.command()
    def work() -> None:
        raise error

    return program


def caused_by(outer: Exception, inner: BaseException) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        caused_by(ExportError("the export failed"), KeyboardInterrupt()),
        caused_by(ExportError("the export failed"), caused_by(RuntimeError("step 1"), KeyboardInterrupt())),
        caused_by(RuntimeError("unexpected"), KeyboardInterrupt()),
    ],
    ids=["plain", "wrapped", "wrapped twice", "in another error"],
)
def test_ctrl_c_is_130_however_a_library_wrapped_it(error: BaseException) -> None:
    done = CliRunner().invoke(group_that_raises(error), ["work"])
    assert done.exit_code == 130
    assert done.stderr == "error: interrupted; nothing half-written was kept.\n"


def test_a_long_message_keeps_its_beginning_and_its_advice() -> None:
    error: Any = ExportError("It failed: " + "x" * 100_000 + ". Do this.")
    done = CliRunner().invoke(group_that_raises(error), ["work"])
    assert done.exit_code == 1
    assert len(done.stderr) < 700
    assert done.stderr.startswith("error: It failed")
    assert done.stderr.endswith("Do this.\n")
