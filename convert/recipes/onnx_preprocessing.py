"""What lies beside an ONNX classifier: preprocessor_config.json, and config.json or labels.txt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_convert.convert.source import read_object
from edge_convert.runtime.errors import ManifestError, SourceError, UnsupportedModelError
from edge_convert.wrappers.image import ImageSettings

FILE = "preprocessor_config.json"
_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
Triple = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class FramePreparation:
    """How a picture becomes the file's input; `mean` and `std` are of pixel values 0..255, per channel."""

    mean: Triple
    std: Triple
    settings: ImageSettings
    warnings: tuple[str, ...] = ()


def read_preparation(path: Path, size: Sequence[int | str | None], *, normalised: bool) -> FramePreparation:
    """Read preprocessor_config.json beside the ONNX file at `path`.

    Args:
        path: The ONNX file.
        size: Height and width of its input; a name or None where they are free.
        normalised: Whether the file takes raw pixels, so that it needs no mean and std.

    Raises SourceError if something needed is not said there, UnsupportedModelError if it cannot be done.
    """
    config = read_object(path.parent / FILE)
    if not config and not normalised:
        raise SourceError(
            f"{FILE} must lie beside {path.name}: it says how pixels are normalised. Put one there with mean and std "
            "(of pixel values 0..255), or the one of the original model."
        )
    try:
        mean, std = ((0.0,) * 3, (1.0,) * 3) if normalised else _normalisation(config)
        settings, warnings = _settings(config, path.name, size)
    except (KeyError, TypeError, ValueError, ManifestError) as error:
        if isinstance(error, SourceError | UnsupportedModelError):
            raise
        raise SourceError(f"{FILE} beside {path.name} cannot be used: {error}") from error
    return FramePreparation(mean, std, settings, warnings)


def read_labels(path: Path, classes: int) -> tuple[str, ...] | None:
    """Class names from labels.txt or config.json's id2label beside the file, or None; one per class."""
    file = path.parent / "labels.txt"
    if file.is_file():
        labels = file.read_text("utf-8").splitlines()
    else:
        table = read_object(path.parent / "config.json").get("id2label") or {}
        try:
            numbered = {int(key): value for key, value in table.items()}
            labels = [str(numbered[index]) for index in range(len(numbered))]
        except (AttributeError, KeyError, ValueError) as error:
            raise SourceError(
                f"id2label in config.json beside {path.name} does not count from 0. Correct it."
            ) from error
    if not labels:
        return None
    if len(labels) != classes:
        raise SourceError(
            f"{path.name} has {classes} classes, and {len(labels)} labels lie beside it. Correct labels.txt or id2label."
        )
    return tuple(" ".join(label.split()) for label in labels)


def _normalisation(config: dict[str, Any]) -> tuple[Triple, Triple]:
    """Mean and std of pixel values 0..255."""
    if config.get("rescale_offset"):
        raise UnsupportedModelError(f"rescale_offset in {FILE} is not supported. Write mean and std of pixels 0..255.")
    if "mean" in config and "std" in config:
        factor, mean, std = 1.0, _three(config["mean"]), _three(config["std"])
    else:
        normalise = config.get("do_normalize", True)
        if normalise and not {"image_mean", "image_std"} <= set(config):
            raise SourceError(
                f"{FILE} has neither mean and std nor image_mean and image_std. Add them (mean and std are of pixel "
                "values 0..255)."
            )
        mean = _three(config["image_mean"]) if normalise else np.zeros(3)
        std = _three(config["image_std"]) if normalise else np.ones(3)
        factor = float(config.get("rescale_factor") or (1.0 if mean.max() > 1 else 1 / 255))
        if config.get("do_rescale") is False:
            factor = 1.0
    if factor <= 0 or std.min() <= 0:
        raise SourceError(f"{FILE} has a std or rescale_factor that is not positive. Correct it.")
    first, second = (mean / factor).tolist(), (std / factor).tolist()
    return (first[0], first[1], first[2]), (second[0], second[1], second[2])


def _three(value: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    numbers = np.asarray([value] * 3 if isinstance(value, int | float) else value, np.float64)
    if numbers.shape != (3,) or not np.isfinite(numbers).all():
        raise ValueError(f"a mean or std must be one number or three; found {value!r}.")
    return numbers


def _settings(
    config: dict[str, Any], name: str, graph: Sequence[int | str | None]
) -> tuple[ImageSettings, tuple[str, ...]]:
    """Size, resize and interpolation; the graph's own size is the last word."""
    size = config.get("size")
    wanted = _pair(config.get("crop_size")) if config.get("do_center_crop", True) else None
    wanted = wanted or _pair(size) or _pair(config if {"height", "width"} <= set(config) else None)
    own = (graph[0], graph[1])
    if isinstance(own[0], int) and isinstance(own[1], int):
        height, width = own[0], own[1]
        if wanted and wanted != (height, width):
            raise SourceError(
                f"{FILE} asks for {wanted[0]}x{wanted[1]} pixels, and {name} takes {height}x{width}. Correct the file."
            )
    elif wanted:
        height, width = wanted
    else:
        raise SourceError(f"Neither {name} nor {FILE} says the height and width of a frame. Add crop_size there.")
    short = config.get("resize_short_px")
    warnings: tuple[str, ...] = ()
    if short is None and isinstance(size, dict) and "shortest_edge" in size:
        short = size["shortest_edge"]
    elif short is None and isinstance(size, int):
        short = size
    elif short is None and isinstance(size, dict) and {"height", "width"} <= set(size):
        short = max(_pair(size) or (0, 0))
        warnings = (f"{FILE} squeezes pictures to the frame; here their shorter side is resized and the centre cut.",)
    short = max(height, width) if short is None else round(float(short) / float(config.get("crop_pct") or 1))
    resample = config.get("resample", 2)
    if resample not in _RESAMPLING:
        raise UnsupportedModelError(f"resample {resample!r} in {FILE} is not supported; use one of 0, 1, 2, 3.")
    flipped = bool(config.get("do_flip_channel_order"))
    settings = ImageSettings(
        height=height,
        width=width,
        resize_short_px=int(short),
        interpolation=str(config.get("interpolation") or _RESAMPLING[resample]),
        channel_order=str(config.get("channel_order") or ("BGR" if flipped else "RGB")),
    )
    return settings, warnings


def _pair(value: Any) -> tuple[int, int] | None:
    """(height, width) of a crop_size or size entry, or None if it says another thing."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, dict) and {"height", "width"} <= set(value):
        return int(value["height"]), int(value["width"])
    return None
