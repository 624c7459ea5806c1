"""What lies in a bundle's folder: its manifest and its files, with links and special files refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from edge_convert.runtime.errors import BundleError, ManifestError
from edge_convert.runtime.manifest import Manifest

MANIFEST_NAME = "manifest.json"
_MANIFEST_MAX_BYTES = 64 << 20


def read_manifest_text(folder: Path) -> str:
    """The text of the folder's manifest, which need not be one."""
    path = folder / MANIFEST_NAME
    try:
        mode = path.lstat()
    except FileNotFoundError as error:
        raise BundleError(
            f"{folder} has no {MANIFEST_NAME}, so it is not a bundle. Pass a converted folder."
        ) from error
    if not stat.S_ISREG(mode.st_mode):
        raise BundleError(
            f"{MANIFEST_NAME} in {folder} is not a plain file (links are refused). Copy the bundle again."
        )
    if mode.st_size > _MANIFEST_MAX_BYTES:
        raise ManifestError(
            f"{MANIFEST_NAME} has {mode.st_size} bytes, which no manifest needs. Copy the bundle again."
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ManifestError(f"{MANIFEST_NAME} is not UTF-8 text. Copy the bundle again.") from error
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}. Check its permissions.") from error
    return text


def read_manifest(folder: Path) -> Manifest:
    """The folder's manifest, parsed and checked; its files are not looked at."""
    return Manifest.from_json(read_manifest_text(folder))


def walk(folder: Path, prefix: str = "") -> dict[str, int]:
    """Sizes of all plain files below `folder` by relative POSIX name; links and special files are refused."""
    sizes: dict[str, int] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda item: item.name):
                name = prefix + entry.name
                mode = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(mode.st_mode):
                    sizes.update(walk(Path(entry.path), name + "/"))
                elif stat.S_ISREG(mode.st_mode):
                    sizes[name] = mode.st_size
                else:
                    raise BundleError(
                        f"{name!r} is a link or a special file, which a bundle must not have. Replace it."
                    )
    except OSError as error:
        raise BundleError(f"{folder} cannot be read: {error.strerror}. Check its permissions.") from error
    return sizes
