"""What every command shares: errors as one line and an exit code, progress, JSON and tables."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from edge_convert.runtime.errors import EdgeError, MissingExtraError, ProviderUnavailableError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from edge_convert.runtime.bundle import Bundle
    from edge_convert.validate.report import Report

THREADS_HELP = "Threads of the session.  [default: all CPUs that the process may use]"
_PIPE_WIDTH = 120
_LEAST_WIDTH = 80  # below it names would be cut, so the terminal folds whole lines instead
_VERBOSE = "edge_convert.verbose"
# Spaces before the end of a line, and before the escape codes that may stand there.
_SPACES_AT_END = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$")
_INTERRUPTED = 130
_INTERRUPTED_LINE = "interrupted; nothing half-written was kept."
_MAX_MESSAGE = 600
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
            _fail(ctx, _INTERRUPTED_LINE, _INTERRUPTED)
        except BrokenPipeError:
            _silence_stdout()
            ctx.exit(_PIPE_CLOSED)
        except EdgeError as error:
            if _was_interrupted(error):
                _fail(ctx, _INTERRUPTED_LINE, _INTERRUPTED)
            _fail(ctx, _shortened(f"{error}{_hint(ctx, error)}"), error.exit_code)
        except ModuleNotFoundError as error:
            module = (error.name or str(error)).partition(".")[0]
            if module == "edge_convert":
                raise
            _fail(ctx, str(MissingExtraError(module, "cpu" if module == "onnxruntime" else "convert")), 1)
        except MemoryError:
            _fail(ctx, "out of memory. Close other programs, or convert a smaller model or context.", 1)
        except OSError as error:
            if _was_interrupted(error):
                _fail(ctx, _INTERRUPTED_LINE, _INTERRUPTED)
            _silence_stdout()
            place = error.filename or "the output"
            _fail(ctx, f"{place} cannot be read or written: {error.strerror or error}. Check space and permissions.", 1)
        except Exception as error:
            if _was_interrupted(error):
                _fail(ctx, _INTERRUPTED_LINE, _INTERRUPTED)
            if ctx.meta.get(_VERBOSE):
                raise
            found = _shortened(str(error))
            _fail(ctx, f"unexpected {type(error).__name__}: {found} (--verbose shows where)", 1)
        return result


def _hint(ctx: click.Context, error: EdgeError) -> str:
    """What the command line can add to an error that knows nothing of options."""
    command = ctx.command.get_command(ctx, ctx.invoked_subcommand or "") if isinstance(ctx.command, Group) else None
    can = command is not None and any(item.name == "on_cpu" for item in command.params)
    return " To run it here all the same, add --on-cpu." if can and isinstance(error, ProviderUnavailableError) else ""


def _fail(ctx: click.Context, message: str, code: int) -> NoReturn:
    """Print one line (after the traceback if --verbose) and leave with `code`."""
    if ctx.meta.get(_VERBOSE) and sys.exc_info()[0] is not None:
        import traceback

        click.echo(traceback.format_exc(), err=True, nl=False)
    click.echo(f"error: {message}", err=True)
    ctx.exit(code)


def _was_interrupted(error: BaseException) -> bool:
    """Whether Ctrl-C is what `error` comes from: an import or an export that it broke may report something else."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        if isinstance(link, KeyboardInterrupt):
            return True
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return False


def _shortened(message: str) -> str:
    """One line of at most `_MAX_MESSAGE` characters, the middle left out: what to do stands at the end."""
    line = " ".join(message.split())
    half = _MAX_MESSAGE // 2
    return line if len(line) <= _MAX_MESSAGE else f"{line[:half]} … {line[-half:]}"


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
    threads = click.option("--threads", type=click.IntRange(min=1), help=THREADS_HELP)
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
            stages = stack.enter_context(Stages(capture.terminal))
            yield lambda text: stages(text[:1].upper() + text[1:])
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


def print_report(report: Report, *, bundle: Bundle, seconds: float) -> None:
    """The gates, the measurements and the verdict of a report on stdout."""
    from rich.text import Text

    from edge_convert.validate import quantisation_view
    from edge_convert.validate.report import report_table, verdict

    size_bytes = sum(spec.size for spec in bundle.manifest.files.values())
    notes = [Text(note, style="dim") for note in report.notes]
    print_tables(
        [
            *report_table(report),
            *quantisation_view.tables(bundle.manifest),
            *notes,
            verdict(report, size_bytes=size_bytes, seconds=seconds),
        ]
    )


def print_tables(tables: Sequence[RenderableType]) -> None:
    """Tables and texts on stdout, as wide as COLUMNS or the terminal says, and without spaces at a line's end."""
    from rich.console import Console

    columns = os.environ.get("COLUMNS", "")
    told = int(columns) if columns.isdigit() and int(columns) > 0 else None
    console = Console(width=told or (None if sys.stdout.isatty() else _PIPE_WIDTH), highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    lines = capture.get().splitlines()
    click.echo("\n".join(_SPACES_AT_END.sub(r"\1", line) for line in lines).rstrip("\n"))


def refuse_options(wrong: dict[str, str], task: str) -> None:
    """UsageError if the user typed an option of another task; `wrong` has the task of each option's name."""
    ctx = click.get_current_context()
    for parameter in ctx.command.params:
        name = parameter.name or ""
        typed = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if typed and wrong.get(name, task) != task:
            raise UsageError(f"{parameter.opts[0]} is for {wrong[name]}, and this bundle is for {task}. Leave it out.")
