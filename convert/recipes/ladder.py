"""`--precision auto` of encoders and classifiers: int8, fp16 and fp32 in turn, as far as the target runs them.

Each is measured against the original on calibration inputs, on the CPU whatever the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from edge_convert.convert.calibration_texts import calibration_texts
from edge_convert.convert.graph_tools import cpu_session
from edge_convert.convert.photos import read_photos
from edge_convert.convert.recipe import Found, Request
from edge_convert.convert.search import Build, Graphs, Measure, Search, open_journal
from edge_convert.runtime.errors import ExportError
from edge_convert.runtime.manifest import AUTO
from edge_convert.runtime.threads import available_cpus
from edge_convert.validate import metrics
from edge_convert.validate.golden import synthetic_image
from edge_convert.validate.runner import ClassifierReference, EmbedderReference, Reference
from edge_convert.validate.suites_image import crops, in_batches

Quantise = Callable[[Request, Graphs, Path], Graphs]
_RUNGS = ("int8", "fp16", "fp32")
_MAX_PHOTOS = 16


def search_encoder(
    request: Request, graphs: Graphs, reference: Reference, folder: Path, *, quantise: Quantise
) -> Found:
    """The cheapest precision of a sentence embedder; measured by the cosines of calibration texts."""
    original = cast("EmbedderReference", reference)
    texts = calibration_texts(request.calibration)
    ids = [np.asarray(original.tokenize(text), np.int64)[None] for text in texts]
    expected = np.asarray(original.embed(texts))

    def measure(built: Graphs) -> dict[str, float]:
        session = cpu_session(built["encoder"].path, threads=available_cpus())
        names = {item.name for item in session.get_inputs()}
        found = []
        for row in ids:
            feed = {"input_ids": row, "attention_mask": np.ones_like(row), "token_type_ids": np.zeros_like(row)}
            found.append(session.run(None, {name: feed[name] for name in names})[0][0])
        cosines = metrics.cosine(expected, np.stack(found))
        return {"cosine_mean": float(cosines.mean()), "cosine_min": float(cosines.min())}

    return _climb(request, "feature-extraction", _rungs(request, quantise, graphs), measure, texts, folder)


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

    rungs = _rungs(request, quantise, graphs)
    if not photos.calibrating:
        rungs.pop("int8", None)
    return _climb(request, "image-classification", rungs, measure, photos.digests, folder)


def _rungs(request: Request, quantise: Quantise, graphs: Graphs) -> dict[str, Build]:
    """How to build each precision that the target runs natively, and fp32."""

    def build(precision: str) -> Build:
        return lambda place: quantise(replace(request, precision=precision), graphs, place)

    return {name: build(name) for name in _RUNGS if name in (*request.profile.native_precisions, "fp32")}


def _climb(
    request: Request, task: str, rungs: dict[str, Build], measure: Measure, inputs: Sequence[str], folder: Path
) -> Found:
    journal = open_journal(request, task, list(inputs))
    search = Search(request.profile.gate_bounds(task, AUTO), folder, journal, request.progress)
    for name, build in rungs.items():
        try:
            if not search.attempt(name, build, measure).refused:
                break
        except ExportError as error:
            if name != "fp16":
                raise
            request.progress(f"fp16 is left out: {error}")
    return search.found()
