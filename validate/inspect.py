"""What is inside a bundle, as plain values and as tables. Reads the manifest only; runs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from edge_convert.runtime.bundle import Bundle
    from edge_convert.runtime.manifest import GraphSpec, TensorSpec


def describe(bundle: Bundle) -> dict[str, Any]:
    """The bundle as plain values for JSON; sizes in bytes, the largest files and node types first."""
    manifest = bundle.manifest
    return {
        "path": str(bundle.path),
        "task": manifest.task,
        "target": manifest.target,
        "precision": manifest.precision,
        "created": manifest.created,
        "source": {
            "kind": manifest.source.kind,
            "name": manifest.source.name,
            "revision": manifest.source.revision,
            "architecture": manifest.source.architecture,
            "sha256": manifest.source.sha256,
        },
        "total_bytes": sum(spec.size for spec in manifest.files.values()),
        "graphs": {role: _graph(spec) for role, spec in manifest.graphs.items()},
        "files": {
            name: {"size": spec.size, "sha256": spec.sha256}
            for name, spec in sorted(manifest.files.items(), key=lambda item: -item[1].size)
        },
        "processing": manifest.processing,
        "tools": manifest.tools,
        "warnings": list(manifest.warnings),
        "extra": manifest.extra,
    }


def tables(description: dict[str, Any]) -> list[Table]:
    """The tables of one description made by `describe`."""
    from rich.table import Table

    summary = Table(title="Bundle", show_header=False)
    source = description["source"]
    rows = {key: str(description[key]) for key in ("task", "target", "precision", "created")}
    rows["size"] = size_text(description["total_bytes"])
    rows |= {f"source {key}": str(value) for key, value in source.items() if value is not None}
    rows |= {f"made with {name}": str(version) for name, version in description["tools"].items()}
    for number, warning in enumerate(description["warnings"], start=1):
        rows[f"warning {number}"] = str(warning)
    _fill(summary, rows)
    result = [summary]
    for role, graph in description["graphs"].items():
        result += _graph_tables(role, graph)
    files = Table("file", "size", "SHA-256", title="Files")
    for name, spec in description["files"].items():
        files.add_row(_plain(name), size_text(spec["size"]), spec["sha256"][:16])
    processing = Table(title="Processing", show_header=False)
    _fill(processing, {key: str(value) for key, value in description["processing"].items()})
    return [*result, files, processing]


def size_text(size: float) -> str:
    """`size` in bytes as text with a binary unit, such as '1.5 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _graph(spec: GraphSpec) -> dict[str, Any]:
    cache = spec.cache
    return {
        "file": spec.file,
        "ir_version": spec.ir_version,
        "opsets": spec.opsets,
        "inputs": [_tensor(item) for item in spec.inputs],
        "outputs": [_tensor(item) for item in spec.outputs],
        "node_total": sum(spec.node_counts.values()),
        "node_counts": dict(sorted(spec.node_counts.items(), key=lambda item: (-item[1], item[0]))),
        "initializer_bytes": dict(sorted(spec.initializer_bytes.items(), key=lambda item: -item[1])),
        "cache": None
        if cache is None
        else {
            "tensors": 2 * len(cache.past),
            "kv_heads": cache.kv_heads,
            "head_dim": cache.head_dim,
            "max_length": cache.max_length,
            "dtype": cache.dtype,
            "share_buffer": cache.share_buffer,
        },
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}


def _graph_tables(role: str, graph: dict[str, Any]) -> list[Table]:
    from rich.table import Table

    head = Table(title=f"Graph {role}", show_header=False)
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in graph["opsets"].items())
    rows = {"file": graph["file"], "IR / opsets": f"{graph['ir_version']} / {opsets}"}
    for direction in ("inputs", "outputs"):
        shown = [_tensor_text(item) for item in graph[direction]]
        rows[direction] = "\n".join(shown if len(shown) <= 8 else [*shown[:6], f"… and {len(shown) - 6} more"])
    if graph["cache"]:
        rows["cache"] = ", ".join(f"{key} {value}" for key, value in graph["cache"].items())
    rows["weights"] = ", ".join(f"{dtype} {size_text(size)}" for dtype, size in graph["initializer_bytes"].items())
    _fill(head, rows)
    nodes = Table("node", "count", title=f"Nodes of {role} ({graph['node_total']})")
    for name, count in graph["node_counts"].items():
        nodes.add_row(_plain(name), str(count))
    return [head, nodes]


def _tensor_text(item: dict[str, Any]) -> str:
    return f"{item['name']}: {item['dtype']} ({', '.join(str(dim) for dim in item['shape'])})"


def _fill(table: Table, rows: dict[str, str]) -> None:
    for key, value in rows.items():
        table.add_row(_plain(key), _plain(value))


def _plain(text: str) -> str:
    """`text` without meaning to rich: names from a bundle may hold square brackets."""
    from rich.markup import escape

    return escape(text)
