from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from edge_convert.runtime.errors import EdgeError
from edge_convert.validate import figures
from edge_convert.validate.gates import Gate, GateList, judge
from edge_convert.validate.report import Report, exit_code, report_table, verdict

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


def shown(value, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    for table in report_table(value):
        console.print(table)
    return console.export_text()


def test_table_shows_every_gate_and_measurement():
    text = shown(report(PASSED, FAILED, NOT_RUN))
    for word in ("passed", "failed", "not run [1]", "[1]  CUDAExecutionProvider is not", "time to first token", "3.50"):
        assert word in text
    assert re.search(r"time to first token +3.50 +ms", text)


def test_a_long_name_or_reason_is_never_cut_at_80_columns():
    name, reason = "preprocessing = original (on CPU)", "because " * 40 + "so"
    gates = (
        Gate(name, "probability_error_mean", 0.012345, 0.01, "max", "failed", reason),
        Gate("batch = single (on CPU)", "top1_agreement", 0.97, 0.95, "min", "passed", reason),
        Gate("latency", "decode_tokens_per_s", None, 20.0, "min", "not_run", "other"),
    )
    text = shown(report(*gates))
    assert max(map(len, text.splitlines())) <= 80
    assert "measured on the CPU" in text
    assert "(on CPU)" not in text
    assert text.count("[1]") == 3  # two gates and one footnote
    for word in ("preprocessing", "probability_error_mean", "decode_tokens_per_s", "failed [1]", "not run [2]", "so"):
        assert word in text
    assert "…" not in text


def test_measurements_are_compact_have_units_and_say_none():
    spread = {"p50": 7.172186, "p90": 7.817306, "p99": 10.484323, "samples": 126}
    accuracy = {"prompts": 16, "kl_nats": {"mean": 0.004994875}, "greedy_first_difference": None}
    latency = {"token_ms": spread, "cache_mb": 90.0, "threads": 2, "providers": ["A", "B"]}
    text = shown(Report("t", "cpu", "int8", (), {"accuracy": accuracy, "latency": latency}))
    assert re.search(r"KL divergence, mean +0.00499 +nats", text)
    assert re.search(r"greedy first difference +none", text)
    assert re.search(r"time per token, p50 / p90 / p99 +7.17 / 7.82 / 10.5 +ms", text)
    assert re.search(r"cache +90 +MiB", text)
    assert "2 threads, A, B" in text
    assert "16 prompts" in text


@pytest.mark.parametrize(
    ("gates", "word"),
    [
        ((PASSED,), "passed: 1 gate passed, 0 failed, 0 not run"),
        ((PASSED, NOT_RUN), "passed in part: 1 gate passed, 0 failed, 1 not run"),
        ((NOT_RUN,), "not run: 0 gates passed, 0 failed, 1 not run"),
        ((PASSED, FAILED), "failed: 1 gate passed, 1 failed, 0 not run"),
    ],
)
def test_verdict(gates, word):
    text = verdict(report(*gates), size_bytes=154 * 2**20, seconds=39.2)
    assert text.plain == f"{word} · 154 MiB · 39 s"
    assert text.spans  # coloured on a terminal


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (90.0, "90"), (1145, "1145"), (137.2237, "137"), (7.172186, "7.17"), (779.69, "780"),
        (12345.6, "12346"), (0.004994875, "0.00499"), (4.0314e-07, "4.03e-07"), (1.00254, "1.003"), (0.99999, "0.99999"),
        (0.9949759, "0.995"), (-0.5, "-0.500"), (float("inf"), "inf"), (1e300, "1.00e+300"), (999.99, "1000"),
    ],
)  # fmt: skip
def test_number(value, text):
    assert figures.number(value) == text


@pytest.mark.parametrize(
    ("value", "bound", "texts"),
    [
        (0.93996, 0.94, ("0.93996", "0.94")),
        (0.94, 0.94, ("0.940", "0.94")),
        (0.9999899, 0.99999, ("0.9999899", "0.99999")),
        (1.0002, 1.001, ("1.000", "1.001")),
        (0.5, 0.5712305, ("0.500", "0.571")),
        (0.57123, 0.5712305, ("0.5712300", "0.5712305")),
        (0.0, 1e-6, ("0", "1e-06")),
    ],
)
def test_value_and_bound_can_be_told_apart(value, bound, texts):
    found = figures.apart(value, bound)
    assert (found[0] != found[1]) or value == bound
    assert found == texts


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (368, "368 B"), (1536, "1.5 KiB"), (2048, "2 KiB"), (153.8e6, "147 MiB"), (2**33, "8 GiB")],
)
def test_size(count, text):
    assert figures.size(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.43, "0.4 s"), (39.2, "39 s"), (125, "2 min 5 s")])
def test_duration(seconds, text):
    assert figures.duration(seconds) == text


def test_text_of_plain_values():
    assert [figures.text(value) for value in (None, True, [1, 2], [], {"a": 1.5})] == [
        "none",
        "yes",
        "1, 2",
        "none",
        "a 1.50",
    ]


@pytest.mark.parametrize(("samples", "outcome"), [(100, "passed"), (100_000, "failed")])
def test_a_share_of_few_samples_is_eased_and_of_many_is_not(samples: int, outcome: str) -> None:
    gates = GateList({"top1_agreement_min": 0.6})
    gates.declared_share("golden logits", "top1_agreement", 0.55, samples)
    assert gates.gates[0].outcome == outcome
    assert "two standard errors" in gates.gates[0].reason
