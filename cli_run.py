"""The command `run`: one bundle, many inputs, by task."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_convert.console import print_json, refuse_options
from edge_convert.runtime.errors import UsageError

if TYPE_CHECKING:
    from edge_convert.runtime.bundle import Bundle
    from edge_convert.runtime.device import DeviceProfile

_TEXT = "text-generation"
_IMAGE = "image-classification"
# The options that mean something for one task only.
_OPTIONS = {
    **dict.fromkeys(("raw", "system", "max_tokens", "temperature", "top_k", "top_p"), _TEXT),
    **dict.fromkeys(("repetition_penalty", "seed", "stop"), _TEXT),
    "show": _IMAGE,
}


def run_inputs(bundle: Bundle, inputs: Sequence[str], profile: DeviceProfile | None, options: dict[str, Any]) -> None:
    """Run `bundle` on each input in turn and print what comes out; `-` stands for the text on stdin."""
    task = bundle.manifest.task
    refuse_options(_OPTIONS, task)
    if task == _IMAGE:
        _run_image(bundle, inputs, profile, options)
        return
    if inputs.count("-") > 1:
        raise UsageError("The input `-` was given twice, and stdin can be read once. Give it once.")
    texts = [sys.stdin.read().removesuffix("\n") if item == "-" else item for item in inputs]
    run = _run_text if task == _TEXT else _run_embed
    run(bundle, texts, profile, options)


def _run_text(bundle: Bundle, prompts: list[str], profile: DeviceProfile | None, options: dict[str, Any]) -> None:
    from edge_convert.runtime.sampling import GenerationConfig
    from edge_convert.wrappers.text import TextGenerator

    if not all(prompt.strip() for prompt in prompts):
        raise UsageError("A prompt is empty. Give a text, or `-` and the text on stdin.")
    config = GenerationConfig(
        max_tokens=options["max_tokens"],
        temperature=options["temperature"],
        top_k=options["top_k"],
        top_p=options["top_p"],
        repetition_penalty=options["repetition_penalty"],
        seed=options["seed"],
        stop=options["stop"],
    )
    chat = bool(bundle.manifest.processing.get("chat_template")) and not options["raw"]
    if options["system"] is not None and not chat:
        raise UsageError("--system needs a chat template, and this run has none. Leave out --raw or --system.")
    generator = TextGenerator.load(bundle, profile=profile, threads=options["threads"])
    system = [{"role": "system", "content": options["system"]}] if options["system"] is not None else []
    results = []
    for index, prompt in enumerate(prompts):
        messages = [*system, {"role": "user", "content": prompt}]
        if options["as_json"]:
            result = generator.chat(messages, config) if chat else generator.generate(prompt, config)
            results.append({"prompt": prompt, **dataclasses.asdict(result)})
            continue
        if index:
            click.echo()
        try:
            for piece in generator.stream_chat(messages, config) if chat else generator.stream(prompt, config):
                click.echo(piece, nl=False)
                sys.stdout.flush()
        finally:
            click.echo()  # also when Ctrl-C stops the answer, so that the next line begins a line
    if options["as_json"]:
        print_json(results)


def _run_embed(bundle: Bundle, texts: list[str], profile: DeviceProfile | None, options: dict[str, Any]) -> None:
    from edge_convert.wrappers.embed import TextEmbedder

    embedder = TextEmbedder.load(bundle, profile=profile, threads=options["threads"])
    vectors = embedder.embed(texts)
    similarity = vectors @ vectors.T
    if options["as_json"]:
        print_json({"embeddings": vectors.tolist(), "similarity": similarity.tolist()})
        return
    for index, (text, vector) in enumerate(zip(texts, vectors, strict=True), start=1):
        shown = " ".join(text.split())
        click.echo(f"[{index}] {shown if len(shown) <= 70 else shown[:69] + '…'}")
        click.echo(f"    {vector.size} values: {' '.join(f'{value:+.3f}' for value in vector[:6])} … (all: --json)")
    if len(texts) > 1:
        click.echo("\nCosine of each to each:")
        click.echo("      " + " ".join(f"{f'[{index}]':>6}" for index in range(1, len(texts) + 1)))
        for index, row in enumerate(similarity, start=1):
            click.echo(f"{f'[{index}]':>6}" + " ".join(f"{value:6.3f}" for value in row))


def _run_image(bundle: Bundle, paths: Sequence[str], profile: DeviceProfile | None, options: dict[str, Any]) -> None:
    from edge_convert.wrappers.image import ImageClassifier

    for path in paths:
        if not Path(path).is_file():
            raise UsageError(f"The image {path} does not exist. Give the path of an image file.")
    classifier = ImageClassifier.load(bundle, profile=profile, threads=options["threads"])
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
