"""The photos that calibrate never judge, wherever they are from."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_convert.convert.photos import check_photos, need_photos, read_photos
from edge_convert.runtime.errors import ConversionError, UsageError

RNG = np.random.default_rng(0)


def make_folder(folder: Path, count: int) -> Path:
    folder.mkdir()
    for index in range(count):
        Image.fromarray(RNG.integers(0, 256, (6, 8, 3), np.uint8)).save(folder / f"{index:02}.PNG")
    (folder / "notes.md").touch()
    return folder


@pytest.mark.parametrize("count", [8, 9, 10, 31])
def test_every_photo_of_a_folder_is_used_once(tmp_path: Path, count: int) -> None:
    photos = read_photos(make_folder(tmp_path / "images", count))
    assert not set(photos.calibrating) & set(photos.judging)
    assert len(photos.calibrating) + len(photos.judging) == count
    assert len(photos.judging) == count // 3
    assert not photos.samples


def test_a_copy_of_a_photo_that_calibrates_does_not_judge(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "images", 9)
    for path in list(folder.glob("*.PNG")):
        (folder / f"{path.stem}-copy.png").write_bytes(path.read_bytes())
    photos = read_photos(folder)
    contents = [{path.read_bytes() for path in paths} for paths in (photos.calibrating, photos.judging)]
    assert not contents[0] & contents[1]
    assert len(contents[0]) + len(contents[1]) == 9


def test_frames_of_an_npz_file(tmp_path: Path) -> None:
    frames = RNG.integers(0, 256, (9, 4, 6, 3), np.uint8)
    for names in ({"frames": frames}, {"anything": frames}, {"frames": frames, "labels": np.arange(9)}):
        np.savez(tmp_path / "calibration.npz", **names)
        photos = read_photos(tmp_path / "calibration.npz")
        np.testing.assert_array_equal(np.stack(photos.judging), frames[[2, 5, 8]])
        np.testing.assert_array_equal(np.stack(photos.calibrating), frames[[0, 1, 3, 4, 6, 7]])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"frames": np.zeros((9, 4, 6, 3), np.float32)}, "is float32"),
        ({"frames": np.zeros((9, 3, 4, 6), np.uint8)}, r"\(9, 3, 4, 6\)"),
        ({"frames": np.zeros((9, 4, 6, 3), np.uint8)}, "1 different frames"),
        ({"frames": np.zeros((0, 4, 6, 3), np.uint8)}, "0 different frames"),
        ({"a": np.zeros(2), "b": np.zeros(2)}, "has the arrays a, b"),
        ({"frames": np.array([{}], dtype=object)}, "cannot be read"),
    ],
)
def test_bad_arrays_are_explained(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "calibration.npz", **arrays)
    with pytest.raises(ConversionError, match=message):
        read_photos(tmp_path / "calibration.npz")


@pytest.mark.parametrize("content", [b"", b"no zip file", b"PK\x03\x04 cut off"])
def test_a_broken_npz_file_is_explained(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "calibration.npz"
    path.write_bytes(content)
    with pytest.raises(ConversionError, match=r"calibration\.npz"):
        read_photos(path)
    with pytest.raises(ConversionError, match="does not exist"):
        read_photos(tmp_path / "gone")


@pytest.mark.parametrize("count", [0, 7])
def test_too_few_photos(tmp_path: Path, count: int) -> None:
    with pytest.raises(ConversionError, match=rf"has {count} different images.*at least 8"):
        read_photos(make_folder(tmp_path / "images", count))


def test_a_broken_photo_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "images", 9)
    check_photos(read_photos(folder))
    (folder / "04.PNG").write_bytes(b"no picture")
    with pytest.raises(ConversionError, match=r"04\.PNG cannot be opened"):
        check_photos(read_photos(folder))


def test_the_samples_are_pictures_and_calibrate_or_judge() -> None:
    photos = read_photos(None)
    check_photos(photos)
    assert photos.samples
    assert (len(photos.calibrating), len(photos.judging)) == (9, 3)
    assert not {path.name for path in photos.calibrating} & {path.name for path in photos.judging}


def test_without_the_package_there_are_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    assert read_photos(None).judging == ()
    with pytest.raises(UsageError, match=r"--calibration DIR.*scikit-image"):
        need_photos(None)
