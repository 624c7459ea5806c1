"""The texts that quantisation is measured on: the user's, or those that come with the package.

They never judge a bundle: validation has texts of its own (`validate/texts.txt`).
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from edge_convert.convert.npz import read_array
from edge_convert.convert.recipe import Request
from edge_convert.runtime.errors import ConversionError
from edge_convert.runtime.manifest import AUTO
from edge_convert.validate.texts import unescaped

SUFFIX = ".txt"
_ARRAY = "texts"  # of a .npz file
MIN_TEXTS = 8
_SHORTEST = 20  # characters; shorter lines say little about a model


def calibration_texts(calibration: Path | None) -> list[str]:
    r"""The texts of a folder, one a line of its .txt files by name, or of the array `texts` (N,) of a .npz file.

    `\n` and `\t` in a line stand for a newline and a tab. None: the package's own. Equal texts are taken once. Raises
    ConversionError if there is no such folder or file, too few texts or a broken file.
    """
    if calibration is None:
        raw = resources.files("edge_convert.convert").joinpath("calibration.txt").read_text(encoding="utf-8")
        return _long_enough(map(unescaped, raw.splitlines()))
    texts = _of_folder(calibration) if calibration.is_dir() else _of_arrays(calibration)
    if len(texts) < MIN_TEXTS:
        place = f"in its *{SUFFIX} files (one a line)" if calibration.is_dir() else f"in its array {_ARRAY!r}"
        raise ConversionError(
            f"--calibration {calibration} has {len(texts)} different texts of {_SHORTEST} characters or more {place}, and "
            f"at least {MIN_TEXTS} are needed. Add texts like those the model will see."
        )
    return texts


def check_texts(request: Request) -> tuple[str, ...]:
    """The texts that a search needs must be there before the export starts; no warnings."""
    if request.precision == AUTO:
        calibration_texts(request.calibration)
    return ()


def _of_folder(folder: Path) -> list[str]:
    lines: list[str] = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            lines += path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConversionError(
                f"The calibration file {path.name} cannot be read: {reason}. Remove or replace it."
            ) from error
    return _long_enough(map(unescaped, lines))


def _of_arrays(path: Path) -> list[str]:
    wanted = f"an array {_ARRAY!r} of texts (N,), not of token ids,"
    texts = read_array(path, _ARRAY, wanted)
    if texts.dtype.kind != "U" or texts.ndim != 1:
        raise ConversionError(f"The array of {path.name} is {texts.dtype} {texts.shape}; {wanted} is needed.")
    return _long_enough(texts.tolist())


def _long_enough(lines: Iterable[str]) -> list[str]:
    stripped = (line.strip() for line in lines)
    return list(dict.fromkeys(line for line in stripped if len(line) >= _SHORTEST))
