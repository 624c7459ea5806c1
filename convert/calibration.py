"""The user's sample images: which ones calibrate and which ones judge. The two never overlap."""

from __future__ import annotations

from pathlib import Path

from edge_convert.runtime.errors import ConversionError, UsageError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
MIN_IMAGES = 8
_JUDGE_EVERY = 3  # the third, sixth, ... image by name is held out of calibration


def image_files(folder: Path) -> list[Path]:
    """The image files directly in `folder`, by name; raises ConversionError if it is no folder."""
    if not folder.is_dir():
        raise ConversionError(f"The calibration folder {folder} does not exist. Pass --calibration DIR with photos.")
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)


def calibration_images(folder: Path | None) -> list[Path]:
    """The images that calibrate; UsageError without a folder, ConversionError below `MIN_IMAGES`."""
    if folder is None:
        raise UsageError(
            "int8 of an image classifier needs sample photos to measure its activations. Pass --calibration DIR."
        )
    files = image_files(folder)
    if len(files) < MIN_IMAGES:
        raise ConversionError(
            f"The calibration folder {folder} has {len(files)} images ({', '.join(SUFFIXES)}), and at least "
            f"{MIN_IMAGES} are needed. Add photos like those the camera will see."
        )
    return [path for index, path in enumerate(files, start=1) if index % _JUDGE_EVERY]


def judging_images(folder: Path | None) -> list[Path]:
    """The images that judge the result: those that never calibrate; empty without a folder."""
    return [] if folder is None else image_files(folder)[_JUDGE_EVERY - 1 :: _JUDGE_EVERY]
