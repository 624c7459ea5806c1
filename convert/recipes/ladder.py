"""`--precision auto` of encoders and classifiers: int8, int8 with more and more of the costliest nodes in fp32, fp16
and fp32 in turn, as far as the target runs them.

Each is measured against the original on calibration inputs, on the CPU whatever the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from edge_convert.convert.calibration_texts import calibration_texts
from edge_convert.convert.graph_tools import Feed, cpu_session
from edge_convert.convert.mixed_precision import worst
from edge_convert.convert.photos import read_photos
from edge_convert.convert.quantize import product_costs
from edge_convert.convert.recipe import Found, Request
from edge_convert.convert.search import Build, Graphs, Journal, Measure, Search, open_journal
from edge_convert.runtime.errors import ExportError
from edge_convert.runtime.manifest import AUTO
from edge_convert.runtime.threads import available_cpus
from edge_convert.validate import metrics
from edge_convert.validate.golden import synthetic_image
from edge_convert.validate.runner import ClassifierReference, EmbedderReference, Reference
from edge_convert.validate.suites_image import crops, in_batches

Quantise = Callable[..., Graphs]  # (request, graphs, folder), and which or how many nodes of int8 stay in fp32
Rungs = Iterable[tuple[str, Build]]
_BATCH = 16  # texts, as the wrapper takes them: dynamic int8 has one scale for all of a batch
_MAX_PHOTOS = 16
_FIRST_NODES = 8  # of a classifier; fewer are weighed for int8 alone (`mixed_precision.put_back`)


def search_encoder(
    request: Request, graphs: Graphs, reference: Reference, folder: Path, *, quantise: Quantise
) -> Found:
    """The cheapest precision of a sentence embedder; measured by the cosines of calibration texts in batches."""
    original = cast("EmbedderReference", reference)
    texts = calibration_texts(request.calibration)
    tokens = [original.tokenize(text) for text in texts]
    order = sorted(range(len(texts)), key=lambda at: len(tokens[at]))
    expected = np.asarray(original.embed([texts[at] for at in order]))
    batches = [
        text_batch([tokens[at] for at in order[start : start + _BATCH]], original.pad_token_id)
        for start in range(0, len(order), _BATCH)
    ]
    source, journal = graphs["encoder"].path, open_journal(request, "feature-extraction", texts)

    def feeds(names: Iterable[str]) -> list[Feed]:
        return [{name: batch[name] for name in names} for batch in batches]

    def measure(built: Graphs) -> dict[str, float]:
        session = cpu_session(built["encoder"].path, threads=available_cpus())
        found = [session.run(None, feed)[0] for feed in feeds([item.name for item in session.get_inputs()])]
        cosines = metrics.cosine(expected, np.concatenate(found))
        return {"cosine_mean": float(cosines.mean()), "cosine_min": float(cosines.min())}

    def mixed(search: Search) -> Rungs:
        if "costs" not in journal:
            request.progress("measuring what int8 of each product costs")
            names = [item.name for item in cpu_session(source).get_inputs()]
            journal.put("costs", product_costs(source, feeds(names), reduce_range=request.profile.reduce_range))
        search.costs = journal.get("costs")
        for count in _doubled(1, len(search.costs), request):
            left = worst(search.costs, count)
            yield _mixed_name(count), partial(_build, request, graphs, "int8", partial(quantise, exclude=left))

    rungs = partial(_rungs, request, graphs, quantise, mixed)
    return _climb(request, "feature-extraction", rungs, measure, journal, folder)


def search_classifier(
    request: Request, graphs: Graphs, reference: Reference, folder: Path, *, quantise: Quantise
) -> Found:
    """The cheapest precision of an image classifier; measured on crops of the photos that calibrate."""
    from edge_convert.wrappers.image import load_image

    original = cast("ClassifierReference", reference)
    photos = read_photos(request.calibration)
    loaded = [load_image(photo) for photo in photos.calibrating[:_MAX_PHOTOS]] or [load_image(synthetic_image())]
    frames = np.stack([original.preprocess(view) for image in loaded for view in (image, *crops(image))])
    expected = in_batches(original.logits, frames)

    def measure(built: Graphs) -> dict[str, float]:
        session = cpu_session(built["classifier"].path, threads=available_cpus())
        name = session.get_inputs()[0].name
        found = in_batches(lambda batch: np.asarray(session.run(None, {name: batch})[0], np.float32), frames)
        return {
            "top1_agreement": metrics.top1_agreement(expected, found),
            "probability_error_mean": float(metrics.probability_error(expected, found).mean()),
        }

    def mixed(_: Search) -> Rungs:
        for count in _doubled(_FIRST_NODES, _count_nodes(graphs["classifier"].path), request):
            yield _mixed_name(count), partial(_build, request, graphs, "int8", partial(quantise, fp32_nodes=count))

    left_out = () if photos.calibrating else ("int8",)
    rungs = partial(_rungs, request, graphs, quantise, mixed, left_out=left_out)
    journal = open_journal(request, "image-classification", list(photos.digests))
    # Flips between classes that the original hardly tells apart are coin tosses, and the frames are few.
    counted = {"top1_agreement": len(frames)}
    return _climb(request, "image-classification", rungs, measure, journal, folder, counted=counted)


def text_batch(tokens: list[list[int]], pad_token_id: int) -> dict[str, NDArray[np.int64]]:
    """`input_ids`, `attention_mask` and `token_type_ids`, int64 (N, S), of N texts padded on the right to the longest."""
    shape = (len(tokens), max(map(len, tokens)))
    feed = {
        "input_ids": np.full(shape, pad_token_id, np.int64),
        "attention_mask": np.zeros(shape, np.int64),
        "token_type_ids": np.zeros(shape, np.int64),
    }
    for row, ids in enumerate(tokens):
        feed["input_ids"][row, : len(ids)] = ids
        feed["attention_mask"][row, : len(ids)] = 1
    return feed


def _build(request: Request, graphs: Graphs, precision: str, quantise: Quantise, place: Path) -> Graphs:
    return quantise(replace(request, precision=precision), graphs, place)


def _rungs(
    request: Request,
    graphs: Graphs,
    quantise: Quantise,
    mixed: Callable[[Search], Rungs],
    search: Search,
    *,
    left_out: Iterable[str] = (),
) -> Iterator[tuple[str, Build]]:
    """The precisions that the target runs natively, and fp32, but for those `left_out`; `mixed` ones follow int8."""
    for precision in ("int8", "fp16", "fp32"):
        if precision in (*request.profile.native_precisions, "fp32") and precision not in left_out:
            yield precision, partial(_build, request, graphs, precision, quantise)
            if precision == "int8":
                yield from mixed(search)


def _doubled(first: int, nodes: int, request: Request) -> Iterator[int]:
    """`first`, twice that, ...: up to half of the `nodes`, or a quarter where all in fp16 would be smaller than more."""
    count = first
    while count <= nodes // (4 if "fp16" in request.profile.native_precisions else 2):
        yield count
        count *= 2


def _mixed_name(count: int) -> str:
    return f"int8, {count} {'node' if count == 1 else 'nodes'} in fp32"


def _count_nodes(path: Path) -> int:
    """How many convolutions and products static int8 can quantise."""
    import onnx

    return sum(node.op_type in ("Conv", "Gemm") for node in onnx.load(path, load_external_data=False).graph.node)


def _climb(
    request: Request,
    task: str,
    rungs: Callable[[Search], Rungs],
    measure: Measure,
    journal: Journal,
    folder: Path,
    *,
    counted: Mapping[str, int] | None = None,
) -> Found:
    """Try the rungs in turn until one is within the bounds."""
    bounds = request.profile.gate_bounds(task, AUTO)
    search = Search(bounds, folder, journal, request.progress, counted=counted or {})
    for name, build in rungs(search):
        try:
            if not search.attempt(name, build, measure).refused:
                break
        except ExportError as error:
            if name != "fp16":
                raise
            request.progress(f"fp16 is left out: {error}")
    return search.found()
