"""Bench: percentiles, the chart, and the cost of decoding without a cache, on a fake decoder."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from edge_convert.validate.bench import _cached_run, _uncached_run, chart, percentiles


class FakeDecoder:
    """Costs 20 µs a token of input; remembers what it was asked."""

    def __init__(self) -> None:
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
