from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from edge_convert.runtime.errors import EdgeError
from edge_convert.validate.gates import Gate, GateList, judge
from edge_convert.validate.report import Report, exit_code, report_table

PASSED = Gate("logits", "kl_mean", 0.1, 0.2, "max", "passed")
FAILED = Gate("logits", "kl_mean", 0.3, 0.2, "max", "failed")
NOT_RUN = Gate("latency", "ttft_ms", None, None, "max", "not_run", "CUDAExecutionProvider is not available here")


def report(*gates):
    return Report("text-generation", "cpu", "int8", gates, {"latency": {"ttft_ms": 3.5}}, {"threads": 2}, ("a note",))


@pytest.mark.parametrize(
    ("comparison", "value", "outcome"),
    [
        ("max", 1.0, "passed"),
        ("max", 1.1, "failed"),
        ("min", 1.0, "passed"),
        ("min", 0.9, "failed"),
        ("equal", 1.0, "passed"),
        ("equal", 1.1, "failed"),
        ("max", float("nan"), "failed"),
        ("min", float("inf"), "failed"),
        ("max", float("-inf"), "failed"),
    ],
)
def test_judge(comparison, value, outcome):
    assert judge("a", "b", value=value, bound=1.0, comparison=comparison).outcome == outcome


def test_a_gate_cannot_pass_without_a_value():
    with pytest.raises(ValueError, match="cannot have passed"):
        Gate("a", "b", None, 1.0, "max", "passed")


def test_a_gate_that_was_not_run_gives_a_reason():
    with pytest.raises(ValueError, match="no reason"):
        Gate("a", "b", None, 1.0, "max", "not_run")


def test_a_metric_without_a_bound_is_not_run():
    gates = GateList({})
    gates.declared("logits", "kl_mean", 0.0)
    assert gates.gates[0].outcome == "not_run"


def test_declared_bounds_and_label():
    gates = GateList({"kl_mean_max": 0.5, "top1_agreement_min": 0.9}, label="(on CPU)")
    gates.declared("logits", "kl_mean", 0.6)
    gates.declared("logits", "top1_agreement", 0.95)
    assert [gate.outcome for gate in gates.gates] == ["failed", "passed"]
    assert all(gate.name == "logits (on CPU)" for gate in gates.gates)


def test_an_error_becomes_a_failed_gate():
    def broken():
        raise EdgeError("the cache is gone")

    gates = GateList({})
    gates.attempt("invariants", "errors", broken)
    assert gates.gates[0].outcome == "failed"
    assert gates.gates[0].reason == "the cache is gone"


@pytest.mark.parametrize(
    ("gates", "outcome", "code", "strict"),
    [
        ((PASSED,), "passed", 0, 0),
        ((PASSED, NOT_RUN), "not_run", 0, 3),
        ((NOT_RUN,), "not_run", 0, 3),
        ((), "not_run", 0, 3),
        ((PASSED, FAILED, NOT_RUN), "failed", 3, 3),
    ],
)
def test_outcome_and_exit_code(gates, outcome, code, strict):
    value = report(*gates)
    assert value.outcome == outcome
    assert (exit_code(value), exit_code(value, strict=True)) == (code, strict)
    assert value.passed is (outcome != "failed")


def test_json_there_and_back():
    value = report(PASSED, FAILED, NOT_RUN)
    assert Report.from_json(value.to_json()) == value


def _changed(**changes):
    return json.dumps({**json.loads(report(PASSED).to_json()), **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        _changed(report_version=2),
        _changed(surprise=1),
        _changed(gates={}),
        _changed(gates=[1]),
        _changed(gates=[{"name": "a"}]),
        _changed(gates=[{**json.loads(report(PASSED).to_json())["gates"][0], "value": None}]),
        _changed(gates=[{**json.loads(report(PASSED).to_json())["gates"][0], "outcome": "fine"}]),
        _changed(gates=[{**json.loads(report(PASSED).to_json())["gates"][0], "bound": "1"}]),
        _changed(task=None),
    ],
)
def test_other_json_is_refused(text):
    with pytest.raises(EdgeError):
        Report.from_json(text)


def test_nan_is_never_written():
    with pytest.raises(ValueError, match="JSON"):
        Report("t", "cpu", "int8", (), {"x": float("nan")}).to_json()


def test_table_shows_every_gate_and_measurement():
    console = Console(width=200, record=True, file=io.StringIO())
    for table in report_table(report(PASSED, FAILED, NOT_RUN)):
        console.print(table)
    text = console.export_text()
    for word in (
        "passed",
        "failed",
        "not run",
        "CUDAExecutionProvider is not available here",
        "latency.ttft_ms",
        "3.5",
    ):
        assert word in text


@pytest.mark.parametrize(("samples", "outcome"), [(100, "passed"), (100_000, "failed")])
def test_a_share_of_few_samples_is_eased_and_of_many_is_not(samples: int, outcome: str) -> None:
    gates = GateList({"top1_agreement_min": 0.6})
    gates.declared_share("golden logits", "top1_agreement", 0.55, samples)
    assert gates.gates[0].outcome == outcome
    assert "two standard errors" in gates.gates[0].reason
