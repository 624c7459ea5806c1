"""Bench: percentiles, the chart, and the cost of decoding without a cache, on a fake decoder."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from edge_convert.runtime.bundle import Bundle
from edge_convert.validate import figures
from edge_convert.validate.bench import (
    Bench,
    BenchSettings,
    _cached_run,
    _uncached_run,
    bench_bundle,
    chart,
    ends,
    percentiles,
    sentences,
)


class FakeDecoder:
    """Costs 20 µs a token of input; remembers what it was asked."""

    context_length = 1000

    def __init__(self, session: Any = None) -> None:
        self.prefills: list[int] = []
        self.steps = 0

    def reset(self) -> None:
        pass

    def prefill(self, ids: Any) -> Any:
        assert ids.dtype == np.int64
        self.prefills.append(len(ids))
        time.sleep(2e-5 * len(ids))
        return np.eye(1, 7, 3)[0]

    def step(self, token: int) -> Any:
        assert token == 3
        self.steps += 1
        return np.eye(1, 7, 3)[0]


def test_cached_run_prefills_once() -> None:
    decoder = FakeDecoder()
    prefill_ms, times = _cached_run(decoder, np.arange(10, dtype=np.int64), 5)  # type: ignore[arg-type]
    assert decoder.prefills == [10]
    assert decoder.steps == len(times) == 5
    assert prefill_ms > 0


def test_uncached_run_pays_for_the_whole_sequence_each_token() -> None:
    decoder = FakeDecoder()
    _, times = _uncached_run(decoder, np.arange(10, dtype=np.int64), 4)  # type: ignore[arg-type]
    assert decoder.prefills == [10, 11, 12, 13, 14]
    assert decoder.steps == 0
    assert len(times) == 4


def test_percentiles_are_ordered_and_exact_for_one_value() -> None:
    assert percentiles([4.0]) == {"p50": 4.0, "p90": 4.0, "p99": 4.0}
    values = percentiles([float(value) for value in range(101)])
    assert values == pytest.approx({"p50": 50.0, "p90": 90.0, "p99": 99.0})


def test_chart_has_one_bar_per_group_and_grows() -> None:
    text = chart([(position, float(position)) for position in range(1, 101)], width=20, rows=4)
    bars = [line.count("█") for line in text.splitlines()[1:]]
    assert len(bars) == 4
    assert bars == sorted(bars)
    assert bars[-1] == 20
    assert chart([]) == ""


def measure(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[Bench, FakeDecoder]:
    """A bench of the fake decoder."""
    decoder = FakeDecoder()
    monkeypatch.setattr("edge_convert.runtime.generate.Decoder", lambda session: decoder)
    session = SimpleNamespace(spec=SimpleNamespace(outputs=()), providers=("CPUExecutionProvider",), threads=2)
    manifest = SimpleNamespace(task="text-generation", target="cpu", precision="int8")
    bundle = SimpleNamespace(manifest=manifest, session=lambda role, profile, threads: session)
    return bench_bundle(cast("Bundle", bundle), BenchSettings(prompt_tokens=10, tokens=4, **settings)), decoder


def test_without_the_cache_the_warm_up_is_short_and_the_cached_run_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    found, decoder = measure(monkeypatch, runs=1, warmup=1, cache=False)
    # One token to warm up, the run, and the prefills of the cached warm-up and run.
    assert decoder.prefills == [10, 11, 10, 11, 12, 13, 14, 10, 10]
    assert found.measurements["cache_speedup"] > 1
    assert [position for position, _ in found.series] == [position for position, _ in found.cached_series]
    growth, ratio = sentences(found)
    assert growth.startswith("A token takes ")
    assert ratio.startswith("Cached ")
    assert ratio.endswith("x at 11 to 14 tokens.")


def test_with_the_cache_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = measure(monkeypatch, runs=2, warmup=0)
    assert found.cached_series == ()
    assert len(sentences(found)) == 1


def test_the_sentences_compare_rates_and_ends() -> None:
    series = tuple((100 + index, 80.0 + index) for index in range(1, 9))
    cached = tuple((100 + index, 7.3) for index in range(1, 9))
    bench = Bench("text-generation", "m", "cpu", "int8", (), 2, BenchSettings(), {}, series, cached)
    assert ends(series) == (81.5, 87.5)
    assert sentences(bench) == [
        "A token takes 81.5 ms at 101 tokens and 87.5 ms at 108: 1.074x.",
        "Cached 137 tokens/s, without 11.8 tokens/s: 12x at 101 to 108 tokens.",
    ]


def test_names_are_those_of_a_validation() -> None:
    spread = {"p50": 7.0, "p90": 8.0, "p99": 9.0}
    assert figures.rows({"token_ms": spread | {"samples": 126}}) == figures.rows({"token_ms": spread})
    assert figures.rows({"batch_frames_per_s": 10.0}) == [("frames in batches", "10", "frames/s")]
