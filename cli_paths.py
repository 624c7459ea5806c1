"""What the user typed as paths: bundles, sources, folders, and the name of an output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edge_convert.runtime.errors import UsageError

if TYPE_CHECKING:
    from edge_convert.runtime.bundle import Bundle
    from edge_convert.runtime.device import DeviceProfile


def open_bundle(path: Path) -> Bundle:
    """The checked bundle at `path`; a path that does not exist is wrong usage."""
    from edge_convert.runtime.bundle import Bundle

    if not path.exists():
        raise UsageError(f"The bundle folder {path} does not exist. Give a folder that `edge-convert model` wrote.")
    return Bundle.open(path)


def need_calibration(path: Path | None) -> None:
    """Raise UsageError if calibration inputs were given that are neither a folder nor a .npz file."""
    if path is None or path.is_dir() or (path.is_file() and path.suffix == ".npz"):
        return
    found = "is neither" if path.exists() else "does not exist"
    raise UsageError(f"--calibration {path} {found}. Give a folder of images or of .txt files, or a .npz file.")


def profile_of(bundle: Bundle, on_cpu: bool) -> DeviceProfile | None:
    """The bundle's profile on the CPU alone; None (the bundle's own) without `on_cpu`."""
    from edge_convert.runtime.device import with_cpu_only

    return with_cpu_only(bundle.profile) if on_cpu else None


def plain_name(source: str) -> str:
    """A folder name for the output from what the user typed: its last part without a suffix."""
    last = Path(source.rstrip("/")).name
    if ":" in last:  # package.module:factory or file.py:factory
        last = last.partition(":")[0].removesuffix(".py").rpartition(".")[2]
    stem = last.removesuffix(".gguf").removesuffix(".onnx")
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in stem).strip(".-") or "model"


def need_source(source: str) -> None:
    """A source that can only be a path, and is not there, is wrong usage; hub ids and factories may be anywhere."""
    if not source.strip():
        raise UsageError("The source is empty. Give a path, a hub id or module:factory.")
    only_a_path = source.startswith((".", "/", "~")) or source.endswith((".gguf", ".onnx"))
    if only_a_path and ":" not in source and not Path(source).expanduser().exists():
        raise UsageError(f"The source {source} does not exist. Give a path, a hub id or module:factory.")
