"""Images in, class labels out; the resize and crop here are exactly those of the reference recipe."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge_convert.runtime.bundle import Bundle
from edge_convert.runtime.device import DeviceProfile
from edge_convert.runtime.errors import FeedError, InputError, ManifestError, UsageError, shown
from edge_convert.runtime.manifest import GraphSpec
from edge_convert.runtime.session import Session
from edge_convert.runtime.strict import parse

if TYPE_CHECKING:
    from PIL.Image import Image

TASK = "image-classification"
_MAX_SIDE_PX = 1 << 14
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
ImageLike: TypeAlias = "str | Path | NDArray[Any] | Image"


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """`Manifest.processing` of an image-classification bundle; sizes in pixels."""

    height: int
    width: int
    resize_short_px: int
    interpolation: str = "bicubic"
    channel_order: str = "RGB"
    crop: str = "center"
    labels: str | None = None

    def __post_init__(self) -> None:
        if min(self.height, self.width) < 1 or self.resize_short_px < max(self.height, self.width):
            raise ManifestError(
                f"resize_short_px {self.resize_short_px} is smaller than the crop {self.height}x{self.width}, or a "
                "size is not positive. Correct the model's preprocessing settings."
            )
        if self.resize_short_px > _MAX_SIDE_PX:
            raise ManifestError(
                f"resize_short_px is {shown(self.resize_short_px)}, and at most {_MAX_SIDE_PX} is possible. "
                "Correct the model's preprocessing settings."
            )
        for name, value, known in (
            ("interpolation", self.interpolation, INTERPOLATIONS),
            ("channel_order", self.channel_order, ("RGB", "BGR")),
            ("crop", self.crop, ("center",)),
        ):
            if value not in known:
                raise ManifestError(f"The unknown {name} {shown(value)} is in the settings; known: {', '.join(known)}.")

    @classmethod
    def from_processing(cls, processing: dict[str, Any]) -> ImageSettings:
        """Parse strictly; raises ManifestError that names the key."""
        settings: ImageSettings = parse(cls, processing, "processing")
        return settings

    def check_graph(self, spec: GraphSpec, labels: Sequence[str] | None) -> None:
        """Raise ManifestError unless the graph takes these frames and gives one score for each label."""
        frames = next((tensor.shape for tensor in spec.inputs if tensor.name == "frames"), ())
        logits = next((tensor.shape for tensor in spec.outputs if tensor.name == "logits"), ())
        wanted = (self.height, self.width, 3)
        fixed = zip(frames[1:], wanted, strict=False)
        if len(frames) != 4 or len(logits) != 2 or any(isinstance(dim, int) and dim != size for dim, size in fixed):
            raise ManifestError(
                f"The graph does not take frames of {self.height}x{self.width}x3 as the processing settings in "
                "manifest.json say, or gives no logits. Convert the model again."
            )
        if labels is not None and isinstance(logits[1], int) and len(labels) != logits[1]:
            raise ManifestError(
                f"The bundle has {len(labels)} labels, and the graph gives {logits[1]} scores. Correct the labels and convert again."
            )


@dataclass(frozen=True, slots=True)
class Label:
    """One class with its softmax probability (0 to 1)."""

    name: str
    index: int
    probability: float


def load_image(image: ImageLike) -> Image:
    """`image` as an RGB picture: a path, a PIL image, or an array (H, W), (H, W, 1|3|4) of uint8, uint16, bool or
    float in 0..1. Transparency is laid on black; a camera's EXIF rotation is applied. Raises InputError.
    """
    import PIL.Image
    from PIL import ImageOps, UnidentifiedImageError

    if isinstance(image, np.ndarray):
        return PIL.Image.fromarray(_array_to_rgb8(image))
    if isinstance(image, (str, Path)):
        try:
            with warnings.catch_warnings():
                # Pillow warns on stderr from a half of what it refuses; between the two a picture is simply large.
                warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
                opened = PIL.Image.open(image)
            with opened:
                opened.load()
                return load_image(opened)
        except (PIL.Image.DecompressionBombError, MemoryError) as error:
            raise InputError(
                f"{Path(image).name} has too many pixels to be opened safely ({_first_line(error)}). "
                "Give a smaller picture."
            ) from error
        except UnidentifiedImageError as error:
            raise InputError(f"{image} is not an image. Give a PNG, JPEG, BMP or WebP file.") from error
        except (OSError, SyntaxError, ValueError) as error:
            raise InputError(
                f"{image} cannot be read as an image ({_first_line(error)}). Give a PNG, JPEG, BMP or WebP file."
            ) from error
    if not isinstance(image, PIL.Image.Image):
        raise InputError(f"An image must be a path, an array or a PIL image; found {type(image).__name__}.")
    if min(image.size) < 1:
        raise InputError(f"The image has no pixels ({image.width}x{image.height}). Check the camera or the file.")
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):
        return PIL.Image.fromarray(_array_to_rgb8(_deep_grey(np.asarray(image))))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        black = PIL.Image.new("RGBA", layer.size, (0, 0, 0, 255))
        return PIL.Image.alpha_composite(black, layer).convert("RGB")
    return image.convert("RGB")


def preprocess(image: ImageLike, settings: ImageSettings) -> NDArray[np.uint8]:
    """Resize the shorter side, cut the centre: uint8 (H, W, 3). Normalisation is inside the graph."""
    import PIL.Image

    picture = load_image(image)
    scale = settings.resize_short_px / min(picture.size)
    size = (max(round(picture.width * scale), settings.width), max(round(picture.height * scale), settings.height))
    if max(size) > 100 * settings.resize_short_px:
        raise InputError(
            f"The image is {picture.width}x{picture.height}, too long and thin to classify. Cut it to a usual shape."
        )
    resized = picture.resize(size, PIL.Image.Resampling[settings.interpolation.upper()])
    left, top = (size[0] - settings.width) // 2, (size[1] - settings.height) // 2
    cropped = np.asarray(resized.crop((left, top, left + settings.width, top + settings.height)), np.uint8)
    return np.ascontiguousarray(cropped[:, :, ::-1] if settings.channel_order == "BGR" else cropped)


class ImageClassifier:
    """One classification bundle, ready to run.

    >>> classifier = ImageClassifier.load("efficientnet-cpu-int8")  # doctest: +SKIP
    >>> classifier.classify("cat.jpg", top_k=1)[0][0].name  # doctest: +SKIP
    'tiger cat'
    """

    def __init__(self, session: Session, settings: ImageSettings, labels: Sequence[str] | None) -> None:
        self.session = session
        self.settings = settings
        self.labels = None if labels is None else tuple(labels)

    @classmethod
    def load(
        cls, bundle: Bundle | Path | str, *, profile: DeviceProfile | None = None, threads: int | None = None
    ) -> ImageClassifier:
        """Open an image-classification bundle; `profile` overrides where it runs."""
        if not isinstance(bundle, Bundle):
            bundle = Bundle.open(bundle)
        if bundle.manifest.task != TASK:
            raise UsageError(
                f"The bundle's task is {bundle.manifest.task}, and ImageClassifier runs {TASK}. Use its own wrapper."
            )
        settings = ImageSettings.from_processing(bundle.manifest.processing)
        labels = None
        if settings.labels is not None:
            labels = bundle.read_text(settings.labels).splitlines()
        session = bundle.session("classifier", profile=profile, threads=threads)
        settings.check_graph(session.spec, labels)
        return cls(session, settings, labels)

    def preprocess(self, image: ImageLike) -> NDArray[np.uint8]:
        """`preprocess` with this bundle's settings: uint8 (H, W, 3)."""
        return preprocess(image, self.settings)

    def logits(self, frames: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Scores before softmax, float32 (N, classes), of uint8 frames (N, H, W, 3)."""
        if not isinstance(frames, np.ndarray):
            raise FeedError(f"frames must be a NumPy array (N, H, W, 3); found {type(frames).__name__}.")
        if frames.ndim != 4:
            raise FeedError(f"frames must have the shape (N, H, W, 3); found {frames.shape}. Add the batch axis.")
        return np.asarray(self.session.run({"frames": frames})["logits"], np.float32)

    def classify(self, images: ImageLike | Sequence[ImageLike], *, top_k: int = 5) -> list[list[Label]]:
        """The `top_k` most probable classes of each image, best first; a single image gives one list.

        An array of 4 dimensions is a batch of images.
        """
        if not isinstance(top_k, int) or top_k < 1:
            raise UsageError(f"top_k must be a whole number of at least 1; found {shown(top_k)}.")
        if isinstance(images, np.ndarray):
            items: list[Any] = list(images) if images.ndim == 4 else [images]
        else:
            items = list(images) if isinstance(images, (list, tuple)) else [images]
        if not items:
            return []
        return [self._rank(row, top_k) for row in self.logits(np.stack([self.preprocess(item) for item in items]))]

    def _rank(self, logits: NDArray[np.float32], top_k: int) -> list[Label]:
        scores = np.exp(logits.astype(np.float64) - logits.max())
        probabilities = scores / scores.sum()
        best = np.argsort(-probabilities, kind="stable")[:top_k]
        return [Label(self._name(int(index)), int(index), float(probabilities[index])) for index in best]

    def _name(self, index: int) -> str:
        if self.labels is None or index >= len(self.labels):
            return f"class {index}"
        return self.labels[index]


def _array_to_rgb8(array: NDArray[Any]) -> NDArray[np.uint8]:
    """(H, W) or (H, W, 1|3|4) of uint8, uint16, bool or float 0..1 as uint8 (H, W, 3)."""
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        raise InputError(f"An image array must be (H, W) or (H, W, 1|3|4); found the shape {array.shape}.")
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) * 255 + 32767) // 65535
    elif array.dtype == np.bool_:
        array = array * 255
    elif np.issubdtype(array.dtype, np.floating):
        if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
            raise InputError("A float image array must hold finite values from 0 to 1. Scale it, or give uint8.")
        array = np.rint(array * 255)
    elif array.dtype != np.uint8:
        raise InputError(f"An image array must be uint8, uint16, bool or float; found {array.dtype}. Convert it.")
    if array.shape[2] == 4:
        array = np.rint(array[:, :, :3].astype(np.float32) * (array[:, :, 3:].astype(np.float32) / 255))
    if array.shape[2] == 1:
        array = np.repeat(array, 3, axis=2)
    return np.ascontiguousarray(array.astype(np.uint8))


def _deep_grey(array: NDArray[Any]) -> NDArray[Any]:
    """A 16-bit, 32-bit or float grey picture as uint16; values outside 0..65535 are cut."""
    if np.issubdtype(array.dtype, np.floating):
        array = np.nan_to_num(array) * (65535.0 if np.nanmax(array, initial=0.0) <= 1 else 257.0)
    grey: NDArray[np.uint16] = np.clip(array, 0, 65535).astype(np.uint16)
    return grey


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:120]
