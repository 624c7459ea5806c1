"""What is inside a bundle, as plain values and as tables. Reads the manifest only; runs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edge_convert.validate import figures

if TYPE_CHECKING:
    from rich.console import Group
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
        "quantisation": manifest.quantisation,
        "tools": manifest.tools,
        "warnings": list(manifest.warnings),
        "extra": manifest.extra,
    }


def tables(description: dict[str, Any]) -> list[Group]:
    """What a terminal shows of one description made by `describe`."""
    source = description["source"]
    rows = {key: str(description[key]) for key in ("path", "task", "target", "precision", "created")}
    rows["size"] = figures.size(description["total_bytes"])
    rows["made with"] = ", ".join(f"{name} {version}" for name, version in description["tools"].items()) or "unknown"
    for index, warning in enumerate(description["warnings"], start=1):
        rows[f"warning {index}"] = str(warning)
    origin = {key.replace("sha256", "SHA-256"): str(value) for key, value in source.items() if value is not None}
    result = [figures.titled("Bundle", figures.pairs(rows)), figures.titled("Source", figures.pairs(origin))]
    result += [_graph_shown(role, graph) for role, graph in description["graphs"].items()]
    processing = {key: figures.text(value) for key, value in description["processing"].items()}
    result.append(figures.titled("Processing", figures.pairs(processing)))
    return [*result, figures.titled("Files (SHA-256 below each name)", _files(description["files"]))]


def _files(files: dict[str, dict[str, Any]]) -> Table:
    from rich.text import Text

    table = figures.table("file", "size", right=("size",))
    for name, spec in files.items():
        table.add_row(Text.assemble(name, ("\n" + spec["sha256"], "dim")), figures.size(spec["size"]))
    return table


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
        "formats": spec.formats,
        "products": spec.products,
        "fp32_nodes": list(spec.fp32_nodes),
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


def _graph_shown(role: str, graph: dict[str, Any]) -> Group:
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in graph["opsets"].items())
    rows = {"file": graph["file"], "ONNX IR": str(graph["ir_version"]), "opsets": opsets}
    for direction in ("inputs", "outputs"):
        shown = [_tensor_text(item) for item in graph[direction]]
        rows[direction] = "\n".join(shown if len(shown) <= 6 else [*shown[:4], f"… and {len(shown) - 4} more (--json)"])
    if graph["cache"]:
        rows["cache"] = ", ".join(
            f"{key.replace('_', ' ')} {figures.text(value)}" for key, value in graph["cache"].items()
        )
    rows["weights"] = ", ".join(f"{dtype} {figures.size(size)}" for dtype, size in graph["initializer_bytes"].items())
    if graph["products"]:
        rows["products"] = ", ".join(f"{count} in {kind}" for kind, count in graph["products"].items())
    nodes = ", ".join(f"{count} {name}" for name, count in graph["node_counts"].items())
    rows["nodes"] = f"{graph['node_total']}: {nodes}"
    return figures.titled(f"Graph {role}", figures.pairs(rows))


def _tensor_text(item: dict[str, Any]) -> str:
    return f"{item['name']}: {item['dtype']} ({', '.join(str(dim) for dim in item['shape'])})"
