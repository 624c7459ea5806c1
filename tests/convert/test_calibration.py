"""The images that calibrate never judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_convert.convert.calibration import calibration_images, judging_images
from edge_convert.runtime.errors import ConversionError, UsageError


def make_folder(folder: Path, count: int) -> Path:
    folder.mkdir()
    for index in range(count):
        (folder / f"{index:02}.PNG").touch()
    (folder / "notes.md").touch()
    return folder


@pytest.mark.parametrize("count", [8, 9, 10, 31])
def test_every_image_is_used_once(tmp_path: Path, count: int) -> None:
    folder = make_folder(tmp_path / "images", count)
    calibration, judging = calibration_images(folder), judging_images(folder)
    assert not set(calibration) & set(judging)
    assert len(calibration) + len(judging) == count
    assert len(judging) == count // 3


def test_too_few_images(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"has 7 images.*at least 8"):
        calibration_images(make_folder(tmp_path / "images", 7))


def test_no_folder(tmp_path: Path) -> None:
    assert judging_images(None) == []
    with pytest.raises(UsageError, match="--calibration"):
        calibration_images(None)
    with pytest.raises(ConversionError, match="does not exist"):
        judging_images(tmp_path / "nowhere")
