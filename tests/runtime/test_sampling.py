from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest

from edge_convert.runtime.errors import DeviceError, UsageError
from edge_convert.runtime.sampling import GenerationConfig, Sampler

LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))


def draws(config: GenerationConfig, count: int = 4000, logits: np.ndarray = LOGITS) -> Counter[int]:
    sampler = Sampler(config)
    return Counter(sampler(logits) for _ in range(count))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", True), ("temperature", -0.1),
        ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "hot"), ("top_k", -1),
        ("top_p", 0.0), ("top_p", 1.01), ("repetition_penalty", 0.0), ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1), ("seed", -1), ("seed", "x"), ("stop", ("",)), ("stop", (3,)), ("stop", 3),
        ("stop_token_ids", (-1,)), ("stop_token_ids", ("a",)), ("temperature", 100.1), ("temperature", 10**400),
        pytest.param("temperature", 10**5000, id="too long to write"), ("temperature", None), ("temperature", True), ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e39), ("repetition_penalty", float("nan")), ("top_p", 10**400),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        GenerationConfig(**{name: value})


def test_a_single_stop_string_and_lists_are_taken() -> None:
    config = GenerationConfig(stop="END", stop_token_ids=[np.int64(3)])  # type: ignore[arg-type]
    assert config.stop == ("END",)
    assert config.stop_token_ids == (3,)


def test_greedy_takes_the_largest_and_leaves_the_logits_alone() -> None:
    logits = LOGITS[::-1].copy()
    assert Sampler(GenerationConfig(repetition_penalty=1.3), [3])(logits) == 3
    np.testing.assert_array_equal(logits, LOGITS[::-1])


def test_draws_follow_the_distribution() -> None:
    counted = draws(GenerationConfig(temperature=1.0, seed=1), 20000)
    np.testing.assert_allclose([counted[i] / 20000 for i in range(4)], [0.5, 0.3, 0.15, 0.05], atol=0.015)


def test_temperature_sharpens_and_flattens() -> None:
    for temperature in (0.5, 2.0):
        counted = draws(GenerationConfig(temperature=temperature, seed=1), 20000)
        expected = np.exp(LOGITS / temperature) / np.exp(LOGITS / temperature).sum()
        np.testing.assert_allclose([counted[i] / 20000 for i in range(4)], expected, atol=0.015)


def test_a_very_small_temperature_is_greedy_without_warnings() -> None:
    with np.errstate(all="raise", under="ignore"):
        assert set(draws(GenerationConfig(temperature=1e-300, seed=1), 20)) == {0}


def test_top_k_keeps_the_k_most_likely() -> None:
    assert set(draws(GenerationConfig(temperature=5.0, top_k=2, seed=1))) == {0, 1}
    assert set(draws(GenerationConfig(temperature=5.0, top_k=100, seed=1))) == {0, 1, 2, 3}


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, 1), (0.45, 1), (0.6, 2), (0.9, 3), (0.96, 4), (1.0, 4)])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: int) -> None:
    assert set(draws(GenerationConfig(temperature=1.0, top_p=top_p, seed=1))) == set(range(kept))


def test_top_p_counts_after_top_k() -> None:
    # Of {0.5, 0.3} renormalised the first has 0.625.
    assert set(draws(GenerationConfig(temperature=1.0, top_k=2, top_p=0.6, seed=1))) == {0}


def test_top_p_on_a_large_flat_vocabulary_equals_a_full_sort() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(5000).astype(np.float32) * 3
    weights = np.exp(logits.astype(np.float64))
    order = np.argsort(-weights)
    for top_p in (0.5, 0.9, 0.999):
        before = np.cumsum(weights[order] / weights.sum()) - weights[order] / weights.sum()
        allowed = set(order[before < top_p].tolist())
        counted = draws(GenerationConfig(temperature=1.0, top_p=top_p, seed=1), 3000, logits)
        assert set(counted) <= allowed
        assert len(counted) > 0.2 * min(len(allowed), 1000)


def test_repetition_penalty_counts_prompt_and_output_once() -> None:
    logits = np.array([2.0, 1.9, -1.0, -1.1], np.float32)
    sampler = Sampler(GenerationConfig(repetition_penalty=2.0), [0, 0])
    assert sampler(logits) == 1  # 0 came in the prompt: 2 / 2 = 1
    assert sampler(logits) == 0  # 1 came in the output: 1.9 / 2 < 1
    assert sampler(logits) == 0  # once, however often it came
    negative = Sampler(GenerationConfig(repetition_penalty=2.0), [2])
    assert negative(np.array([-9.0, -9.0, -1.0, -1.1], np.float32)) == 3  # -1 * 2 < -1.1


def test_frequency_and_presence_count_the_output_only() -> None:
    logits = np.array([1.0, 0.0], np.float32)
    sampler = Sampler(GenerationConfig(frequency_penalty=0.4), [0, 0, 0, 0])
    assert [sampler(logits) for _ in range(4)] == [0, 0, 0, 1]  # 1.0, 0.6, 0.2, -0.2
    sampler = Sampler(GenerationConfig(presence_penalty=1.5), [0])
    assert [sampler(logits) for _ in range(3)] == [0, 1, 0]  # then -0.5 against -1.5


def test_a_seed_repeats_and_another_does_not() -> None:
    def sequence(seed: int | None) -> list[int]:
        sampler = Sampler(GenerationConfig(temperature=1.0, seed=seed))
        return [sampler(LOGITS) for _ in range(60)]

    assert sequence(7) == sequence(7)
    assert sequence(7) != sequence(8)
    assert sequence(None) != sequence(None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_are_reported(value: float) -> None:
    with pytest.raises(DeviceError, match="not numbers"):
        Sampler(GenerationConfig())(np.array([0.0, value], np.float32))


@pytest.mark.parametrize("penalty", [0.01, 100])
@pytest.mark.parametrize("temperature", [0, 5e-324, 100])
def test_the_extremes_draw_without_warnings(penalty: float, temperature: float) -> None:
    config = GenerationConfig(temperature=temperature, repetition_penalty=penalty, top_p=0.9, seed=0)
    sampler = Sampler(config, [0, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            assert sampler(np.array([-3e38, -np.inf, 2.0, 1e30], np.float32)) in range(4)


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(UsageError) as caught:
        GenerationConfig(seed="x" * 10**5)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300
