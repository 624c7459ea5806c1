"""Whether what was written tells of the machine that wrote it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import edge_convert


def machine_paths(folder: Path) -> set[str]:
    """The files in `folder` with a path of this machine in them: of the package, libraries, home, or temporary files."""
    import torch

    libraries = Path(torch.__file__).parents[1]
    places = {
        Path(edge_convert.__file__).resolve().parent,
        Path.cwd(),
        libraries,
        Path.home(),
        Path(tempfile.gettempdir()),
    }
    words = {f"{place}/".encode() for place in places} | {b"site-packages"}
    return {
        path.name for path in folder.rglob("*") if path.is_file() and any(word in path.read_bytes() for word in words)
    }
