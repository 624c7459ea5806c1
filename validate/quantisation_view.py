"""How a bundle's precisions were decided, as tables and a picture for a terminal: from the manifest only."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edge_convert.validate import figures

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from edge_convert.runtime.manifest import GraphSpec, Manifest

_LAYER = re.compile(r"layers?[./](\d+)[./](.+?)(?:[./](?:MatMul|Gemm|Conv)[^./]*)?$")
# How a format is drawn: one character and a colour.
_MARKS = {"int4": ("4", "green"), "int8": ("8", "yellow"), "fp16": ("h", "magenta"), "fp32": ("F", "red")}
# What the costs of single nodes are measured in (`search.Search.costs`).
_COST_UNITS = {
    "text-generation": "nats of KL divergence",
    "feature-extraction": "of 1 - cosine, summed over a batch",
    "image-classification": "of the output's square",
}
_FEW = 6
_MANY = 30
_BARS = "▁▂▃▄▅▆▇█"


def tables(manifest: Manifest) -> list[RenderableType]:
    """The candidates of the search, how ranges were calibrated, and each graph's layers with their formats, as far as they
    were measured; and the nodes that stay in fp32 where the others do not."""
    record = manifest.quantisation
    shown: list[RenderableType] = []
    if "tried" in record:
        shown.append(figures.titled("precision search (on calibration inputs)", _tried(record)))
    if calibration := record.get("calibration"):
        shown.append(figures.titled("ranges of activations (on calibration inputs)", _methods(calibration)))
    unit = _COST_UNITS[manifest.task]
    for role, graph in manifest.graphs.items():
        if record and (picture := _picture(graph, record.get("costs") or {}, unit)):
            shown.append(figures.titled(f"weights of {role}", *picture))
        if graph.fp32_nodes:
            shown.append(figures.titled(f"computed in fp32 in {role}", _islands(graph)))
    return shown


def _methods(calibration: Mapping[str, Any]) -> RenderableType:
    from rich.text import Text

    columns = ("error, weights to nearest", "error, weights rounded together")
    table = figures.table("method", *columns, "outcome", right=columns)
    for method, error in calibration["errors_nearest"].items():
        rounded = calibration["errors"].get(method)
        outcome = Text("chosen", style="bold green") if method == calibration["chosen"] else Text("")
        table.add_row(method, figures.number(error), "" if rounded is None else figures.number(rounded), outcome)
    return table


def _tried(record: Mapping[str, Any]) -> RenderableType:
    from rich.text import Text

    names = list(dict.fromkeys(name for trial in record["tried"] for name in trial["metrics"]))
    table = figures.table("candidate", "graph", *names, "outcome", right=("graph", *names))
    for trial in record["tried"]:
        values = [figures.number(trial["metrics"][name]) if name in trial["metrics"] else "" for name in names]
        outcome = Text("refused: " + trial["refused"], style="red") if trial["refused"] else Text("within the bounds")
        if trial["name"] == record["chosen"]:
            outcome = Text("chosen" if not trial["refused"] else f"best, but {trial['refused']}", style="bold green")
        table.add_row(trial["name"], figures.size(trial["bytes"]), *values, outcome)
    return table


def _picture(graph: GraphSpec, costs: Mapping[str, float], unit: str) -> list[RenderableType]:
    """One row for each kind of layer and one column for each layer, and bars of what quantising it alone costs.

    A graph whose nodes are not named by layers has one row for all of those that were measured, in their order.
    """
    from rich.text import Text

    grid: dict[str, dict[int, tuple[str, str]]] = {}
    others: list[str] = []
    for node, stored in graph.formats.items():
        match = _LAYER.search(node)
        if match is None and node in costs:
            grid.setdefault("layers", {})[len(grid.get("layers", {}))] = (node, stored)
        elif match is None:
            others.append(f"{_short(node)} {stored}")
        else:
            grid.setdefault(match[2], {})[int(match[1])] = (node, stored)
    rows: dict[str, Text] = {}
    count = 1 + max((layer for cells in grid.values() for layer in cells), default=-1)
    for kind, cells in grid.items():
        if len(cells) < 2 or not {stored.split()[0] for _, stored in cells.values()} <= set(_MARKS):
            others += [f"{_short(node)} {stored}" for node, stored in cells.values()]
            continue
        rows[kind] = Text()
        for layer in range(count):
            mark, colour = _MARKS[cells[layer][1].split()[0]] if layer in cells else (" ", "")
            rows[kind].append(mark, colour)
        if any(node in costs for node, _ in cells.values()):
            rows[f"{kind} alone costs"] = Text(
                _bars([costs.get(cells[i][0], 0) if i in cells else 0 for i in range(count)], costs)
            )
    shown: list[RenderableType] = []
    if rows:
        table = figures.table()
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for kind, text in rows.items():
            table.add_row(kind, text)
        legend = "one column a layer: 4 int4, 8 int8, h fp16, F fp32"
        if costs:
            legend += f"; bars: what quantising it alone costs, log scale, highest {max(costs.values()):.2g} {unit}"
        shown += [table, Text(legend, style="dim")]
    if others:
        listed = others if len(others) <= _FEW else _counted(others)
        shown.append(Text(f"others: {', '.join(listed)}"))
    return shown


def _islands(graph: GraphSpec) -> RenderableType:
    """How many nodes compute in fp32, and their names."""
    from rich.text import Text

    names = graph.fp32_nodes
    more = f" and {len(names) - _MANY} more (--json)" if len(names) > _MANY else ""
    products = ", ".join(f"{count} in {kind}" for kind, count in graph.products.items())
    return Text(f"{len(names)} of {sum(graph.node_counts.values())} nodes (products: {products}): "
                f"{', '.join(names[:_MANY])}{more}")  # fmt: skip


def _short(node: str) -> str:
    """The telling part of a node's name: without the operator's type and numbers of steps at its end."""
    parts = [part for part in re.split(r"[./]", node) if part]
    while len(parts) > 1 and re.fullmatch(r"(MatMul|Gemm|Conv|Gather|int8|node)\w*", parts[-1]):
        parts.pop()
    return parts[-1]


def _counted(others: list[str]) -> list[str]:
    """`others` as counts by format."""
    counts = Counter(text.split(" ", 1)[1] for text in others)
    return [f"{number} {stored}" for stored, number in counts.most_common()]


def _bars(values: list[float], costs: Mapping[str, float]) -> str:
    """One bar a value, the logarithm between the lowest and the highest cost."""
    known = [value for value in costs.values() if value > 0]
    if not known:
        return " " * len(values)
    low, high = math.log(min(known)), math.log(max(known))
    span = max(high - low, 1e-9)
    return "".join(
        _BARS[round((math.log(value) - low) / span * (len(_BARS) - 1))] if value > 0 else " " for value in values
    )
