"""The manifest: the contract between the converter and the device, and its JSON form.

Knows names, dtypes, shapes and files; knows nothing of ONNX Runtime or of any model.
Unknown keys are refused: a manifest with a field that this version cannot honour is not opened.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from edge_convert.runtime.errors import ManifestError

SCHEMA_VERSION = 1
TASKS = ("text-generation", "feature-extraction", "image-classification")
PRECISIONS = ("fp32", "fp16", "int8", "int4")
DTYPES = (
    "float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "uint16",
    "int32", "uint32", "int64", "uint64", "bool", "int4", "uint4", "string",
)  # fmt: skip
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output: its ONNX name, dtype (NumPy's names) and shape; a named dim is dynamic."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ManifestError(f"Tensor {self.name!r} has the unknown dtype {self.dtype!r}.")


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The past/present pairs of a decoder graph.

    `past[i]` and `present[i]` belong together; each is (batch, kv_heads, sequence, head_dim) of `dtype`.
    With `share_buffer` the graph reads and writes one preallocated buffer of `max_length` positions.
    """

    past: tuple[str, ...]
    present: tuple[str, ...]
    kv_heads: int
    head_dim: int
    max_length: int
    dtype: str = "float32"
    share_buffer: bool = True

    def __post_init__(self) -> None:
        if len(self.past) != len(self.present) or not self.past:
            raise ManifestError("CacheSpec needs as many past as present names, and at least one pair.")
        if min(self.kv_heads, self.head_dim, self.max_length) < 1:
            raise ManifestError("CacheSpec sizes must be positive.")


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """One ONNX file and what was read back from it after writing."""

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    ir_version: int
    opsets: dict[str, int]
    node_counts: dict[str, int]
    initializer_bytes: dict[str, int]
    cache: CacheSpec | None = None


@dataclass(frozen=True, slots=True)
class FileSpec:
    """Size in bytes and SHA-256 (lower-case hex) of one file of the bundle."""

    size: int
    sha256: str

    def __post_init__(self) -> None:
        if self.size < 0 or not _SHA256.fullmatch(self.sha256):
            raise ManifestError("A file entry needs a size and a SHA-256 of 64 hex digits.")


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Where the weights came from. `name` is a plain name, never a path of the converting machine."""

    kind: str
    name: str
    sha256: str
    revision: str | None = None
    architecture: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a device needs to know of a bundle.

    `processing` holds the wrapper's settings (per task, see docs/bundle_format.md); `files` has every
    file of the bundle but the manifest itself, by relative POSIX name.
    """

    task: str
    target: str
    precision: str
    source: SourceSpec
    graphs: dict[str, GraphSpec]
    processing: dict[str, Any]
    files: dict[str, FileSpec]
    tools: dict[str, str]
    created: str
    warnings: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ManifestError(
                f"The manifest has schema version {self.schema_version}, and this edge-convert reads "
                f"{SCHEMA_VERSION}. Install the matching version or convert again."
            )
        if self.task not in TASKS:
            raise ManifestError(f"The manifest has the unknown task {self.task!r}; known: {', '.join(TASKS)}.")
        if self.precision not in PRECISIONS:
            raise ManifestError(
                f"The manifest has the unknown precision {self.precision!r}; known: {', '.join(PRECISIONS)}."
            )
        for name in self.files:
            check_file_name(name)
        for role, graph in self.graphs.items():
            check_file_name(graph.file)
            if graph.file not in self.files:
                raise ManifestError(f"The graph {role!r} names {graph.file!r}, which is not among the files.")

    def to_json(self) -> str:
        """The manifest as indented JSON with a final newline."""
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse and check; raises ManifestError for anything that the schema does not have."""
        try:
            value = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ManifestError(f"manifest.json is not JSON: {error}. Copy the bundle again.") from error
        if isinstance(value, dict) and "schema_version" not in value:
            raise ManifestError("manifest.json has no schema_version.")
        manifest: Manifest = _parse(cls, value, "manifest")
        return manifest


def check_file_name(name: str) -> str:
    """`name` itself if it is a plain relative POSIX name; raises ManifestError otherwise."""
    path = PurePosixPath(name)
    plain = (
        name
        and str(path) == name
        and not path.is_absolute()
        and ".." not in path.parts
        and not any(character in name for character in "\\:\0")
        and all(part.strip() == part and part.isprintable() for part in path.parts)
        and name not in (".", "manifest.json")
    )
    if not plain:
        raise ManifestError(f"The file name {name!r} is not a plain name inside the bundle; it is refused.")
    return name


def _parse(kind: Any, value: Any, where: str) -> Any:
    """`value` (from JSON) as `kind`: a dataclass, tuple, dict, union or plain type. No coercion."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _parse_dataclass(kind, value, where)
    if origin in (types.UnionType, typing.Union):
        for option in args:
            if _fits(option, value):
                return _parse(option, value, where)
    elif origin is tuple and isinstance(value, list):
        return tuple(_parse(args[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    elif origin is dict and isinstance(value, dict):
        return {key: _parse(args[1], item, f"{where}.{key}") for key, item in value.items()}
    elif kind is Any or _fits(kind, value):
        return value
    raise ManifestError(f"{where} in manifest.json is {type(value).__name__}, and {kind} is expected.")


def _fits(kind: Any, value: Any) -> bool:
    if kind is types.NoneType:
        return value is None
    if dataclasses.is_dataclass(kind):
        return isinstance(value, dict)
    return isinstance(value, typing.get_origin(kind) or kind) and not (kind is int and isinstance(value, bool))


def _parse_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ManifestError(f"{where} in manifest.json is not an object.")
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise ManifestError(
            f"{where} in manifest.json has the unknown key {unknown[0]!r}; known: {', '.join(sorted(hints))}."
        )
    for spec in dataclasses.fields(kind):
        required = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        if required and spec.name not in value:
            raise ManifestError(f"{where} in manifest.json has no {spec.name!r}.")
    return kind(**{key: _parse(hints[key], item, f"{where}.{key}") for key, item in value.items()})
