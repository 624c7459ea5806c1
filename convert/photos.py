"""The photos that calibrate an image classifier and those that judge it: never the same ones.

They are the user's (a folder or a .npz file) or those that scikit-image, which the extra [convert] brings, carries.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_convert.convert.graph_tools import spread
from edge_convert.convert.npz import read_array
from edge_convert.runtime.errors import ConversionError, UsageError
from edge_convert.wrappers.image import ImageLike

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
FRAMES = "frames"  # the array of a .npz file
MIN_PHOTOS = 8
MAX_PHOTOS = 384  # read of a folder or file, evenly spread
_JUDGE_EVERY = 3  # the third, sixth, ... by name is held out of calibration
_PACKAGE = "scikit-image"
_FOLDER = "skimage/data"
_CALIBRATING = (
    "astronaut.png", "camera.png", "clock_motion.png", "coins.png", "hubble_deep_field.jpg", "ihc.png", "moon.png",
    "motorcycle_left.png", "retina.jpg",
)  # fmt: skip
_JUDGING = ("chelsea.png", "coffee.png", "rocket.jpg")


@dataclass(frozen=True, slots=True)
class Photos:
    """Photos that calibrate, photos that judge, where they are from, and SHA-256 of each that calibrates.

    A photo is a path or a uint8 array (H, W, 3).
    """

    calibrating: tuple[ImageLike, ...] = ()
    judging: tuple[ImageLike, ...] = ()
    origin: str = ""
    digests: tuple[str, ...] = ()
    samples: bool = False  # not the user's


def read_photos(calibration: Path | None) -> Photos:
    """The photos of a folder, of a .npz file (uint8 `frames` (N, H, W, 3)), or the samples if `calibration` is None.

    Of a folder or file at most `MAX_PHOTOS` are taken, equal ones once, and every third by name or position judges.
    Without the package of the samples there are none. Raises ConversionError for fewer than `MIN_PHOTOS`, for a
    path that does not exist and for an array of another kind.
    """
    if calibration is None:
        return _samples()
    found: list[tuple[ImageLike, str]]
    if calibration.is_dir():
        files = sorted(path for path in calibration.iterdir() if path.suffix.lower() in SUFFIXES)
        found = [(path, _digest(_bytes(path))) for path in spread(files, MAX_PHOTOS)]
        origin, kind = f"the photos in {calibration.name}", f"different images ({', '.join(SUFFIXES)})"
    else:
        frames = _read_frames(calibration)
        found = [(frame, _digest(np.ascontiguousarray(frame).data)) for frame in spread(list(frames), MAX_PHOTOS)]
        origin, kind = f"the frames of {calibration.name}", "different frames"
    unique = list({digest: (photo, digest) for photo, digest in found}.values())
    if len(unique) < MIN_PHOTOS:
        raise ConversionError(
            f"--calibration {calibration} has {len(unique)} {kind}, and at least {MIN_PHOTOS} are needed. Add photos like "
            "those the camera will see, or leave the option out to use the samples."
        )
    calibrating = [pair for index, pair in enumerate(unique, start=1) if index % _JUDGE_EVERY]
    return Photos(
        tuple(photo for photo, _ in calibrating),
        tuple(photo for photo, _ in unique[_JUDGE_EVERY - 1 :: _JUDGE_EVERY]),
        origin,
        tuple(digest for _, digest in calibrating),
    )


def need_photos(calibration: Path | None) -> Photos:
    """`read_photos`; UsageError if there are none because the package of the samples is missing."""
    photos = read_photos(calibration)
    if not photos.calibrating:
        raise UsageError(
            "int8 of an image classifier needs photos to measure its activations. Pass --calibration DIR, or install "
            f"the samples: pip install {_PACKAGE}."
        )
    return photos


def check_photos(photos: Photos) -> None:
    """Raise ConversionError, naming the file, if one of the photos is no picture; only its head is read."""
    import PIL.Image

    for photo in (*photos.calibrating, *photos.judging):
        if not isinstance(photo, Path):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
                PIL.Image.open(photo).close()
        except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
            raise ConversionError(
                f"The photo {photo.name} cannot be opened as a picture ({error}). Remove or replace it."
            ) from error


def photo_name(photo: ImageLike) -> str:
    """What to call a photo in a message."""
    return photo.name if isinstance(photo, Path) else "a frame"


def _samples() -> Photos:
    try:
        package = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError:
        return Photos()

    def existing(names: Iterable[str]) -> tuple[Path, ...]:
        paths = (Path(str(package.locate_file(f"{_FOLDER}/{name}"))) for name in names)
        return tuple(path for path in paths if path.is_file())

    calibrating = existing(_CALIBRATING)
    digests = tuple(_digest(_bytes(path)) for path in calibrating)
    origin = f"the sample photos of {_PACKAGE} {package.version}"
    return Photos(calibrating, existing(_JUDGING), origin, digests, samples=True)


def _read_frames(path: Path) -> NDArray[np.uint8]:
    """The array `frames` of a .npz file, or its only array; uint8 (N, H, W, 3)."""
    frames = read_array(path, FRAMES, "an array 'frames' of uint8 photos (N, H, W, 3)")
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or min(frames.shape[1:]) < 1:
        raise ConversionError(
            f"The array of {path.name} is {frames.dtype} {frames.shape}, and uint8 photos (N, H, W, 3), as the camera "
            "gives them, are needed."
        )
    return frames


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConversionError(
            f"The photo {path.name} cannot be read: {error.strerror}. Remove it from the folder."
        ) from error


def _digest(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()
