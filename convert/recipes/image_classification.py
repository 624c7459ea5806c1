"""Image classifiers from `module:factory`: uint8 camera frames in, logits out, normalisation in the graph.

The factory returns an `nn.Module` that reads float32 (N, 3, H, W) and has the attribute `edge_convert`, a
dict: `mean` and `std` (of pixel values 0..255, one number or three), `height`, `width`, and if wished
`labels` (list of names or None), `resize_short_px`, `interpolation`, `channel_order`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_convert.convert.fp16 import to_float16
from edge_convert.convert.graph_tools import Feed, spread
from edge_convert.convert.interrupt import raise_if_disk_full, raise_if_interrupted
from edge_convert.convert.photos import check_photos, need_photos, photo_name, read_photos
from edge_convert.convert.quantize import fold_constants, quantise_static
from edge_convert.convert.recipe import Exported, Recipe, Request
from edge_convert.convert.recipes.ladder import search_classifier
from edge_convert.convert.source import load_factory
from edge_convert.runtime.errors import ConversionError, ExportError, InputError, ManifestError, UnsupportedModelError
from edge_convert.validate.golden import synthetic_image
from edge_convert.wrappers.image import ImageLike, ImageSettings, load_image, preprocess

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

FILE = "classifier.onnx"
LABELS_FILE = "labels.txt"
MAX_CALIBRATION_FRAMES = 256
_FLOAT16_PHOTOS = 6
_ZOOMS = (1.0, 1.4)  # calibration also sees each photo closer and mirrored
_REQUIRED = ("mean", "std", "height", "width")
_OPTIONAL = ("labels", "resize_short_px", "interpolation", "channel_order")


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """What the module's `edge_convert` says; `mean` and `std` are of pixel values 0..255, per channel."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    labels: tuple[str, ...] | None
    settings: ImageSettings


def read_preprocessing(module: Any, name: str) -> Preprocessing:
    """Parse `module.edge_convert`; raises UnsupportedModelError saying what is wrong."""
    found = getattr(module, "edge_convert", None)
    if not isinstance(found, dict):
        raise UnsupportedModelError(
            f"The module of {name} has no attribute 'edge_convert' saying how frames are prepared. "
            f"Set it to a dict with {', '.join(_REQUIRED)}."
        )
    missing = [key for key in _REQUIRED if key not in found]
    unknown = sorted(set(found) - {*_REQUIRED, *_OPTIONAL})
    if missing or unknown:
        raise UnsupportedModelError(
            f"edge_convert of {name} "
            + (f"lacks {missing[0]!r}" if missing else f"has the unknown key {unknown[0]!r}")
            + f"; it needs {', '.join(_REQUIRED)} and may have {', '.join(_OPTIONAL)}."
        )
    labels = found.get("labels")
    try:
        height, width = int(found["height"]), int(found["width"])
        settings = ImageSettings(
            height=height,
            width=width,
            resize_short_px=int(found.get("resize_short_px") or max(height, width)),
            interpolation=str(found.get("interpolation") or "bicubic"),
            channel_order=str(found.get("channel_order") or "RGB"),
            labels=LABELS_FILE if labels else None,
        )
        mean, std = (_three(found[key], key) for key in ("mean", "std"))
    except (TypeError, ValueError, ManifestError) as error:
        raise UnsupportedModelError(f"edge_convert of {name} cannot be used: {error}") from error
    if min(std) <= 0:
        raise UnsupportedModelError(f"edge_convert of {name} has a std that is not positive. Correct it.")
    clean = tuple(" ".join(str(label).split()) for label in labels) if labels else None
    return Preprocessing(mean, std, clean, settings)


def export(request: Request, folder: Path) -> dict[str, Exported]:
    """Write the fp32 graph with a dynamic batch, batch norms and paddings folded into the convolutions."""
    import torch

    module, preparation = _load(request)
    settings = preparation.settings
    frames = torch.zeros((2, settings.height, settings.width, 3), dtype=torch.uint8)
    raw, path = folder / f"raw_{FILE}", folder / FILE
    try:
        torch.onnx.export(
            module,
            (frames,),
            raw,
            dynamo=True,
            opset_version=min(request.profile.opset_max, 21),
            external_data=False,
            input_names=["frames"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )
    except torch.onnx.OnnxExporterError as error:
        raise_if_interrupted(error)
        raise_if_disk_full(error)
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        raise ExportError(f"{request.source.name} could not be exported: {reason[:200]}") from error
    fold_constants(raw, path)
    raw.unlink()
    return {"classifier": Exported(path)}


def quantise(
    request: Request, graphs: dict[str, Exported], folder: Path, *, fp32_nodes: int = 0
) -> dict[str, Exported]:
    """Write the graph at the asked precision; int8 is static, calibrated on photos, with `fp32_nodes` nodes or more left
    in fp32."""
    if request.precision == "fp32":
        return graphs
    source, settings = graphs["classifier"].path, _load(request)[1].settings
    return {"classifier": quantise_frames(request, source, settings, folder, fp32_nodes=fp32_nodes)}


def quantise_frames(
    request: Request, source: Path, settings: ImageSettings, folder: Path, *, fp32_nodes: int = 0
) -> Exported:
    """Write the fp32 graph `source`, which reads frames, in fp16 or int8 into `folder`; at least `fp32_nodes` of int8's
    costliest nodes stay in fp32."""
    path = folder / FILE
    if request.precision == "fp16":
        to_float16(source, path, feeds=float16_feeds(request.calibration, settings))
        return Exported(path)
    photos = need_photos(request.calibration)
    request.progress(f"calibrating on {len(photos.calibrating)} of {photos.origin}")
    feeds = frame_feeds(photos.calibrating, settings)
    reduce_range = request.profile.reduce_range
    return Exported(
        path, measured=quantise_static(source, path, feeds, fp32_nodes=fp32_nodes, reduce_range=reduce_range)
    )


def package(request: Request, folder: Path) -> dict[str, Any]:
    """Write labels.txt if the module has labels, and return the wrapper's settings."""
    _, preparation = _load(request)
    if preparation.labels is not None:
        (folder / LABELS_FILE).write_text("\n".join(preparation.labels) + "\n", "utf-8")
    return asdict(preparation.settings)


class OriginalClassifier:
    """The original module in fp32: a ClassifierReference."""

    def __init__(self, name: str, module: torch.nn.Module, settings: ImageSettings) -> None:
        self.name = name
        self._module = module
        self._settings = settings

    def logits(self, frames: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Float32 (N, classes) of uint8 frames (N, H, W, 3)."""
        import torch

        rows = []
        with torch.inference_mode():
            for frame in frames:
                rows.append(self._module(torch.from_numpy(np.ascontiguousarray(frame))[None])[0].numpy())
        return np.stack(rows).astype(np.float32)

    def preprocess(self, image: Image) -> NDArray[np.uint8]:
        """The reference recipe in plain PIL: shorter side to `resize_short_px`, centre crop; uint8 (H, W, 3)."""
        import PIL.Image

        settings = self._settings
        image = image.convert("RGB")
        factor = settings.resize_short_px / min(image.size)
        image = image.resize(
            (round(image.width * factor), round(image.height * factor)),
            PIL.Image.Resampling[settings.interpolation.upper()],
        )
        left, top = (image.width - settings.width) // 2, (image.height - settings.height) // 2
        pixels = np.asarray(image.crop((left, top, left + settings.width, top + settings.height)))
        return pixels[:, :, ::-1].copy() if settings.channel_order == "BGR" else pixels.copy()


def reference(request: Request) -> OriginalClassifier:
    """The original module with its normalisation, in fp32."""
    module, preparation = _load(request)
    return OriginalClassifier(request.source.name, module, preparation.settings)


def _three(value: Any, key: str) -> tuple[float, float, float]:
    numbers = [float(item) for item in value] if isinstance(value, (list, tuple)) else [float(value)] * 3
    if len(numbers) != 3 or not np.isfinite(numbers).all():
        raise ValueError(f"{key} must be one number or three; found {value!r}.")
    return (numbers[0], numbers[1], numbers[2])


def _load(request: Request) -> tuple[torch.nn.Module, Preprocessing]:
    """The factory's module behind its normalisation, uint8 frames in, and its preprocessing."""
    import torch

    source = request.source
    if source.kind != "module":
        raise UnsupportedModelError(
            f"image-classification needs module:factory; {source.name} is of kind {source.kind!r}. "
            "Write a function that returns the torch.nn.Module."
        )
    factory = load_factory(source.location)
    try:
        network = factory()
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ConversionError(f"Calling {source.location} failed: {type(error).__name__}: {reason[:200]}") from error
    if not isinstance(network, torch.nn.Module):
        raise UnsupportedModelError(f"{source.location} returned {type(network).__name__}, not a torch.nn.Module.")
    preparation = read_preprocessing(network, source.name)

    class FrameClassifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network
            scale = 1 / torch.tensor(preparation.std)
            self.scale: torch.Tensor
            self.shift: torch.Tensor
            self.register_buffer("scale", scale.view(1, 3, 1, 1))
            self.register_buffer("shift", (-torch.tensor(preparation.mean) * scale).view(1, 3, 1, 1))

        def forward(self, frames: torch.Tensor) -> torch.Tensor:
            pixels = frames.permute(0, 3, 1, 2).to(torch.float32)
            logits: torch.Tensor = self.network(pixels * self.scale + self.shift)
            return logits

    return FrameClassifier().eval().float(), preparation


def frame_feeds(photos: Sequence[ImageLike], settings: ImageSettings) -> Iterator[Feed]:
    """Frames (1, H, W, 3) of the photos: whole, closer, and mirrored; at most MAX_CALIBRATION_FRAMES."""
    views = itertools.product(_ZOOMS, (False, True), photos)
    for zoom, mirrored, photo in itertools.islice(views, MAX_CALIBRATION_FRAMES):
        try:
            image = load_image(photo)
            width, height = (max(round(side / zoom), 1) for side in image.size)
            left, top = (image.width - width) // 2, (image.height - height) // 2
            frame = preprocess(image.crop((left, top, left + width, top + height)), settings)
        except InputError as error:
            raise ConversionError(f"Calibration stopped at {photo_name(photo)}: {error}") from error
        yield {"frames": np.ascontiguousarray(frame[:, ::-1] if mirrored else frame)[None]}


def float16_feeds(calibration: Path | None, settings: ImageSettings) -> list[Feed]:
    """Frames (1, H, W, 3) that fp16 is measured on: photos that calibrate, else a drawn picture and noise."""
    photos = read_photos(calibration).calibrating
    if photos:
        return list(frame_feeds(spread(photos, _FLOAT16_PHOTOS), settings))
    drawn = preprocess(load_image(synthetic_image()), settings)
    noise = np.random.default_rng(0).integers(0, 256, (2, *drawn.shape), np.uint8)
    return [{"frames": np.ascontiguousarray(frame)[None]} for frame in (drawn, drawn[:, ::-1], *noise)]


def check(request: Request) -> tuple[str, ...]:
    """The photos must be usable before the export starts; a warning if they are not the user's."""
    photos = need_photos(request.calibration) if request.precision == "int8" else read_photos(request.calibration)
    check_photos(photos)
    if not photos.samples:
        return ()
    return (
        f"Calibrated and judged on {photos.origin}. Give photos of your own camera to trust it: --calibration DIR.",
    )


RECIPE = Recipe(
    task="image-classification",
    precisions=("fp32", "fp16", "int8"),
    export=export,
    quantise=quantise,
    search=partial(search_classifier, quantise=quantise),
    package=package,
    reference=reference,
    check=check,
)
