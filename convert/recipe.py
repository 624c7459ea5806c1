"""Recipes: how one task becomes graphs, as data, and the one table that names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from edge_convert.convert.source import Source
from edge_convert.runtime.device import DeviceProfile
from edge_convert.runtime.errors import UnknownNameError, UnsupportedModelError
from edge_convert.runtime.manifest import CacheSpec
from edge_convert.validate.runner import Reference

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """One conversion: what, for which device, how precise.

    `calibration` is a folder or .npz file of images or texts, or None; `context_tokens` caps the cache, or None for
    the smaller of the model's and the target's default.
    """

    source: Source
    profile: DeviceProfile
    precision: str
    context_tokens: int | None
    calibration: Path | None
    progress: Progress


@dataclass(frozen=True, slots=True)
class Exported:
    """One graph on disk, for a decoder its cache, and what was measured to write it (plain values, for the manifest)."""

    path: Path
    cache: CacheSpec | None = None
    measured: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search over precisions chose: the graphs, its record for the manifest (plain JSON values), and notes for
    the report."""

    graphs: dict[str, Exported]
    record: dict[str, Any]
    notes: tuple[str, ...] = ()


def nothing_to_check(_: Request, /) -> tuple[str, ...]:
    """No warnings."""
    return ()


@dataclass(frozen=True, slots=True)
class Recipe:
    """The stages of one task; each is a function from values to values.

    `export` writes graphs by role into a folder, `quantise` writes them at the asked precision into
    another, `search` does the same at the cheapest precision whose accuracy is within the target's bounds
    (measured against the original on calibration inputs), `package` writes what the wrapper needs and returns `Manifest.processing`, `reference`
    loads the original in fp32. `check` runs before any of them: it raises for what the user has to change
    and returns warnings, for example of what had to be assumed about the source.
    """

    task: str
    precisions: tuple[str, ...]
    export: Callable[[Request, Path], dict[str, Exported]]
    quantise: Callable[[Request, dict[str, Exported], Path], dict[str, Exported]]
    search: Callable[[Request, dict[str, Exported], Reference, Path], Found]
    package: Callable[[Request, Path], dict[str, Any]]
    reference: Callable[[Request], Reference]
    check: Callable[[Request], tuple[str, ...]] = nothing_to_check


RECIPES = {
    "text-generation": "edge_convert.convert.recipes.text_generation:RECIPE",
    "feature-extraction": "edge_convert.convert.recipes.feature_extraction:RECIPE",
    "image-classification": "edge_convert.convert.recipes.image_classification:RECIPE",
}


ONNX_RECIPES = {
    "feature-extraction": "edge_convert.convert.recipes.onnx_encoder:FEATURE_EXTRACTION",
    "image-classification": "edge_convert.convert.recipes.onnx_classifier:IMAGE_CLASSIFICATION",
}


def find_recipe(task: str, kind: str = "huggingface") -> Recipe:
    """The recipe of `task` for a source of `kind`.

    Raises UnknownNameError with the supported tasks, UnsupportedModelError if `kind` has none for this task.
    """
    if task not in RECIPES:
        raise UnknownNameError("task", task, RECIPES)
    table = ONNX_RECIPES if kind == "onnx" else RECIPES
    if task not in table:
        raise UnsupportedModelError(
            f"{task} is not converted from an ONNX file, whose cache and attention are already fixed. Give the "
            "checkpoint (a Hugging Face folder or hub id) or the GGUF file that it was made from."
        )
    module, _, attribute = table[task].partition(":")
    recipe: Recipe = getattr(import_module(module), attribute)
    return recipe
