"""The manifest: the contract between the converter and the device, and its JSON form.

Knows names, dtypes, shapes and files; knows nothing of ONNX Runtime or of any model.
Unknown keys are refused: a manifest with a field that this version cannot honour is not opened.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from edge_convert.runtime.errors import ManifestError, shown
from edge_convert.runtime.strict import check_range, load_json, parse

SCHEMA_VERSION = 2
TASKS = ("text-generation", "feature-extraction", "image-classification")
PRECISIONS = ("fp32", "fp16", "int8", "int4")
ARITHMETIC = ("fp32", "fp16", "bf16", "int8")  # what products compute in
AUTO = "auto"  # the precision of each weight was chosen by measurement
REQUESTS = (AUTO, *PRECISIONS)
DTYPES = (
    "float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "uint16",
    "int32", "uint32", "int64", "uint64", "bool", "int4", "uint4", "string",
)  # fmt: skip
_RELEASE = re.compile(r"(\d+\.\d+)?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_DIMENSION = 1 << 40
_MAX_NODES = 1 << 32
_MAX_HEADS = 1 << 16
_MAX_POSITIONS = 1 << 24
_MAX_CACHE_VALUES = 1 << 40
_MAX_FILE_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output: its ONNX name, dtype (NumPy's names) and shape; a named dim is dynamic."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ManifestError(f"Tensor {shown(self.name)} has the unknown dtype {shown(self.dtype)}.")
        for dim in self.shape:
            if isinstance(dim, int):
                check_range(f"A dimension of tensor {shown(self.name)}", dim, 0, _MAX_DIMENSION)


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
        if len({*self.past, *self.present}) != 2 * len(self.past):
            raise ManifestError("CacheSpec names a past or present tensor twice. Convert again.")
        if min(self.kv_heads, self.head_dim, self.max_length) < 1:
            raise ManifestError("CacheSpec sizes must be positive.")
        check_range("CacheSpec.kv_heads", self.kv_heads, 1, _MAX_HEADS)
        check_range("CacheSpec.head_dim", self.head_dim, 1, _MAX_HEADS)
        check_range("CacheSpec.max_length", self.max_length, 1, _MAX_POSITIONS)
        values = len(self.past) * self.kv_heads * self.head_dim * self.max_length
        check_range("The number of values in CacheSpec", values, 1, _MAX_CACHE_VALUES)


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """One ONNX file and what was read back from it after writing.

    `formats` says for each node with a large weight how that is stored, by the node's name. `products` counts the
    matrix products and convolutions with a weight by what they compute in; `fp32_nodes` names the nodes that stay in
    fp32 where the others compute in fp16 or int8. `onnxruntime_min` is the oldest ONNX Runtime ("major.minor") that has
    the graph's operators as it uses them, where that is newer than what every target has. Bundles written before these
    were read back have them empty.
    """

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    ir_version: int
    opsets: dict[str, int]
    node_counts: dict[str, int]
    initializer_bytes: dict[str, int]
    cache: CacheSpec | None = None
    formats: dict[str, str] = field(default_factory=dict)
    products: dict[str, int] = field(default_factory=dict)
    fp32_nodes: tuple[str, ...] = ()
    onnxruntime_min: str = ""

    def __post_init__(self) -> None:
        for kind, count in self.products.items():
            if kind not in ARITHMETIC:
                raise ManifestError(
                    f"A graph has products in the unknown type {shown(kind)}; known: {', '.join(ARITHMETIC)}."
                )
            check_range(f"The number of products in {kind}", count, 1, _MAX_NODES)
        if len(set(self.fp32_nodes)) != len(self.fp32_nodes):
            raise ManifestError("A graph names one of its fp32_nodes twice. Convert again.")
        if not _RELEASE.fullmatch(self.onnxruntime_min):
            raise ManifestError(f"onnxruntime_min of a graph is {shown(self.onnxruntime_min)}, not a release as 1.23.")


@dataclass(frozen=True, slots=True)
class FileSpec:
    """Size in bytes and SHA-256 (lower-case hex) of one file of the bundle."""

    size: int
    sha256: str

    def __post_init__(self) -> None:
        if not 0 <= self.size <= _MAX_FILE_BYTES or not _SHA256.fullmatch(self.sha256):
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
    file of the bundle but the manifest itself, by relative POSIX name. `quantisation` is the record of a
    search: what was chosen, and what was tried and why it was refused.
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
    quantisation: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_version(self.schema_version)
        if self.task not in TASKS:
            raise ManifestError(f"The manifest has the unknown task {shown(self.task)}; known: {', '.join(TASKS)}.")
        if self.precision not in REQUESTS:
            raise ManifestError(
                f"The manifest has the unknown precision {shown(self.precision)}; known: {', '.join(REQUESTS)}."
            )
        for name in self.files:
            check_file_name(name)
        for role, graph in self.graphs.items():
            check_file_name(graph.file)
            if graph.file not in self.files:
                raise ManifestError(f"The graph {shown(role)} names {shown(graph.file)}, which is not among the files.")

    def to_json(self) -> str:
        """The manifest as indented JSON with a final newline; ManifestError for what no JSON text can hold."""
        try:
            text = json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
            text.encode("utf-8")
        except (ValueError, TypeError) as error:
            raise ManifestError(f"The manifest cannot be written as JSON: {error}.") from error
        return text

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse and check; raises ManifestError for anything that the schema does not have."""
        try:
            value = load_json(text)
        except ValueError as error:
            raise ManifestError(f"manifest.json is not JSON: {error}. Copy the bundle again.") from error
        if isinstance(value, dict):
            if "schema_version" not in value:
                raise ManifestError("manifest.json has no schema_version.")
            version = value["schema_version"]
            if isinstance(version, int) and not isinstance(version, bool):
                _check_version(version)  # before the keys, which another version may have others of
        manifest: Manifest = parse(cls, value, "manifest")
        return manifest


def files_of_older_version(text: str) -> set[str] | None:
    """The files that a manifest of an older schema version lists; None if `text` is not such a manifest."""
    try:
        value = load_json(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not {"task", "target", "graphs", "files"} <= set(value):
        return None
    version, files = value.get("schema_version"), value["files"]
    if not isinstance(version, int) or isinstance(version, bool) or version >= SCHEMA_VERSION:
        return None
    try:
        return {check_file_name(name) for name in files} if isinstance(files, dict) else None
    except ManifestError:
        return None


def _check_version(version: int) -> None:
    if version != SCHEMA_VERSION:
        raise ManifestError(
            f"The manifest has schema version {shown(version)}, and this edge-convert reads "
            f"{SCHEMA_VERSION}. Install the matching version or convert again."
        )


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
        raise ManifestError(f"The file name {shown(name)} is not a plain name inside the bundle; it is refused.")
    return name
