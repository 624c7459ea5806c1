from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from edge_convert.runtime.cache import KVCache
from edge_convert.runtime.errors import BundleError, ContextLengthError, DeviceError, UsageError
from edge_convert.runtime.manifest import CacheSpec

SPEC = CacheSpec(("past.k", "past.v"), ("present.k", "present.v"), kv_heads=3, head_dim=8, max_length=10)


class RecordingBinding:
    def __init__(self) -> None:
        self.inputs: dict[str, object] = {}
        self.outputs: dict[str, object] = {}

    def bind_ortvalue_input(self, name: str, value: object) -> None:
        self.inputs[name] = value

    def bind_ortvalue_output(self, name: str, value: object) -> None:
        self.outputs[name] = value


def test_sizes() -> None:
    assert KVCache(SPEC).nbytes == 2 * 3 * 10 * 8 * 4
    assert KVCache(dataclasses.replace(SPEC, dtype="float16")).nbytes == 2 * 3 * 10 * 8 * 2


def test_past_and_present_are_one_buffer_and_layers_are_not() -> None:
    binding = RecordingBinding()
    KVCache(SPEC).bind(binding)
    assert binding.inputs["past.k"] is binding.outputs["present.k"]
    assert binding.inputs["past.v"] is binding.outputs["present.v"]
    assert binding.inputs["past.k"].data_ptr() != binding.inputs["past.v"].data_ptr()  # type: ignore[attr-defined]
    assert binding.inputs["past.k"].shape() == [1, 3, 10, 8]  # type: ignore[attr-defined]
    assert binding.inputs["past.k"].element_type() == 1  # type: ignore[attr-defined]


def test_lengths() -> None:
    cache = KVCache(SPEC)
    cache.advance(7)
    cache.advance(3)
    assert (cache.length, cache.max_length) == (10, 10)
    cache.rewind(4)
    assert cache.length == 4
    cache.reset()
    assert cache.length == 0


def test_more_than_the_context_is_refused_and_changes_nothing() -> None:
    cache = KVCache(SPEC)
    cache.advance(8)
    with pytest.raises(ContextLengthError, match="needs 11 tokens, and the context holds 10"):
        cache.advance(3)
    assert cache.length == 8


@pytest.mark.parametrize("length", [-1, 6, 0.0, "a", None, True])
def test_rewind_only_to_what_is_there(length: Any) -> None:
    cache = KVCache(SPEC)
    cache.advance(5)
    with pytest.raises(UsageError, match="holds 5"):
        cache.rewind(length)


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"share_buffer": False}])
def test_what_the_runtime_cannot_hold_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(BundleError, match="Convert"):
        KVCache(dataclasses.replace(SPEC, **change))  # type: ignore[arg-type]


def test_a_cache_larger_than_the_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("edge_convert.runtime.cache.np.zeros", full)
    with pytest.raises(DeviceError, match="1920 bytes does not fit"):
        KVCache(SPEC)
