"""The command line: parse, call, print, exit code.

Exit codes: 0 all that could run passed; 1 a failure; 2 wrong usage; 3 a gate failed (with --strict also a
gate that could not run); 130 interrupted. Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_convert import __version__
from edge_convert.console import Group, common, leave, print_json, print_report, print_tables, set_verbose, where, work
from edge_convert.runtime.errors import InputError, UnknownNameError, UsageError
from edge_convert.runtime.manifest import PRECISIONS, TASKS

if TYPE_CHECKING:
    from edge_convert.runtime.bundle import Bundle
    from edge_convert.runtime.device import DeviceProfile


def _task_name(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and value not in TASKS:
        raise UnknownNameError("task", value, TASKS)
    return value


def _precision_name(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    if value in (None, "auto"):
        return None
    if value not in PRECISIONS:
        raise UnknownNameError("precision", str(value), ("auto", *PRECISIONS))
    return value


_FOLDER = click.Path(path_type=Path, file_okay=False)
_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
_BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="edge-convert")
@click.option(
    "--verbose", "-v", is_flag=True, expose_value=False, callback=set_verbose, help="Show the traceback of an error."
)
def main() -> None:
    """From a checkpoint to a proven bundle for a named edge device, and a small runtime that runs it."""


@main.command()
@click.argument("source")
@click.option("--target", required=True, help="Device to convert for; `edge-convert targets` lists them.")
@click.option("--task", callback=_task_name, help="Task of the model; found from the source if left out.")
@click.option("--precision", callback=_precision_name, help="auto, fp32, fp16, int8 or int4.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Bundle folder [default: ./NAME-TARGET].")
@click.option("--force", is_flag=True, help="Replace the output folder if it exists.")
@click.option("--context", "context_tokens", type=click.IntRange(min=1), help="Tokens that the cache holds.")
@click.option("--calibration", type=_FOLDER, help="Folder of images or texts from the field.")
@click.option("--targets-file", type=_FILE, help="A devices.yaml of your own.")
@click.option("--no-validate", is_flag=True, help="Write the bundle without comparing it to the original.")
@click.option("--strict", is_flag=True, help="A gate that could not run counts as failed (exit code 3).")
@common
def model(
    source: str,
    target: str,
    task: str | None,
    precision: str | None,
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

    profile = load_profile(target, targets_file)
    _existing_folder(calibration, "calibration")
    if no_validate and strict:
        raise UsageError("--strict needs the validation that --no-validate leaves out. Give one of the two.")
    place = output or Path(f"{_plain_name(source)}-{profile.name}")
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
        if result.report:
            print_report(result.report)
        for warning in manifest.warnings:
            click.echo(f"warning: {warning}", err=True)
        click.echo(f"Bundle: {place}" + ("" if result.report else " (not validated)"))
    leave(result.report, strict=strict)


@main.command()
@_BUNDLE
@click.option("--source", help="The original, for numeric gates on all texts or images; else golden data only.")
@click.option("--calibration", type=_FOLDER, help="Folder of images for image-classification.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the session.")
@click.option("--no-latency", is_flag=True, help="Leave out the latency measurements.")
@click.option("--strict", is_flag=True, help="A gate that could not run counts as failed (exit code 3).")
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
    """Run the gates of BUNDLE again and write report.json into it."""
    opened = _open(bundle)
    _existing_folder(calibration, "calibration")
    with work() as progress:
        from edge_convert.validate.suites import validate_bundle

        reference, images = None, []
        if source is not None:
            from edge_convert.convert.pipeline import load_reference

            progress("loading the original")
            reference = load_reference(source, bundle=opened)
        if calibration is not None:
            from edge_convert.convert.calibration import judging_images

            images = judging_images(calibration)
        report = validate_bundle(
            opened, reference, images=images, threads=threads, measure_latency=not no_latency, progress=progress
        )
    opened.update_file("report.json", report.to_json().encode())
    print_json(json.loads(report.to_json())) if as_json else print_report(report)
    leave(report, strict=strict)


@main.command()
@_BUNDLE
@click.option("--prompt-tokens", default=128, show_default=True, help="Length of the prompt (text-generation).")
@click.option("--tokens", default=64, show_default=True, help="Tokens to generate (text-generation).")
@click.option("--batch-size", default=8, show_default=True, help="Items in a batch (other tasks).")
@click.option("--runs", default=3, show_default=True, help="Counted runs.")
@click.option("--warmup", default=1, show_default=True, help="Runs before that are not counted.")
@click.option("--no-cache", is_flag=True, help="Run the whole sequence again for each token, to see what that costs.")
@where
@common
def bench(
    bundle: Path,
    prompt_tokens: int,
    tokens: int,
    batch_size: int,
    runs: int,
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
        runs=runs,
        warmup=warmup,
        threads=threads,
        cache=not no_cache,
    )
    opened = _open(bundle)
    with work() as progress:
        result = benchmark.bench_bundle(opened, settings, profile=_profile(opened, on_cpu), progress=progress)
    if as_json:
        print_json(result.to_dict())
        return
    print_tables(benchmark.tables(result))
    if result.series:
        click.echo(benchmark.chart(result.series))


@main.command()
@_BUNDLE
@click.argument("inputs", nargs=-1, required=True)
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
@click.option("--system", help="System message of the chat.")
@click.option("--max-tokens", default=256, show_default=True, help="Most tokens to generate.")
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", default=0, help="Sample from the k likeliest tokens [default: all].")
@click.option("--top-p", default=1.0, show_default=True, help="Sample from the tokens that make up this probability.")
@click.option("--repetition-penalty", default=1.0, show_default=True, help="Above 1 avoids repetition.")
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--stop", multiple=True, help="End before this text; may be given several times.")
@click.option("--show", default=5, show_default=True, type=click.IntRange(min=1), help="Labels per image.")
@where
@common
def run(bundle: Path, inputs: tuple[str, ...], **options: Any) -> None:
    """Run BUNDLE on INPUTS: a prompt, texts to embed, or image files; `-` reads stdin."""
    opened = _open(bundle)
    texts = [sys.stdin.read() if item == "-" else item for item in inputs]
    match opened.manifest.task:
        case "text-generation":
            _run_text(opened, texts, options)
        case "feature-extraction":
            _run_embed(opened, texts, options)
        case _:
            _run_image(opened, texts, options)


def _run_text(bundle: Bundle, texts: list[str], options: dict[str, Any]) -> None:
    from edge_convert.runtime.sampling import GenerationConfig
    from edge_convert.wrappers.text import TextGenerator

    config = GenerationConfig(
        max_tokens=options["max_tokens"],
        temperature=options["temperature"],
        top_k=options["top_k"],
        top_p=options["top_p"],
        repetition_penalty=options["repetition_penalty"],
        seed=options["seed"],
        stop=options["stop"],
    )
    prompt = " ".join(texts)
    chat = bool(bundle.manifest.processing.get("chat_template")) and not options["raw"]
    if options["system"] is not None and not chat:
        raise UsageError("--system needs a chat template, and this run has none. Leave out --raw or --system.")
    generator = TextGenerator.load(bundle, profile=_profile(bundle, options["on_cpu"]), threads=options["threads"])
    system = [{"role": "system", "content": options["system"]}] if options["system"] is not None else []
    messages = [*system, {"role": "user", "content": prompt}]
    if options["as_json"]:
        import dataclasses

        result = generator.chat(messages, config) if chat else generator.generate(prompt, config)
        print_json(dataclasses.asdict(result))
        return
    for piece in generator.stream_chat(messages, config) if chat else generator.stream(prompt, config):
        click.echo(piece, nl=False)
        sys.stdout.flush()
    click.echo()


def _run_embed(bundle: Bundle, texts: list[str], options: dict[str, Any]) -> None:
    from edge_convert.wrappers.embed import TextEmbedder

    embedder = TextEmbedder.load(bundle, profile=_profile(bundle, options["on_cpu"]), threads=options["threads"])
    vectors = embedder.embed(texts)
    similarity = vectors @ vectors.T
    if options["as_json"]:
        print_json({"embeddings": vectors.tolist(), "similarity": similarity.tolist()})
        return
    for index, (text, vector) in enumerate(zip(texts, vectors, strict=True)):
        first = " ".join(f"{value:+.4f}" for value in vector[:6])
        cosines = " ".join(f"{value:.3f}" for value in similarity[index])
        click.echo(f"{text[:50]!r}: {vector.size} values {first} …  cosine to each: {cosines}")


def _run_image(bundle: Bundle, paths: list[str], options: dict[str, Any]) -> None:
    from edge_convert.wrappers.image import ImageClassifier

    for path in paths:
        if not Path(path).is_file():
            raise InputError(f"The image {path} does not exist. Give the path of an image file.")
    classifier = ImageClassifier.load(bundle, profile=_profile(bundle, options["on_cpu"]), threads=options["threads"])
    results = classifier.classify([Path(path) for path in paths], top_k=options["show"])
    if options["as_json"]:
        print_json([
            {"image": path, "labels": [{"name": item.name, "index": item.index, "probability": float(item.probability)}
                                       for item in labels]}
            for path, labels in zip(paths, results, strict=True)
        ])  # fmt: skip
        return
    for path, labels in zip(paths, results, strict=True):
        click.echo(path)
        for item in labels:
            click.echo(f"  {item.probability:7.2%}  {item.name}")


@main.command()
@_BUNDLE
@common
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what is inside BUNDLE: graphs, weights, files, processing, provenance."""
    from edge_convert.validate import inspect as inspection

    description = inspection.describe(_open(bundle))
    print_json(description) if as_json else print_tables(inspection.tables(description))


@main.command()
@_BUNDLE
@click.option("--strict", is_flag=True, help="A gate that could not run counts as failed (exit code 3).")
@common
def selftest(bundle: Path, strict: bool, as_json: bool) -> None:
    """Run BUNDLE on its golden data, on the device itself, without the original."""
    opened = _open(bundle)
    with work() as progress:
        from edge_convert.validate.selftest import run_selftest

        progress("running the golden data")
        report = run_selftest(opened)
    print_json(json.loads(report.to_json())) if as_json else print_report(report)
    leave(report, strict=strict)


@main.command()
@click.option("--targets-file", type=_FILE, help="A devices.yaml of your own.")
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
    from rich.table import Table

    table = Table("target", "aliases", "provider", "precisions", "memory", "IR/opset", "ONNX Runtime", "description")
    for name, item in profiles.items():
        versions = f"{item.onnxruntime_min} to {item.onnxruntime_max}" if item.onnxruntime_max else (
            f"{item.onnxruntime_min}+")  # fmt: skip
        providers = ", ".join(spec.name for spec in item.providers)
        table.add_row(name, ", ".join(short[name]), providers, ", ".join(item.native_precisions),
                      f"{item.memory_mb} MB", f"{item.ir_max}/{item.opset_max}", versions, item.description)  # fmt: skip
    print_tables([table])


@main.command()
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


def _open(path: Path) -> Bundle:
    """The checked bundle at `path`; a path that does not exist is wrong usage."""
    from edge_convert.runtime.bundle import Bundle

    if not path.exists():
        raise UsageError(f"The bundle folder {path} does not exist. Give a folder that `edge-convert model` wrote.")
    return Bundle.open(path)


def _existing_folder(path: Path | None, name: str) -> None:
    if path is not None and not path.is_dir():
        raise UsageError(f"The {name} folder {path} does not exist. Give a folder of images or texts.")


def _profile(bundle: Bundle, on_cpu: bool) -> DeviceProfile | None:
    from edge_convert.runtime.device import with_cpu_only

    return with_cpu_only(bundle.profile) if on_cpu else None


def _plain_name(source: str) -> str:
    """A folder name for the output from what the user typed: its last part without a suffix."""
    last = Path(source.rstrip("/")).name
    if ":" in last:  # package.module:factory or file.py:factory
        last = last.partition(":")[0].removesuffix(".py").rpartition(".")[2]
    stem = last.removesuffix(".gguf").removesuffix(".onnx")
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in stem).strip(".-") or "model"


if __name__ == "__main__":
    main()
