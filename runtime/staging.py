"""Build a folder beside its place and move it there when it is whole."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_convert.runtime.errors import BundleError, ManifestError, OutputError, clip, shown
from edge_convert.runtime.folder import MANIFEST_NAME, read_manifest_text, walk
from edge_convert.runtime.manifest import Manifest, files_of_older_version

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_FULL = (errno.ENOSPC, errno.EDQUOT)
_log = logging.getLogger(__name__)


@contextmanager
def staged(destination: Path, *, force: bool) -> Iterator[Path]:
    """A new folder on the same file system as `destination`, moved there when the block ends without an error.

    On any exception, KeyboardInterrupt included, the new folder is removed and `destination` is as before.
    With `force` an existing bundle (or an empty folder) is exchanged for the new one in one step where the
    system can, and removed only after that. A folder is replaced only if this version can read its manifest and
    the manifest lists every file in it; what those files hold does not matter.

    Raises:
        OutputError: `destination` exists without `force`, is a file, a link or another kind of folder, its
            parent cannot be written, or the disk is full.
    """
    destination = Path(os.path.abspath(destination))
    _check_destination(destination, force=force)
    made = _make_parents(destination.parent)
    folder = destination.parent / f".edge-convert-{secrets.token_hex(8)}.partial"  # short: `destination` may not be
    done = False
    try:
        _make(folder)
        yield folder
        _move(folder, destination, force=force)
        done = True
    except OSError as error:
        if error.errno in _FULL:
            raise OutputError(
                f"The disk is full: {destination} was not written ({error.strerror}). Free some space and try again."
            ) from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not done:
            for parent in made:
                with contextlib.suppress(OSError):  # not empty: somebody else uses it by now
                    parent.rmdir()


def _check_destination(destination: Path, *, force: bool) -> None:
    if "\0" in str(destination):
        raise OutputError(f"The output {shown(str(destination))} is no path: it has a NUL. Choose another name.")
    try:
        _check_place(destination, force=force)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise _too_long(destination) from error
        raise OutputError(f"The output {destination} cannot be looked at: {error.strerror}.") from error


def _too_long(path: Path) -> OutputError:
    return OutputError(f"The output's name {clip(path.name)} or its path is too long for the system. Shorten it.")


def _check_place(destination: Path, *, force: bool) -> None:
    if destination.is_symlink():
        raise OutputError(f"The output {destination} is a link. Name the folder itself.")
    if not destination.exists():
        return
    if not destination.is_dir():
        raise OutputError(f"The output {destination} is a file, and a bundle is a folder. Choose another name.")
    if not force:
        raise OutputError(f"The output {destination} exists. Choose another name or replace it with --force.")
    if any(destination.iterdir()) and (reason := _not_a_bundle(destination)):
        raise OutputError(
            f"The output {destination} is not replaced, even with --force: {reason}. "
            "Choose another name, or remove the folder yourself."
        )


def _not_a_bundle(folder: Path) -> str | None:
    """Why `folder` may hold something that no edge-convert wrote; None for a bundle, damaged or not."""
    if not os.path.lexists(folder / MANIFEST_NAME):
        return f"it holds other things than a bundle and has no {MANIFEST_NAME}"
    try:
        text = read_manifest_text(folder)
        listed = {*(files_of_older_version(text) or Manifest.from_json(text).files), MANIFEST_NAME}
        found = walk(folder)
    except ManifestError as error:
        return f"its {MANIFEST_NAME} is not that of a bundle of this version ({str(error).rstrip('.')})"
    except BundleError as error:
        return str(error).rstrip(".")
    other = sorted(set(found) - listed)
    return f"it holds {shown(other[0])}, which its {MANIFEST_NAME} does not list" if other else None


def _make_parents(parent: Path) -> list[Path]:
    """Create `parent` and what is missing above it; the created folders, innermost first."""
    missing = []
    try:
        while not parent.exists():
            missing.append(parent)
            parent = parent.parent
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise _too_long(parent) from error
        raise OutputError(f"The folder {parent} cannot be looked at: {error.strerror}.") from error
    made: list[Path] = []
    for folder in reversed(missing):
        _make(folder)
        made.insert(0, folder)
    return made


def _make(folder: Path) -> None:
    try:
        folder.mkdir()
    except OSError as error:
        if error.errno in _FULL:
            raise
        if error.errno == errno.ENAMETOOLONG:
            raise _too_long(folder) from error
        raise OutputError(
            f"The folder {folder.parent} cannot be written: {error.strerror}. Check its permissions or choose another."
        ) from error


def _move(folder: Path, destination: Path, *, force: bool) -> None:
    _check_destination(destination, force=force)
    try:
        if not destination.exists():
            folder.rename(destination)
        elif not _exchange(folder, destination):
            _replace_in_two_steps(folder, destination)
    except OSError as error:
        if error.errno in _FULL:
            raise
        if error.errno == errno.ENAMETOOLONG:
            raise _too_long(destination) from error
        raise OutputError(f"The output {destination} cannot be moved into place: {error.strerror}.") from error


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step (Linux); False where the system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    result = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return int(result) == 0


def _replace_in_two_steps(folder: Path, destination: Path) -> None:
    """Set the old folder aside, move the new one in, then remove the old; put it back if the move fails."""
    old = destination.with_name(f".edge-convert-{secrets.token_hex(8)}.old")
    destination.rename(old)
    try:
        folder.rename(destination)
    except BaseException:
        old.rename(destination)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if old.exists():
        _log.warning("the replaced folder %s could not be removed", old)
