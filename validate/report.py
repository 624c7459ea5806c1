"""The report of a validation: gates, measurements, environment. JSON is the source of every other form."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edge_convert.runtime.errors import BundleError
from edge_convert.validate.gates import Gate, Outcome

if TYPE_CHECKING:
    from rich.table import Table

REPORT_VERSION = 1


class ReportError(BundleError):
    """report.json is not what its schema says."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured on one bundle.

    `measurements` and `environment` are plain JSON values; units are in the key names.
    """

    task: str
    target: str
    precision: str
    gates: tuple[Gate, ...]
    measurements: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """True if any gate failed."""
        return any(gate.outcome == "failed" for gate in self.gates)

    @property
    def passed(self) -> bool:
        """True if no gate failed; see `outcome` for whether all were run."""
        return not self.failed

    @property
    def outcome(self) -> Outcome:
        """`failed` if a gate failed, `passed` if every gate passed and there is one, else `not_run`."""
        if self.failed:
            return "failed"
        if self.gates and all(gate.outcome == "passed" for gate in self.gates):
            return "passed"
        return "not_run"

    def count(self, outcome: Outcome) -> int:
        """The number of gates with `outcome`."""
        return sum(gate.outcome == outcome for gate in self.gates)

    def to_json(self) -> str:
        """The report as indented JSON with a final newline; refuses NaN and infinities."""
        value = {"report_version": REPORT_VERSION, **dataclasses.asdict(self)}
        return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Parse and check; raises ReportError for another version, unknown or missing keys."""
        try:
            value = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ReportError(f"The report is not JSON: {error}. Run edge-convert validate again.") from error
        if not isinstance(value, dict) or value.pop("report_version", None) != REPORT_VERSION:
            raise ReportError(
                f"The report does not have version {REPORT_VERSION}, the one this edge-convert reads. "
                "Run edge-convert validate again."
            )
        _check_keys(cls, value, "report")
        _check_types(value)
        gates = tuple(_parse_gate(gate) for gate in value["gates"])
        return cls(**{**value, "gates": gates, "notes": tuple(value["notes"])})


def exit_code(report: Report, strict: bool = False) -> int:
    """0, or 3 if a gate failed; `strict` also gives 3 if a gate was not run or there is none."""
    return 3 if report.failed or (strict and report.outcome != "passed") else 0


def report_table(report: Report) -> list[Table]:
    """Tables for a terminal: the gates, then the measurements, if there are any."""
    from rich.table import Table
    from rich.text import Text

    styles = {"passed": "green", "failed": "bold red", "not_run": "yellow"}
    signs = {"min": "≥", "max": "≤", "equal": "="}
    gates = Table(title=f"{report.task} · {report.precision} · {report.target}", title_justify="left")
    for heading in ("gate", "metric"):
        gates.add_column(heading)
    gates.add_column("value", justify="right")
    gates.add_column("bound", justify="right")
    gates.add_column("outcome", no_wrap=True)
    gates.add_column("reason", overflow="fold")
    for gate in report.gates:
        bound = "" if gate.bound is None else f"{signs[gate.comparison]} {gate.bound:.6g}"
        outcome = Text(gate.outcome.replace("_", " "), style=styles[gate.outcome])
        gates.add_row(Text(gate.name), Text(gate.metric), _number(gate.value), bound, outcome, Text(gate.reason))
    measurements = Table(title="measurements", title_justify="left")
    measurements.add_column("what")
    measurements.add_column("value", justify="right", overflow="fold")
    for name, value in _flat(report.measurements):
        measurements.add_row(Text(name), Text(_number(value)))
    return [gates, measurements] if report.measurements else [gates]


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _flat(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, item in value.items():
        rows += _flat(item, f"{prefix}{key}.") if isinstance(item, dict) else [(f"{prefix}{key}", item)]
    return rows


def _parse_gate(value: Any) -> Gate:
    if not isinstance(value, dict):
        raise ReportError("A gate of the report is not an object. Run edge-convert validate again.")
    _check_keys(Gate, value, "gate")
    for key in ("value", "bound"):
        if not (value[key] is None or (isinstance(value[key], int | float) and not isinstance(value[key], bool))):
            raise ReportError(
                f"A gate of the report has a {key} that is not a number. Run edge-convert validate again."
            )
    try:
        return Gate(**value)
    except ValueError as error:
        raise ReportError(f"A gate of the report contradicts itself: {error}.") from error


def _check_keys(kind: type[Any], value: dict[str, Any], where: str) -> None:
    known = {item.name for item in dataclasses.fields(kind)}
    if set(value) != known:
        different = ", ".join(sorted(set(value) ^ known))
        raise ReportError(f"The {where} has unknown or missing keys: {different}. Run edge-convert validate again.")


def _check_types(value: dict[str, Any]) -> None:
    kinds: dict[str, type] = {
        "task": str, "target": str, "precision": str, "gates": list,
        "measurements": dict, "environment": dict, "notes": list,
    }  # fmt: skip
    for key, kind in kinds.items():
        if not isinstance(value[key], kind):
            raise ReportError(f"{key!r} of the report is not a {kind.__name__}. Run edge-convert validate again.")
