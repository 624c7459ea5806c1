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

from edge_convert.runtime.errors import OutputError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_FULL = (errno.ENOSPC, errno.EDQUOT)
_log = logging.getLogger(__name__)


@contextmanager
def staged(destination: Path, *, force: bool) -> Iterator[Path]:
    """A new folder on the same file system as `destination`, moved there when the block ends without an error.

    On any exception, KeyboardInterrupt included, the new folder is removed and `destination` is as before.
    With `force` an existing bundle (or an empty folder) is exchanged for the new one in one step where the
    system can, and removed only after that; a folder that is not a bundle is never replaced.

    Raises:
        OutputError: `destination` exists without `force`, is a file, a link or another kind of folder, its
            parent cannot be written, or the disk is full.
    """
    destination = Path(os.path.abspath(destination))
    _check_destination(destination, force=force)
    made = _make_parents(destination.parent)
    folder = destination.parent / f".{destination.name}.{secrets.token_hex(4)}.partial"
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
    if destination.is_symlink():
        raise OutputError(f"The output {destination} is a link. Name the folder itself.")
    if not destination.exists():
        return
    if not destination.is_dir():
        raise OutputError(f"The output {destination} is a file, and a bundle is a folder. Choose another name.")
    if not force:
        raise OutputError(f"The output {destination} exists. Choose another name or replace it with --force.")
    if not (destination / "manifest.json").is_file() and any(destination.iterdir()):
        raise OutputError(
            f"The output {destination} is a folder with other things than a bundle; it is not replaced, even with "
            "--force. Choose another name."
        )


def _make_parents(parent: Path) -> list[Path]:
    """Create `parent` and what is missing above it; the created folders, innermost first."""
    missing = []
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
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
    old = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.old")
    destination.rename(old)
    try:
        folder.rename(destination)
    except BaseException:
        old.rename(destination)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if old.exists():
        _log.warning("the replaced folder %s could not be removed", old)
