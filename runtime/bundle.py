"""A bundle: a plain folder whose every file is listed, with size and SHA-256, in its manifest.json."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge_convert.runtime.device import DeviceProfile, load_profile
from edge_convert.runtime.errors import BundleError, ChecksumError, UnknownNameError, UsageError, clip, shown
from edge_convert.runtime.folder import MANIFEST_NAME, read_manifest, walk
from edge_convert.runtime.manifest import FileSpec, Manifest, check_file_name
from edge_convert.runtime.staging import staged

if TYPE_CHECKING:
    from edge_convert.runtime.session import Session

__all__ = ["MANIFEST_NAME", "Bundle", "collect_files", "hash_file", "staged", "write_manifest"]

_CHUNK_BYTES = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Bundle:
    """A folder and its manifest. `Bundle.open` checks one against the other; the constructor does not."""

    path: Path
    manifest: Manifest
    own_profile: DeviceProfile | None = None

    @classmethod
    def open(cls, path: Path | str, verify: bool = True, *, profile: DeviceProfile | None = None) -> Bundle:
        """The bundle at `path`, checked. `profile` is that of a target which is not in the packaged devices.yaml.

        Links, special files, files that the manifest does not list, absent files and other sizes are
        always refused; with `verify` every file is read and its SHA-256 compared too (ChecksumError).
        """
        if not isinstance(path, (str, os.PathLike)):
            raise UsageError(f"A bundle is opened by its folder; found {type(path).__name__}. Pass a path.")
        folder = Path(path)
        if not folder.exists():
            raise BundleError(f"There is no bundle at {folder}. Check the path.")
        if not folder.is_dir():
            raise BundleError(f"{folder} is a file, and a bundle is a folder. Pass the folder with {MANIFEST_NAME}.")
        folder = folder.resolve()
        manifest = read_manifest(folder)
        _check_files(folder, manifest, verify=verify)
        return cls(folder, manifest, profile)

    @property
    def profile(self) -> DeviceProfile:
        """The profile given to `open`, or the packaged one of the manifest's target (UnknownNameError if none)."""
        return self.own_profile or load_profile(self.manifest.target)

    def file(self, name: str) -> Path:
        """The path of a file that the manifest lists; BundleError for any other name."""
        if name not in self.manifest.files:
            raise BundleError(
                f"The bundle {self.path.name} has no file {shown(name)}; "
                f"it has: {', '.join(map(clip, sorted(self.manifest.files)))}."
            )
        return self.path / check_file_name(name)

    def read_text(self, name: str) -> str:
        """The text of a file that the manifest lists; BundleError if it cannot be read or is not UTF-8."""
        try:
            return self.file(name).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise BundleError(f"{name!r} in {self.path.name} is not UTF-8 text. Convert the model again.") from error
        except OSError as error:
            raise BundleError(f"{name!r} cannot be read: {error.strerror}. Check its permissions.") from error

    def session(self, role: str, *, profile: DeviceProfile | None = None, threads: int | None = None) -> Session:
        """Open the graph called `role` ("decoder", "encoder", "classifier") on `profile` (None: the bundle's own)."""
        from edge_convert.runtime.session import Session

        if role not in self.manifest.graphs:
            raise UnknownNameError("graph", role, self.manifest.graphs)
        spec = self.manifest.graphs[role]
        return Session(self.file(spec.file), spec, profile or self.profile, threads=threads)

    def update_file(self, name: str, data: bytes) -> None:
        """Write or replace one file, then the manifest; each appears whole or not at all.

        Between the two the bundle does not pass `open`, so an interrupted update is noticed.
        """
        target = self.path / check_file_name(name)
        _check_inside(self.path, target)
        spec = FileSpec(len(data), hashlib.sha256(data).hexdigest())
        manifest = dataclasses.replace(self.manifest, files={**self.manifest.files, name: spec})
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_atomically(target, data)
        write_manifest(self.path, manifest)
        self.manifest = manifest


def hash_file(path: Path) -> FileSpec:
    """Size in bytes and SHA-256 of a file, read in pieces of 1 MiB."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while piece := stream.read(_CHUNK_BYTES):
            digest.update(piece)
            size += len(piece)
    return FileSpec(size, digest.hexdigest())


def collect_files(folder: Path) -> dict[str, FileSpec]:
    """Every file below `folder` but manifest.json, by relative POSIX name, sorted; BundleError for links."""
    names = sorted(name for name in walk(folder) if name != MANIFEST_NAME)
    return {check_file_name(name): hash_file(folder / name) for name in names}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json; it appears whole or not at all."""
    _write_atomically(folder / MANIFEST_NAME, manifest.to_json().encode("utf-8"))


def _check_files(folder: Path, manifest: Manifest, *, verify: bool) -> None:
    found = walk(folder)
    del found[MANIFEST_NAME]
    if extra := sorted(set(found) - set(manifest.files)):
        raise BundleError(
            f"The bundle {folder.name} has the file {shown(extra[0])}, which its manifest does not list. Remove it."
        )
    if missing := sorted(set(manifest.files) - set(found)):
        raise BundleError(f"The bundle {folder.name} lacks the file {shown(missing[0])}. Copy the bundle again.")
    for name, size in found.items():
        if size != manifest.files[name].size:
            raise ChecksumError(
                f"{name!r} has {size} bytes, and the manifest says {shown(manifest.files[name].size)}. Copy the bundle again."
            )
    if not verify:
        return
    for name in found:
        try:
            actual = hash_file(folder / name).sha256
        except OSError as error:
            raise BundleError(f"{name!r} cannot be read: {error.strerror}. Check its permissions.") from error
        if actual != manifest.files[name].sha256:
            raise ChecksumError(f"The content of {name!r} is not what the manifest says. Copy the bundle again.")
    _log.debug("checked %d files of %s", len(found), folder.name)


def _check_inside(folder: Path, target: Path) -> None:
    """Refuse a target below a linked folder, which would be written outside the bundle."""
    if not target.parent.resolve().is_relative_to(folder.resolve()):
        raise BundleError(f"{target.name!r} would be written outside the bundle {folder.name}; it is refused.")


def _write_atomically(target: Path, data: bytes) -> None:
    temporary = target.with_name(f".{secrets.token_hex(8)}.partial")  # short: the name itself may be of full length
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    except OSError as error:
        raise BundleError(f"{target} cannot be written: {error.strerror}. Check space and permissions.") from error
    finally:
        temporary.unlink(missing_ok=True)
