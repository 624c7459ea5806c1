"""Keeps exports by content hash, so that a second precision or target does not export again.

An entry is a folder with the graphs and `index.json` (roles, caches, every file's size and SHA-256). It is
written beside its place and moved there when whole; an entry that does not match its index is dropped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from edge_convert.convert.recipe import Exported, Recipe, Request
from edge_convert.runtime.bundle import hash_file
from edge_convert.runtime.manifest import CacheSpec

log = logging.getLogger(__name__)

VARIABLE = "EDGE_CONVERT_CACHE"
MAX_BYTES = 8_000_000_000
_INDEX = "index.json"
_TOOLS = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime", "onnxruntime-genai", "optimum")
Export = Callable[[Request, Path], dict[str, Exported]]


def cached_export(request: Request, recipe: Recipe, folder: Path) -> dict[str, Exported]:
    """What `recipe.export` writes into `folder`, from the cache if this export was made before.

    A `module:factory` is always exported: nobody knows where its weights come from. So is everything if
    the environment variable `EDGE_CONVERT_CACHE` is set and empty.
    """
    place = cache_folder()
    if place is None or request.source.kind == "module":
        return recipe.export(request, folder)
    entry = place / export_key(request, recipe.task)
    found = _read(entry, folder)
    if found is not None:
        request.progress("exported before: taken from the cache")
        return found
    graphs = recipe.export(request, folder)
    _write(entry, graphs)
    _prune(place)
    return graphs


def cache_folder() -> Path | None:
    """`EDGE_CONVERT_CACHE`, else edge-convert in the user's cache folder; None if the variable is empty."""
    text = os.environ.get(VARIABLE)
    if text is not None:
        return Path(text) if text else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge-convert" / "exports"


def export_key(request: Request, task: str) -> str:
    """SHA-256 over all that an export depends on: source, target, context, our code and the libraries' versions.

    The precision counts only as fp16 or not: int8 and int4 are made from the same fp32 export.
    """
    facts = {
        "source": [request.source.kind, request.source.sha256],
        "task": task,
        "half": request.precision == "fp16",
        "context": request.context_tokens,
        "profile": dataclasses.asdict(request.profile),
        "tools": {name: _version(name) for name in _TOOLS},
        "code": _code_hash(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _read(entry: Path, folder: Path) -> dict[str, Exported] | None:
    """Copy an entry into `folder`; None if there is none or it is damaged (it is dropped then)."""
    try:
        index: dict[str, Any] = json.loads((entry / _INDEX).read_text("utf-8"))
        for name, spec in index["files"].items():
            shutil.copyfile(entry / name, folder / name)
            if dataclasses.asdict(hash_file(folder / name)) != spec:
                raise ValueError(f"{name} differs from the index")
        graphs = {
            role: Exported(folder / item["file"], None if item["cache"] is None else _cache_spec(item["cache"]))
            for role, item in index["graphs"].items()
        }
    except OSError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("The cached export %s is damaged (%s) and exported again.", entry.name[:12], error)
        shutil.rmtree(entry, ignore_errors=True)
        return None
    os.utime(entry)
    return graphs


def _cache_spec(fields: Mapping[str, Any]) -> CacheSpec:
    return CacheSpec(**{**fields, "past": tuple(fields["past"]), "present": tuple(fields["present"])})


def _write(entry: Path, graphs: Mapping[str, Exported]) -> None:
    """Keep the graphs as `entry`; a cache that cannot be written costs time later and nothing now."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=entry.parent, prefix=".partial-") as temporary:
            work = Path(temporary) / entry.name
            work.mkdir()
            for graph in graphs.values():
                for file in graph.path.parent.glob(f"{graph.path.name}*"):
                    shutil.copyfile(file, work / file.name)
            index = {
                "graphs": {
                    role: {"file": graph.path.name, "cache": graph.cache and dataclasses.asdict(graph.cache)}
                    for role, graph in graphs.items()
                },
                "files": {path.name: dataclasses.asdict(hash_file(path)) for path in work.iterdir()},
            }
            (work / _INDEX).write_text(json.dumps(index), "utf-8")
            work.rename(entry)
    except OSError as error:
        log.warning("The export could not be kept in %s: %s.", entry.parent, error.strerror or error)


def _prune(place: Path) -> None:
    """Drop the entries that were not used for longest until `MAX_BYTES` are left; the newest always stays."""
    try:
        entries = sorted((path for path in place.iterdir() if path.is_dir()), key=lambda path: -path.stat().st_mtime)
        total = 0
        for entry in entries:
            total += sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())
            if total > MAX_BYTES and entry != entries[0]:
                shutil.rmtree(entry, ignore_errors=True)
    except OSError as error:
        log.warning("The cache of exports in %s could not be tidied: %s.", place, error.strerror or error)


def _code_hash() -> str:
    """A hash of this package's converter, so that changed code exports again."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
