"""The report of a validation: gates, measurements, environment. JSON is the source of every other form."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edge_convert.runtime.errors import BundleError
from edge_convert.validate import figures
from edge_convert.validate.gates import Gate, Outcome

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

    from edge_convert.runtime.bundle import Bundle

REPORT_VERSION = 1
REPORT_FILE = "report.json"
_STYLES = {"passed": "green", "failed": "red", "not_run": "yellow"}
_SIGNS = {"min": "≥", "max": "≤", "equal": "="}
_ON_CPU = " (on CPU)"
# What says how something was measured, not how much it was: one line below the numbers.
_FACTS = {
    "prompts": "{} prompts",
    "texts": "{} texts",
    "images": "{} images",
    "tokens": "{} tokens",
    "prompt_tokens": "{} prompt tokens",
    "warm_up": "warm-up {}",
    "threads": "{} threads",
    "providers": "{}",
}


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

    def may_replace(self, stored: Report) -> bool:
        """True if this report failed, or ran every gate that `stored` ran: nothing that was known gets lost."""
        ran = {(gate.name, gate.metric) for gate in self.gates if gate.outcome != "not_run"}
        known = {(gate.name, gate.metric) for gate in stored.gates if gate.outcome != "not_run"}
        return self.failed or known <= ran

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


def stored_report(bundle: Bundle) -> Report | None:
    """The report in `bundle`; None if it has none, or one of another version."""
    if REPORT_FILE not in bundle.manifest.files:
        return None
    try:
        return Report.from_json(bundle.file(REPORT_FILE).read_text("utf-8"))
    except ReportError:
        return None


def exit_code(report: Report, strict: bool = False) -> int:
    """0, or 3 if a gate failed; `strict` also gives 3 if a gate was not run or there is none."""
    return 3 if report.failed or (strict and report.outcome != "passed") else 0


def report_table(report: Report) -> list[Group]:
    """What a terminal shows: the gates with their reasons as footnotes, then the measurements, if there are any."""
    from rich.text import Text

    shown = [_gates(report)]
    for group, values in report.measurements.items():
        flat = values if isinstance(values, dict) else {group: values}
        facts = {key: value for key, value in flat.items() if key in _FACTS}
        measured = figures.table("measurement", "value", "unit", right=("value",))
        for what, value, unit in figures.rows({key: value for key, value in flat.items() if key not in _FACTS}):
            measured.add_row(Text(what), Text(value), unit)
        below = ", ".join(_FACTS[key].format(figures.text(value)) for key, value in facts.items())
        shown.append(figures.titled(group, measured, *([Text(below, style="dim")] if below else [])))
    return shown


def verdict(report: Report, *, size_bytes: int, seconds: float) -> Text:
    """The last line of a validation: the outcome, the gates counted, the bundle's size, and how long it took."""
    from rich.text import Text

    words = {"passed": "passed", "failed": "failed", "not_run": "passed in part"}
    word = words[report.outcome] if report.failed or report.count("passed") else "not run"
    gates = "gate" if report.count("passed") == 1 else "gates"
    counts = (
        f"{report.count('passed')} {gates} passed, {report.count('failed')} failed, {report.count('not_run')} not run"
    )
    details = f": {counts} · {figures.size(size_bytes)} · {figures.duration(seconds)}"
    return Text.assemble((word, f"bold {_STYLES[report.outcome]}"), details)


def _gates(report: Report) -> Group:
    from rich.text import Text

    table = figures.table("gate", "metric", "value", "bound", "outcome", right=("value", "bound"))
    for index in (1, 2, 3, 4):
        table.columns[index].no_wrap = True
    # A label that all measured gates have is said once, above them.
    measured = [gate for gate in report.gates if gate.value is not None]
    on_cpu = bool(measured) and all(gate.name.endswith(_ON_CPU) for gate in measured)
    reasons: list[str] = []
    for gate in report.gates:
        value, bound = "–", "" if gate.bound is None else figures.number(gate.bound, 6)
        if gate.value is not None and gate.bound is not None:
            value, bound = figures.apart(gate.value, gate.bound)
        elif gate.value is not None:
            value = figures.number(gate.value)
        if gate.reason and gate.reason not in reasons:
            reasons.append(gate.reason)
        mark = f" [{reasons.index(gate.reason) + 1}]" if gate.reason else ""
        outcome = Text.assemble((gate.outcome.replace("_", " "), _STYLES[gate.outcome]), mark)
        name = gate.name.removesuffix(_ON_CPU) if on_cpu else gate.name
        sign = f"{_SIGNS[gate.comparison]} " if bound else ""
        table.add_row(Text(name), Text(gate.metric), value, f"{sign}{bound}", outcome)
    title = f"{report.task} · {report.precision} · {report.target}{' · measured on the CPU' if on_cpu else ''}"
    return figures.titled(title, table, *([figures.footnotes(reasons)] if reasons else []))


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
