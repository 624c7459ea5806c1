"""What every command shares: errors as one line and an exit code, progress, JSON and tables."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from edge_convert.runtime.errors import EdgeError, MissingExtraError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from edge_convert.validate.report import Report

_VERBOSE = "edge_convert.verbose"
_INTERRUPTED = 130
_PIPE_CLOSED = 141
_Command = TypeVar("_Command", bound=Callable[..., Any])


class Group(click.Group):
    """Turns every exception into one line on stderr and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; only click's own exceptions leave."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            _fail(ctx, "interrupted; nothing half-written was kept.", _INTERRUPTED)
        except BrokenPipeError:
            _silence_stdout()
            ctx.exit(_PIPE_CLOSED)
        except EdgeError as error:
            _fail(ctx, " ".join(str(error).split()), error.exit_code)
        except ModuleNotFoundError as error:
            module = (error.name or str(error)).partition(".")[0]
            if module == "edge_convert":
                raise
            _fail(ctx, str(MissingExtraError(module, "cpu" if module == "onnxruntime" else "convert")), 1)
        except MemoryError:
            _fail(ctx, "out of memory. Close other programs, or convert a smaller model or context.", 1)
        except Exception as error:
            if ctx.meta.get(_VERBOSE):
                raise
            found = " ".join(str(error).split())[:300]
            _fail(ctx, f"unexpected {type(error).__name__}: {found} (--verbose shows where)", 1)
        return result


def _fail(ctx: click.Context, message: str, code: int) -> NoReturn:
    """Print one line (after the traceback if --verbose) and leave with `code`."""
    if ctx.meta.get(_VERBOSE) and sys.exc_info()[0] is not None:
        import traceback

        click.echo(traceback.format_exc(), err=True, nl=False)
    click.echo(f"error: {message}", err=True)
    ctx.exit(code)


def _silence_stdout() -> None:
    """Point stdout at nothing, so that Python's flush at exit does not complain of the closed pipe."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def set_verbose(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    """Callback of --verbose; works before and after the command's name."""
    if value:
        ctx.meta[_VERBOSE] = True


def common(command: _Command) -> _Command:
    """--json and --verbose, on every command."""
    verbose = click.option(
        "--verbose", "-v", is_flag=True, expose_value=False, is_eager=True, callback=set_verbose,
        help="Show the traceback of an error.",
    )  # fmt: skip
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")(verbose(command))


def where(command: _Command) -> _Command:
    """--threads and --on-cpu, on every command that runs a bundle."""
    threads = click.option("--threads", type=click.IntRange(min=1), help="Threads of the session.")
    on_cpu = click.option("--on-cpu", is_flag=True, help="Run on the CPU, whatever the bundle's target is.")
    return threads(on_cpu(command))


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C inside the block, so that half-written outputs are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def work() -> Iterator[Callable[[str], None]]:
    """Progress on stderr while the libraries' chatter goes to a log file.

    The log is kept, and named, only when the work fails in a way that it may explain.
    """
    from edge_convert.convert.chatter import Stages, captured, new_log

    log = new_log()
    keep = False
    try:
        with ExitStack() as stack:
            stack.enter_context(_terminate_as_interrupt())
            capture = stack.enter_context(captured(log))
            yield stack.enter_context(Stages(capture.terminal))
    except Exception as error:
        keep = not isinstance(error, UsageError) and log.stat().st_size > 0
        raise
    finally:
        if keep:
            click.echo(f"log of the libraries: {log}", err=True)
        else:
            log.unlink(missing_ok=True)


def leave(report: Report | None, *, strict: bool) -> None:
    """Exit with 3 if a gate of `report` failed; returns otherwise."""
    if report is not None:
        from edge_convert.validate.report import exit_code

        code = exit_code(report, strict=strict)
        if code:
            click.get_current_context().exit(code)


def print_json(value: Any) -> None:
    """`value` as indented JSON on stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_report(report: Report) -> None:
    """The tables of a report on stdout."""
    from edge_convert.validate.report import report_table

    print_tables(report_table(report))


def print_tables(tables: Sequence[Table]) -> None:
    """Tables as text: as wide as the terminal, or wide enough for whole cells in a pipe or a file."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    click.echo(capture.get(), nl=False)
