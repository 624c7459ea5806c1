"""Gates: a metric, a bound and an outcome. What was not measured is never called passed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from edge_convert.runtime.errors import EdgeError

Comparison = Literal["min", "max", "equal"]
Outcome = Literal["passed", "failed", "not_run"]


@dataclass(frozen=True, slots=True)
class Gate:
    """One question with a bound.

    `comparison` says how `value` must lie to `bound`: at least ("min"), at most ("max") or "equal".
    `reason` says why the bound is what it is, or why the gate failed or was not run.
    """

    name: str
    metric: str
    value: float | None
    bound: float | None
    comparison: Comparison
    outcome: Outcome
    reason: str = ""

    def __post_init__(self) -> None:
        if self.outcome not in get_args(Outcome) or self.comparison not in get_args(Comparison):
            raise ValueError(f"gate {self.name!r} has outcome {self.outcome!r} and comparison {self.comparison!r}")
        if self.outcome == "passed" and (self.value is None or self.bound is None):
            raise ValueError(f"gate {self.name!r} cannot have passed without a value and a bound")
        if self.outcome == "not_run" and not self.reason:
            raise ValueError(f"gate {self.name!r} was not run and gives no reason")


def judge(name: str, metric: str, *, value: float, bound: float, comparison: Comparison, reason: str = "") -> Gate:
    """The gate of a measured value; a value that is not a finite number fails."""
    value = float(value)
    if not math.isfinite(value):
        text = f"the measured value is {value}, not a finite number"
        return Gate(name, metric, None, bound, comparison, "failed", text)
    holds = {"min": value >= bound, "max": value <= bound, "equal": value == bound}[comparison]
    return Gate(name, metric, value, bound, comparison, "passed" if holds else "failed", reason)


@dataclass(slots=True)
class GateList:
    """Collects gates under one label and the target's declared bounds (`<metric>_min`, `<metric>_max`)."""

    bounds: Mapping[str, float]
    label: str = ""
    gates: list[Gate] = field(default_factory=list)

    def declared(self, name: str, metric: str, value: float, reason: str = "") -> None:
        """Judge `value` by the target's bound of `metric`; not run if the target declares none."""
        comparison, bound = self._bound(metric)
        self._judged(name, metric, value, comparison, bound, reason)

    def declared_share(self, name: str, metric: str, value: float, samples: int) -> None:
        """Like `declared` for a share of few samples: the bound is eased by two standard errors of a share.

        The standard error of a share p of n independent samples is sqrt(p (1 - p) / n).
        """
        comparison, bound = self._bound(metric)
        reason = f"{bound} eased by two standard errors of {samples} samples"
        if bound is not None:
            slack = 2 * math.sqrt(bound * (1 - bound) / max(samples, 1))
            bound = bound - slack if comparison == "min" else bound + slack
        self._judged(name, metric, value, comparison, bound, reason)

    def _judged(
        self, name: str, metric: str, value: float, comparison: Comparison, bound: float | None, reason: str
    ) -> None:
        if bound is None:
            self.not_run(name, metric, "the target declares no bound for it")
            return
        self._add(judge(self._name(name), metric, value=value, bound=bound, comparison=comparison, reason=reason))

    def at_most(self, name: str, metric: str, value: float, bound: float, reason: str = "") -> None:
        """Judge that `value` is not above `bound`."""
        self._add(judge(self._name(name), metric, value=value, bound=bound, comparison="max", reason=reason))

    def at_least(self, name: str, metric: str, value: float, bound: float, reason: str = "") -> None:
        """Judge that `value` is not below `bound`."""
        self._add(judge(self._name(name), metric, value=value, bound=bound, comparison="min", reason=reason))

    def equal(self, name: str, metric: str, differences: float, reason: str = "") -> None:
        """Judge that there are no differences."""
        self._add(judge(self._name(name), metric, value=differences, bound=0, comparison="equal", reason=reason))

    def not_run(self, name: str, metric: str, reason: str) -> None:
        """Record that something was not measured, and why."""
        comparison, bound = self._bound(metric)
        self._add(Gate(self._name(name), metric, None, bound, comparison, "not_run", reason))

    def attempt(self, name: str, metric: str, check: Callable[[], None]) -> None:
        """Run `check`; an error that the project raises on purpose becomes a failed gate."""
        try:
            check()
        except EdgeError as error:
            self._add(Gate(self._name(name), metric, None, None, "equal", "failed", str(error)))

    def _bound(self, metric: str) -> tuple[Comparison, float | None]:
        if f"{metric}_min" in self.bounds:
            return "min", self.bounds[f"{metric}_min"]
        return "max", self.bounds.get(f"{metric}_max")

    def _name(self, name: str) -> str:
        return f"{name} {self.label}".strip()

    def _add(self, gate: Gate) -> None:
        self.gates.append(gate)
