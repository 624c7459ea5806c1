"""The command line: parse, call, print, exit code. Results go to stdout, progress and errors to stderr."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_convert import __version__
from edge_convert.cli_paths import need_calibration, need_source, open_bundle, plain_name, profile_of
from edge_convert.cli_run import run_inputs
from edge_convert.console import (
    THREADS_HELP,
    Group,
    common,
    leave,
    print_json,
    print_report,
    print_tables,
    refuse_options,
    set_verbose,
    where,
    work,
)
from edge_convert.runtime.errors import UnknownNameError, UsageError
from edge_convert.runtime.manifest import AUTO, REQUESTS, TASKS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_convert.runtime.bundle import Bundle
    from edge_convert.validate.report import Report
    from edge_convert.wrappers.image import ImageLike


def _task_name(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and value not in TASKS:
        raise UnknownNameError("task", value, TASKS)
    return value


def _precision_name(_ctx: click.Context, _parameter: click.Parameter, value: str) -> str:
    if value not in REQUESTS:
        raise UnknownNameError("precision", value, REQUESTS)
    return value


_CALIBRATION = click.Path(path_type=Path)
_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
_BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))
_STRICT = click.option("--strict", is_flag=True, help="A gate that could not run counts as failed (exit code 3).")
_TARGETS_FILE = click.option(
    "--targets-file", type=_FILE, help="A devices.yaml of your own.  [default: the packaged one]"
)
# Options of `bench` that mean something for one kind of task only.
_BENCH_TASKS = {"prompt_tokens": "text-generation", "tokens": "text-generation"}
_EXIT_CODES = """\b
Exit codes:
  0    all that could run passed
  1    a failure stopped the work; nothing half-written is left
  2    wrong usage: an unknown name or option, a path that does not exist
  3    a gate failed (--strict: or was not run; selftest: the CPU only)
  130  interrupted
"""


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXIT_CODES)
@click.version_option(__version__, prog_name="edge-convert")
@click.option(
    "--verbose", "-v", is_flag=True, expose_value=False, callback=set_verbose, help="Show the traceback of an error."
)
def main() -> None:
    """From a checkpoint to a proven bundle for a named edge device, and a small runtime that runs it."""


@main.command(short_help="Convert a model and compare it with the original.")
@click.argument("source")
@click.option(
    "--target", metavar="NAME", required=True, help="Device to convert for; `edge-convert targets` lists them."
)
@click.option(
    "--task", metavar="|".join(TASKS), callback=_task_name, help="Task of the model.  [default: found from the source]"
)
@click.option(
    "--precision",
    metavar="|".join(REQUESTS),
    callback=_precision_name,
    default=AUTO,
    help="Number format of the weights; auto: the cheapest that passes the target's gates.  [default: auto]",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Bundle folder.  [default: ./NAME-TARGET]")
@click.option("--force", is_flag=True, help="Replace the output folder if it exists.")
@click.option(
    "--context",
    "context_tokens",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Tokens that the cache holds.  [default: the target's]",
)
@click.option("--calibration", type=_CALIBRATION, help="Folder, or .npz file, of images or texts from the field.")
@_TARGETS_FILE
@click.option("--no-validate", is_flag=True, help="Write the bundle without comparing it to the original.")
@_STRICT
@common
def model(
    source: str,
    target: str,
    task: str | None,
    precision: str,
    output: Path | None,
    force: bool,
    context_tokens: int | None,
    calibration: Path | None,
    targets_file: Path | None,
    no_validate: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """Convert SOURCE (folder, hub id, .gguf, .onnx or module:factory) and compare it with the original."""
    from edge_convert.runtime.device import load_profile

    started = time.perf_counter()
    profile = load_profile(target, targets_file)
    need_source(source)
    need_calibration(calibration)
    if no_validate and strict:
        raise UsageError("--strict needs the validation that --no-validate leaves out. Give one of the two.")
    place = output or Path(f"{plain_name(source)}-{profile.name}")
    with work() as progress:
        from edge_convert.convert.pipeline import convert

        result = convert(
            source,
            target=target,
            task=task,
            precision=precision,
            output=place,
            force=force,
            context_tokens=context_tokens,
            calibration=calibration,
            validate=not no_validate,
            targets_file=targets_file,
            progress=progress,
        )
    manifest = result.bundle.manifest
    if as_json:
        report = json.loads(result.report.to_json()) if result.report else None
        print_json({"bundle": str(place), "task": manifest.task, "target": manifest.target,
                     "precision": manifest.precision, "warnings": list(manifest.warnings), "report": report})  # fmt: skip
    else:
        for warning in manifest.warnings:
            click.echo(f"warning: {warning}", err=True)
        if result.report:
            print_report(result.report, bundle=result.bundle, seconds=time.perf_counter() - started)
        click.echo(f"Bundle: {place}" + ("" if result.report else " (not validated)"))
        click.echo("\n".join(_next_commands(result.bundle, place, result.report)))
    leave(result.report, strict=strict)


@main.command(short_help="Run a bundle's gates again, write report.json.")
@_BUNDLE
@click.option("--source", help="The original, for numeric gates on all texts or images; else golden data only.")
@click.option("--calibration", type=_CALIBRATION, help="Folder, or .npz file, of images for image-classification.")
@click.option("--threads", type=click.IntRange(min=1), help=THREADS_HELP)
@click.option("--no-latency", is_flag=True, help="Leave out the latency measurements.")
@_STRICT
@common
def validate(
    bundle: Path,
    source: str | None,
    calibration: Path | None,
    threads: int | None,
    no_latency: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """Run the gates of BUNDLE again; write report.json into it unless the one there covers more of them."""
    started = time.perf_counter()
    opened = open_bundle(bundle)
    refuse_options({"calibration": "image-classification"}, opened.manifest.task)
    if source is not None:
        need_source(source)
    need_calibration(calibration)
    with work() as progress:
        from edge_convert.validate.report import REPORT_FILE, stored_report
        from edge_convert.validate.suites import validate_bundle

        reference = None
        images: Sequence[ImageLike] = ()
        if source is not None:
            from edge_convert.convert.pipeline import load_reference

            progress("loading the original")
            reference = load_reference(source, bundle=opened)
        if calibration is not None or (reference is not None and opened.manifest.task == "image-classification"):
            from edge_convert.convert.photos import read_photos

            images = read_photos(calibration).judging
        report = validate_bundle(
            opened, reference, images=images, threads=threads, measure_latency=not no_latency, progress=progress
        )
    stored = stored_report(opened)
    if replaced := stored is None or report.may_replace(stored):
        opened.update_file(REPORT_FILE, report.to_json().encode())
    if as_json:
        print_json(json.loads(report.to_json()))
    else:
        print_report(report, bundle=opened, seconds=time.perf_counter() - started)
    if not replaced:
        click.echo(
            "report.json was left as it is: it covers more gates than could be run here. Give --source SOURCE to run them all.",
            err=True,
        )
    leave(report, strict=strict)


@main.command(short_help="Measure how fast a bundle runs here.")
@_BUNDLE
@click.option("--prompt-tokens", default=128, show_default=True, help="Length of the prompt (text-generation).")
@click.option("--tokens", default=64, show_default=True, help="Tokens to generate (text-generation).")
@click.option("--batch-size", default=8, show_default=True, help="Items in a batch (other tasks).")
@click.option("--runs", type=int, help="Counted runs.  [default: 3, or 1 with --no-cache]")
@click.option("--warmup", default=1, show_default=True, help="Runs before that are not counted.")
@click.option("--no-cache", is_flag=True, help="Run the whole sequence again for each token, to see what that costs.")
@where
@common
def bench(
    bundle: Path,
    prompt_tokens: int,
    tokens: int,
    batch_size: int,
    runs: int | None,
    warmup: int,
    no_cache: bool,
    threads: int | None,
    on_cpu: bool,
    as_json: bool,
) -> None:
    """Measure how fast BUNDLE runs here."""
    from edge_convert.validate import bench as benchmark

    settings = benchmark.BenchSettings(
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        batch_size=batch_size,
        runs=runs if runs is not None else (1 if no_cache else 3),
        warmup=warmup,
        threads=threads,
        cache=not no_cache,
    )
    opened = open_bundle(bundle)
    refuse_options(_BENCH_TASKS, opened.manifest.task)
    with work() as progress:
        result = benchmark.bench_bundle(opened, settings, profile=profile_of(opened, on_cpu), progress=progress)
    if as_json:
        print_json(result.to_dict())
        return
    print_tables(benchmark.tables(result))
    if result.series:
        click.echo("\n" + "\n".join([benchmark.chart(result.series), "", *benchmark.sentences(result)]))


@main.command(short_help="Ask, embed or classify with a bundle.")
@_BUNDLE
@click.argument("inputs", nargs=-1, required=True)
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
@click.option("--system", help="System message of the chat.")
@click.option("--max-tokens", default=256, show_default=True, help="Most tokens to generate.")
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", default=0, help="Sample from the k likeliest tokens.  [default: 0, all of them]")
@click.option("--top-p", default=1.0, show_default=True, help="Sample from the tokens that make up this probability.")
@click.option("--repetition-penalty", default=1.0, show_default=True, help="Above 1 avoids repetition.")
@click.option("--seed", type=int, help="Makes sampling repeatable.  [default: a new one each time]")
@click.option("--stop", multiple=True, help="End before this text; may be given several times.")
@click.option("--show", default=5, show_default=True, type=click.IntRange(min=1), help="Labels per image.")
@where
@common
def run(bundle: Path, inputs: tuple[str, ...], **options: Any) -> None:
    """Run BUNDLE on each of INPUTS: prompts, texts to embed, or image files; `-` reads a text from stdin.

    Prompts are answered in turn, each on its own, with an empty line between the answers.
    """
    opened = open_bundle(bundle)
    run_inputs(opened, inputs, profile_of(opened, options["on_cpu"]), options)


@main.command(short_help="Show what is inside a bundle.")
@_BUNDLE
@common
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what is inside BUNDLE: graphs, weights, files, processing, provenance."""
    from edge_convert.validate import inspect as inspection
    from edge_convert.validate import quantisation_view

    opened = open_bundle(bundle)
    description = inspection.describe(opened)
    if as_json:
        print_json(description)
    else:
        print_tables([*inspection.tables(description), *quantisation_view.tables(opened.manifest)])


@main.command(short_help="Check a bundle on the device itself.")
@_BUNDLE
@click.option("--on-cpu", is_flag=True, help="Check on the CPU; that the target's provider did not run is accepted.")
@_STRICT
@common
def selftest(bundle: Path, on_cpu: bool, strict: bool, as_json: bool) -> None:
    """Run BUNDLE on its golden data, on the device itself, without the original.

    Without the target's own provider the check is made on the CPU, and the exit code is 3 unless --on-cpu
    is given.
    """
    started = time.perf_counter()
    opened = open_bundle(bundle)
    with work() as progress:
        from edge_convert.validate.selftest import missing_provider, run_selftest

        report = run_selftest(opened, on_cpu=on_cpu, progress=progress)
    missing = missing_provider(report)
    if as_json:
        print_json(json.loads(report.to_json()))
    else:
        print_report(report, bundle=opened, seconds=time.perf_counter() - started)
        if missing:
            click.echo("Checked on the CPU only" + ("" if on_cpu else " (exit code 3; --on-cpu accepts that)"))
    leave(report, strict=strict or (missing is not None and not on_cpu))


@main.command(short_help="List the devices to convert for.")
@_TARGETS_FILE
@common
def targets(targets_file: Path | None, as_json: bool) -> None:
    """List the devices that bundles can be made for."""
    import dataclasses

    from edge_convert.runtime.device import aliases, load_profiles

    profiles, names = load_profiles(targets_file), aliases(targets_file)
    short = {name: sorted(alias for alias, full in names.items() if full == name) for name in profiles}
    if as_json:
        print_json({name: dataclasses.asdict(item) | {"aliases": short[name]} for name, item in profiles.items()})
        return
    from rich.padding import Padding
    from rich.text import Text

    from edge_convert.validate import figures

    shown: list[Any] = []
    for name, item in profiles.items():
        versions = f"{item.onnxruntime_min} to {item.onnxruntime_max}" if item.onnxruntime_max else (
            f"{item.onnxruntime_min} or newer")  # fmt: skip
        rows = {
            "also called": figures.text(short[name]),
            "provider": figures.text([spec.name for spec in item.providers]),
            "precisions": f"{figures.text(item.native_precisions)} (native, preferred first)",
            "memory": figures.size(item.memory_mb * 2**20),
            "ONNX Runtime": f"{versions}; reads IR {item.ir_max}, opset {item.opset_max}",
        }
        shown += [figures.titled(name, Text(item.description), Padding(figures.pairs(rows), (0, 0, 0, 2)))]
    print_tables(shown)


@main.command(short_help="Show what works on this machine.")
@common
def doctor(as_json: bool) -> None:
    """Show what really works on this machine; exit code 1 if something is broken."""
    from edge_convert.validate import doctor as examination

    with work() as progress:
        progress("running a graph on each provider")
        findings = examination.examine()
    print_json(findings.to_dict()) if as_json else print_tables(examination.tables(findings))
    for problem in findings.problems:
        click.echo(f"problem: {problem}", err=True)
    if findings.problems:
        click.get_current_context().exit(1)


def _next_commands(bundle: Bundle, place: Path, report: Report | None) -> list[str]:
    """What to try with a new bundle, here and, where the target's provider did not run, on the device."""
    inputs = {
        "text-generation": '"What is gravity?"',
        "feature-extraction": '"The battery is low." "The drone needs power."',
        "image-classification": "photo.jpg",
    }
    folder, wanted = shlex.quote(str(place)), bundle.profile.providers[0].name
    started = Path(sys.argv[0])  # the environment's program, where that is not activated
    there = started.name == "edge-convert" and shutil.which("edge-convert") is None
    program = shlex.quote(str(started)) if there else "edge-convert"
    first = f"Next: {program} run {folder} {inputs[bundle.manifest.task]}"
    ran = report.environment.get("providers", []) if report else []
    if wanted in (*ran[:1], "CPUExecutionProvider"):
        return [first]
    return [f"{first} --on-cpu", f"On the device: edge-convert selftest {folder}"]


if __name__ == "__main__":
    main()
