"""`--precision auto`: candidates are built, measured on calibration inputs and refused or taken, cheapest first.

What was measured is written line by line beside the kept exports, so a search that was interrupted goes on
where it stopped. Nothing here knows a task: how to build and how to measure come from the recipe.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from edge_convert.convert.export_cache import cache_folder, export_key
from edge_convert.convert.recipe import Exported, Found, Request

# Of the room between a bound and a perfect value: other inputs than those of the search scatter.
MARGIN = 0.8
_CHANCE = 1.645  # standard deviations: a share as low or lower comes up once in twenty counts
Graphs = dict[str, Exported]
Measure = Callable[[Graphs], dict[str, float]]
Build = Callable[[Path], Graphs]


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate: its name, the bytes of its graphs, what was measured on calibration inputs, and why it was
    refused ("" if it was not)."""

    name: str
    bytes: int
    metrics: dict[str, float]
    refused: str = ""


class Journal:
    """Measured values by name, one JSON line each, appended as they come; in memory only if `path` is None."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._values: dict[str, Any] = {}
        if path is not None and path.is_file():
            for line in path.read_text("utf-8", errors="replace").splitlines():
                try:
                    name, value = json.loads(line)
                except ValueError:  # the line that an interrupt cut
                    continue
                self._values[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> Any:
        """The value of `name`, which must be there."""
        return self._values[name]

    def put(self, name: str, value: Any) -> None:
        """Keep `value`, which JSON can hold, under `name`."""
        self._values[name] = value
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([name, value]) + "\n")


@dataclass(slots=True)
class Search:
    """The candidates tried so far, within `bounds` (`<metric>_min`, `<metric>_max`) drawn in by `MARGIN` (`limit`).

    `folder` is where candidates are built, one at a time; `notes` are for the report. `costs` are those of single nodes,
    where they were measured: how far quantising that node alone moves the output. `counted`: on how many inputs a metric
    that is a share was counted, where they are few.
    """

    bounds: Mapping[str, float]
    folder: Path
    journal: Journal
    progress: Callable[[str], None]
    tried: list[Trial] = field(default_factory=list)
    costs: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    counted: Mapping[str, int] = field(default_factory=dict)
    _builds: dict[str, Build] = field(default_factory=dict)
    _last: tuple[str, Graphs] | None = None

    def attempt(self, name: str, build: Build, measure: Measure) -> Trial:
        """Build and measure the candidate `name`, or take what the journal has of it."""
        self._builds[name] = build
        key = f"trial {name}"
        if key in self.journal:
            trial = Trial(**self.journal.get(key))
        else:
            self.progress(f"trying {name}")
            graphs = self._built(name)
            metrics = measure(graphs)
            trial = Trial(
                name, sum(map(graph_bytes, graphs.values())), metrics, refusal(metrics, self.bounds, self.counted)
            )
            self.journal.put(key, asdict(trial))
        self.progress(f"measured {name}: {_told(trial)}")
        self.tried.append(trial)
        return trial

    def pass_over(self, trial: Trial, reason: str) -> None:
        """Let a candidate that was tried count as refused for `reason`, here and in the record."""
        self.tried[self.tried.index(trial)] = replace(trial, refused=reason)

    def take(self, trial: Trial) -> Graphs:
        """The graphs of a candidate that was tried; built again unless it was the last."""
        if self._last is not None and self._last[0] == trial.name:
            return self._last[1]
        self.progress(f"writing {trial.name}")
        return self._built(trial.name)

    def found(self) -> Found:
        """The best candidate's graphs and the record of the search."""
        best = self.best()
        record: dict[str, Any] = {
            "chosen": best.name,
            "bounds": {name: limit(name, bound, self.counted) for name, bound in self.bounds.items()},
            "tried": [asdict(trial) for trial in self.tried],
        }
        if self.costs:
            record["costs"] = self.costs
        graphs = self.take(best)
        for graph in graphs.values():
            record.update(graph.measured)
        return Found(graphs, record, tuple(self.notes))

    def best(self) -> Trial:
        """The smallest candidate that is within the bounds; if none is, the one that misses them least."""
        passing = [trial for trial in self.tried if not trial.refused]
        if passing:
            return min(passing, key=lambda trial: trial.bytes)
        return min(self.tried, key=lambda trial: excess(trial.metrics, self.bounds))

    def _built(self, name: str) -> Graphs:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        graphs = self._builds[name](self.folder)
        self._last = name, graphs
        return graphs


def open_journal(request: Request, task: str, inputs: object) -> Journal:
    """The journal of this search: of the same source, target, code, libraries, bounds and calibration inputs."""
    place = cache_folder()
    if place is None or request.source.kind == "module":
        return Journal(None)
    bounds = request.profile.gate_bounds(task, request.precision)
    facts = json.dumps([export_key(request, task), bounds, inputs], sort_keys=True)
    return Journal(place / "searches" / f"{hashlib.sha256(facts.encode()).hexdigest()}.jsonl")


def refusal(metrics: Mapping[str, float], bounds: Mapping[str, float], counted: Mapping[str, int] | None = None) -> str:
    """Why `metrics` are outside the bounds (`limit`); "" if they are inside."""
    for name, bound in bounds.items():
        metric, kind = name[:-4], name[-3:]
        if metric not in metrics:
            continue
        value, needed = metrics[metric], limit(name, bound, counted or {})
        if not math.isfinite(value) or (value > needed if kind == "max" else value < needed):
            return f"{metric} {value:.4g}, {'at most' if kind == 'max' else 'at least'} {needed:.4g} is needed"
    return ""


def excess(metrics: Mapping[str, float], bounds: Mapping[str, float]) -> float:
    """The largest share of the room between a perfect value and its bound that a metric takes (1: at the bound)."""
    shares = [0.0]
    for name, bound in bounds.items():
        metric, kind = name[:-4], name[-3:]
        if metric in metrics:
            perfect = _perfect(metric, kind)
            share = (metrics[metric] - perfect) / (bound - perfect) if bound != perfect else 0.0
            shares.append(share if math.isfinite(share) else math.inf)
    return max(shares)


def graph_bytes(graph: Exported) -> int:
    """Bytes of a graph's file and of its external data."""
    return sum(file.stat().st_size for file in graph.path.parent.glob(f"{graph.path.name}*"))


def limit(name: str, bound: float, counted: Mapping[str, int]) -> float:
    """What a candidate needs: the bound drawn in, and of a share in `counted` as much less as chance explains.

    A share p of n inputs has the standard deviation sqrt(p (1 - p) / n) (binomial); what is refused misses by more.
    """
    value = drawn_in(name, bound)
    inputs = counted.get(name.removesuffix("_min"), 0)
    return value - _CHANCE * math.sqrt(max(value * (1 - value), 0.0) / inputs) if inputs else value


def drawn_in(name: str, bound: float) -> float:
    """The bound called `name` (`<metric>_max` or `_min`), moved by 1 - `MARGIN` of the way to a perfect value."""
    perfect = _perfect(name[:-4], name[-3:])
    return perfect + MARGIN * (bound - perfect)


def _perfect(metric: str, kind: str) -> float:
    """The value of a graph that equals the original: 1 for shares, cosines and ratios, 0 for errors."""
    return 1.0 if kind == "min" or metric.endswith("_ratio") else 0.0


def _told(trial: Trial) -> str:
    figures = ", ".join(f"{name} {value:.4g}" for name, value in trial.metrics.items())
    outcome = f"refused ({trial.refused})" if trial.refused else "within the bounds"
    return f"{trial.bytes / 1e6:.1f} MB, {figures}: {outcome}"
