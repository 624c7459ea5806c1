from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_convert.runtime.device import load_profile
from edge_convert.runtime.errors import BundleError, ContextLengthError, FeedError, InputError, UsageError
from edge_convert.runtime.generate import Decoder, generate
from edge_convert.runtime.sampling import GenerationConfig
from edge_convert.runtime.session import Session
from tests.models import toy_decoder

IDS = np.random.default_rng(3).integers(0, 96, 40).astype(np.int64)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    path, spec = toy_decoder(tmp_path_factory.mktemp("toy"))
    return Session(path, spec, load_profile("cpu"), threads=1)


def uncached(session: Session, ids: np.ndarray) -> np.ndarray:
    """Logits of all positions from one run over everything, with no past: float32 (S, V)."""
    cache = session.spec.cache
    assert cache is not None
    feed = {
        "input_ids": ids[None],
        "seqlens_k": np.array([len(ids) - 1], np.int32),
        "total_sequence_length": np.array(len(ids), np.int32),
        "position_ids": np.arange(len(ids))[None],
        "logits_positions": np.arange(len(ids)),
    }
    feed = {name: value for name, value in feed.items() if name in {spec.name for spec in session.spec.inputs}}
    feed |= {name: np.zeros((1, cache.kv_heads, 0, cache.head_dim), np.float32) for name in cache.past}
    return session.run(feed)["logits"][0]


def test_the_last_token_depends_on_the_first(session: Session) -> None:
    other = IDS.copy()
    other[0] = (other[0] + 1) % 96
    assert (
        np.abs(uncached(session, IDS)[-1] - uncached(session, other)[-1]).max() > 0.01
    )  # far above the tolerances below


def test_cached_equals_uncached_step_by_step(session: Session) -> None:
    decoder, expected = Decoder(session), uncached(session, IDS)
    np.testing.assert_allclose(decoder.prefill(IDS[:5]), expected[4], atol=1e-4)
    for position in range(5, len(IDS)):
        np.testing.assert_allclose(decoder.step(int(IDS[position])), expected[position], atol=1e-4)
    assert decoder.length == len(IDS)


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 39, 40, 512])
def test_prefill_in_chunks_equals_whole(session: Session, chunk: int) -> None:
    expected = uncached(session, IDS)
    decoder = Decoder(session, chunk_tokens=chunk)
    np.testing.assert_allclose(decoder.prefill(IDS), expected[-1], atol=1e-4)
    np.testing.assert_allclose(decoder.step(5), uncached(session, np.append(IDS, 5))[-1], atol=1e-4)
    decoder.reset()
    np.testing.assert_allclose(decoder.logits_all(IDS), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("variant", "tolerance"),
    [({"logits_positions": False}, 1e-4), ({"position_ids": True}, 1e-4), ({"logits_dtype": "float16"}, 0.02)],
)
def test_other_forms_of_the_graph(tmp_path: Path, variant: dict[str, object], tolerance: float) -> None:
    path, spec = toy_decoder(tmp_path, **variant)  # type: ignore[arg-type]
    session = Session(path, spec, load_profile("cpu"), threads=1)
    expected = uncached(session, IDS).astype(np.float32)
    decoder = Decoder(session, chunk_tokens=16)
    logits = decoder.prefill(IDS[:38])
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected[37], atol=tolerance)
    np.testing.assert_allclose(decoder.step(int(IDS[38])), expected[38], atol=tolerance)
    decoder.rewind(2)
    everything = decoder.logits_all(IDS[2:])
    assert everything.dtype == np.float32
    np.testing.assert_allclose(everything, expected[2:], atol=tolerance)


def test_rewind_forgets_what_came_after(session: Session) -> None:
    decoder = Decoder(session, chunk_tokens=8)
    decoder.prefill(IDS)
    decoder.rewind(11)
    assert decoder.length == 11
    np.testing.assert_allclose(decoder.prefill(IDS[11:20]), uncached(session, IDS[:20])[-1], atol=1e-4)
    decoder.rewind(3)
    changed = np.concatenate([IDS[:3], IDS[30:40]])
    np.testing.assert_allclose(decoder.logits_all(changed[3:]), uncached(session, changed)[3:], atol=1e-4)


def test_results_are_not_overwritten_by_the_next_step(session: Session) -> None:
    decoder = Decoder(session)
    first = decoder.prefill(IDS[:4])
    kept = first.copy()
    decoder.step(1)
    np.testing.assert_array_equal(first, kept)


def test_all_logits_then_steps_share_one_binding(session: Session) -> None:
    decoder, expected = Decoder(session), uncached(session, IDS)
    decoder.prefill(IDS[:4])
    everything = decoder.logits_all(IDS[4:20])
    np.testing.assert_allclose(everything, expected[4:20], atol=1e-4)
    np.testing.assert_allclose(decoder.step(int(IDS[20])), expected[20], atol=1e-4)
    np.testing.assert_allclose(everything, expected[4:20], atol=1e-4)


def test_sizes(session: Session) -> None:
    decoder = Decoder(session)
    assert decoder.context_length == 64
    assert decoder.cache_bytes == 4 * 2 * 64 * 16 * 4
    assert decoder.vocab_size == 96


def test_a_full_context_is_refused_before_running(session: Session) -> None:
    decoder = Decoder(session)
    with pytest.raises(ContextLengthError, match="needs 65 tokens"):
        decoder.prefill([1] * 65)
    assert decoder.length == 0
    decoder.prefill([1] * 64)
    with pytest.raises(ContextLengthError, match="needs 65 tokens"):
        decoder.step(1)
    with pytest.raises(ContextLengthError, match="needs 70 tokens"):
        next(generate(decoder, [1] * 70, GenerationConfig()))


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([], InputError), ([96], FeedError), ([-1], FeedError), ([0.5], FeedError), ([[1, 2]], FeedError),
        ([[1], [1, 2]], FeedError), (None, FeedError), ("abc", FeedError), ([10**30], FeedError), ([True], FeedError),
    ],
)  # fmt: skip
def test_bad_ids_are_refused(session: Session, ids: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Decoder(session).prefill(ids)
    with pytest.raises(error):
        next(generate(Decoder(session), ids, GenerationConfig()))


def test_a_step_outside_the_vocabulary_is_refused(session: Session) -> None:
    with pytest.raises(FeedError, match="96"):
        Decoder(session).step(96)


@pytest.mark.parametrize("token", [1.5, True, "a", None, np.array([1, 2])])
def test_a_step_takes_a_whole_number(session: Session, token: Any) -> None:
    with pytest.raises(FeedError, match="whole number"):
        Decoder(session).step(token)


def test_a_step_takes_numpys_whole_numbers(session: Session) -> None:
    np.testing.assert_array_equal(Decoder(session).step(np.int64(3)), Decoder(session).step(3))


@pytest.mark.parametrize(
    "change",
    [{"present": ("gone.0", "gone.1", "gone.2", "gone.3")}, {"kv_heads": 3}, {"head_dim": 8}, {"dtype": "float16"}],
)
def test_a_cache_that_does_not_fit_the_graph_is_refused(session: Session, change: dict[str, Any]) -> None:
    assert session.spec.cache is not None
    changed = dataclasses.replace(session.spec, cache=dataclasses.replace(session.spec.cache, **change))

    class Other:
        spec, device_type, ort = changed, "cpu", session.ort

    with pytest.raises(BundleError, match="does not fit the graph"):
        Decoder(Other())  # type: ignore[arg-type]


def test_a_graph_that_the_loop_cannot_drive_is_refused(session: Session) -> None:
    class Other:
        spec = dataclasses.replace(session.spec, cache=None)

    with pytest.raises(BundleError, match="no key/value cache"):
        Decoder(Other())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="chunk_tokens"):
        Decoder(session, chunk_tokens=0)


def test_greedy_equals_argmax_of_the_uncached_model(session: Session) -> None:
    ids = IDS[:6]
    for token in generate(Decoder(session), ids, GenerationConfig(max_tokens=20)):
        assert token == int(uncached(session, ids)[-1].argmax())
        ids = np.append(ids, token)
    assert len(ids) == 26


def run(session: Session, config: GenerationConfig, **options: object) -> tuple[list[int], str]:
    tokens: list[int] = []
    events = generate(Decoder(session, chunk_tokens=4), IDS[:6], config, **options)  # type: ignore[arg-type]
    while True:
        try:
            tokens.append(next(events))
        except StopIteration as end:
            return tokens, end.value


def test_ends_at_max_tokens_and_at_the_context(session: Session) -> None:
    assert [len(run(session, GenerationConfig(max_tokens=n))[0]) for n in (1, 5)] == [1, 5]
    tokens, reason = run(session, GenerationConfig(max_tokens=500))
    assert (len(tokens), reason) == (64 - 6 + 1, "length")  # the last one is drawn and never run


def test_stop_tokens_end_it_and_are_not_yielded(session: Session) -> None:
    free, _ = run(session, GenerationConfig(max_tokens=30, temperature=1.0, seed=5))
    stop = free[10]
    ended, reason = run(session, GenerationConfig(max_tokens=30, temperature=1.0, seed=5, stop_token_ids=(stop,)))
    assert (ended, reason) == (free[: free.index(stop)], "stop")


def test_a_seed_repeats_the_whole_generation(session: Session) -> None:
    config = GenerationConfig(max_tokens=30, temperature=1.0, top_k=50, top_p=0.95, seed=11)
    assert run(session, config) == run(session, config)
    assert run(session, config) != run(session, dataclasses.replace(config, seed=12))


def test_cancel_is_asked_before_every_run(session: Session) -> None:
    assert run(session, GenerationConfig(), cancel=lambda: True) == ([], "cancelled")
    asked = iter([False] * 5 + [True] * 100)  # two chunks of the prompt, then three steps
    tokens, reason = run(session, GenerationConfig(), cancel=lambda: next(asked))
    assert (len(tokens), reason) == (4, "cancelled")


def test_two_generations_on_one_decoder_do_not_mix(session: Session) -> None:
    decoder = Decoder(session)
    first = generate(decoder, [1, 2], GenerationConfig())
    next(first)
    next(generate(decoder, [3, 4], GenerationConfig()))
    with pytest.raises(UsageError, match="Another generation"):
        next(first)


@pytest.mark.parametrize(
    "between",
    [
        lambda decoder: decoder.step(5),
        lambda decoder: decoder.prefill([5]),
        lambda decoder: decoder.logits_all([5]),
        lambda decoder: decoder.rewind(1),
        lambda decoder: decoder.prefill([5] * (64 - decoder.length)),
    ],
)
def test_a_call_between_two_tokens_ends_the_generation(session: Session, between: Any) -> None:
    decoder = Decoder(session)
    tokens = generate(decoder, [1, 2], GenerationConfig(max_tokens=30))
    next(tokens)
    between(decoder)
    with pytest.raises(UsageError, match="in between"):
        next(tokens)


@pytest.mark.parametrize("config", [None, {"max_tokens": 3}, 3])
def test_the_settings_must_be_a_config(session: Session, config: Any) -> None:
    with pytest.raises(UsageError, match="GenerationConfig"):
        next(generate(Decoder(session), [1], config))
