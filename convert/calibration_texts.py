"""The texts that quantisation is measured on: the user's, or those that come with the package.

They never judge a bundle: validation has texts of its own (`validate/texts.txt`).
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from edge_convert.convert.recipe import Request
from edge_convert.runtime.errors import ConversionError
from edge_convert.runtime.manifest import AUTO
from edge_convert.validate.texts import unescaped

SUFFIX = ".txt"
MIN_TEXTS = 8
_SHORTEST = 20  # characters; shorter lines say little about a model


def calibration_texts(folder: Path | None) -> list[str]:
    r"""One text a line (`\n` and `\t` stand for a newline and a tab), of every .txt file in `folder` by name.

    None: the package's own. Raises ConversionError if the folder is none, holds too few texts or a broken file.
    """
    if folder is None:
        raw = resources.files("edge_convert.convert").joinpath("calibration.txt").read_text(encoding="utf-8")
        return _texts(raw)
    if not folder.is_dir():
        raise ConversionError(
            f"The calibration folder {folder} does not exist. Pass --calibration DIR with .txt files."
        )
    texts: list[str] = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            texts += _texts(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConversionError(
                f"The calibration file {path.name} cannot be read: {reason}. Remove or replace it."
            ) from error
    if len(texts) < MIN_TEXTS:
        raise ConversionError(
            f"The calibration folder {folder} has {len(texts)} texts of {_SHORTEST} characters or more in its *{SUFFIX} "
            f"files (one a line), and at least {MIN_TEXTS} are needed. Add texts like those the model will see."
        )
    return texts


def check_texts(request: Request) -> tuple[str, ...]:
    """The texts that a search needs must be there before the export starts; no warnings."""
    if request.precision == AUTO:
        calibration_texts(request.calibration)
    return ()


def _texts(raw: str) -> list[str]:
    lines = [unescaped(line).strip() for line in raw.splitlines()]
    return [line for line in lines if len(line) >= _SHORTEST]
