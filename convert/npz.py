"""Calibration inputs from a .npz file."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_convert.runtime.errors import ConversionError


def read_array(path: Path, name: str, wanted: str) -> NDArray[Any]:
    """The array `name` of a .npz file, or the only array that it has; ConversionError says that `wanted` is wanted."""
    if not path.is_file():
        raise ConversionError(f"--calibration {path} does not exist. Give a folder, or a .npz file with {wanted}.")
    try:
        with np.load(path, allow_pickle=False) as content:
            if not isinstance(content, np.lib.npyio.NpzFile):
                raise ConversionError(f"{path.name} is no .npz file. Save {wanted} with numpy.savez.")
            names = list(content.files)
            chosen = name if name in names else names[0] if len(names) == 1 else None
            if chosen is None:
                raise ConversionError(f"{path.name} has the arrays {', '.join(names) or '(none)'}; {wanted} is needed.")
            found: NDArray[Any] = content[chosen]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConversionError(
            f"The calibration file {path} cannot be read: {error}. Save {wanted} with numpy.savez."
        ) from error
    return found
