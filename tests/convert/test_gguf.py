"""GGUF files whose metadata and tensors do not fit together: refused before or while they are dequantised."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from assets import smollm2_gguf
from gguf_files import VOCAB, WIDTH, patch, rename, write_gguf

from edge_convert.convert import gguf
from edge_convert.convert.gguf import check_gguf, unpack_gguf
from edge_convert.convert.source import open_source
from edge_convert.runtime.errors import SourceError


def test_a_whole_file_is_unpacked(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "whole.gguf", extra={"rope_freqs.weight": np.ones(16, np.float32)})
    assert open_source(str(path)).config["model_type"] == "llama"
    assert (unpack_gguf(path) / "model.safetensors").stat().st_size > 4 * 2 * VOCAB * WIDTH


@pytest.mark.real
def test_a_real_file_passes_the_checks() -> None:
    assert check_gguf(smollm2_gguf()) == "llama"
    assert (unpack_gguf(smollm2_gguf()) / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 0),
        ("llama.block_count", 1),
        ("llama.block_count", 3),
        ("llama.block_count", 2**31),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", 7),
        ("llama.attention.head_count_kv", 0),
        ("llama.embedding_length", 0),
        ("llama.embedding_length", 128),
        ("llama.attention.head_count_kv", 3),
        ("llama.feed_forward_length", 0),
        ("llama.feed_forward_length", 64),
        ("llama.feed_forward_length", 2**31),
        ("llama.context_length", 0),
        ("llama.context_length", 2**31),
        ("llama.vocab_size", 0),
        ("llama.vocab_size", 5),
        ("tokenizer.ggml.eos_token_id", 10**6),
        ("tokenizer.ggml.bos_token_id", 2**32 - 1),
        ("tokenizer.ggml.unknown_token_id", VOCAB),
    ],
)
def test_metadata_that_contradicts_the_tensors(tmp_path: Path, key: str, value: int) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    patch(path, key, value)
    with pytest.raises(SourceError, match=rf"contradicts itself.*{key.split('.', 1)[1]}.*Download it again"):
        open_source(str(path))


def test_a_size_that_only_the_model_shows(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    patch(path, "llama.attention.head_count_kv", 2)
    open_source(str(path))
    with pytest.raises(SourceError, match=r"4 tensors of another shape.*\(32, 64\) found, \(64, 64\) needed"):
        unpack_gguf(path)


def test_a_missing_tensor_is_not_made_up(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    rename(path, b"blk.1.ffn_up", b"blk.1.foo_up")
    with pytest.raises(SourceError, match=r"model\.gguf lacks 1 tensor .*layers\.1\.mlp\.up_proj\.weight"):
        unpack_gguf(path)


@pytest.mark.parametrize(("architecture", "missing"), [("qwen2", "k_proj.bias"), ("qwen3", "k_norm.weight")])
def test_another_architecture_needs_other_tensors(tmp_path: Path, architecture: str, missing: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", architecture)
    with pytest.raises(SourceError, match=missing):
        unpack_gguf(path)


@pytest.mark.parametrize("name", ["blk.1.attn_q.bias", "blk.0.attn_q_norm.weight", "rope_freqs.weight"])
def test_a_tensor_without_a_place_is_not_dropped(tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", extra={name: np.full(WIDTH, 2, np.float32)})
    with pytest.raises(SourceError, match=rf"1 tensors that transformers has no place for.*first: {name}"):
        unpack_gguf(path)


def test_a_merge_of_unknown_tokens(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    rename(path, b"x1 x2", b"q1 q2")
    with pytest.raises(SourceError, match="could not be dequantised"):
        unpack_gguf(path)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ZeroDivisionError("by zero"), SourceError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, "No space left on device"), OSError),
        (RuntimeError("I/O error: No space left on device (os error 28)"), OSError),
        (SystemExit(3), SystemExit),
    ],
)
def test_what_unpacking_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException, expected: type[BaseException]
) -> None:
    def fail(*_: Any) -> None:
        raise raised

    monkeypatch.setattr(gguf, "_write", fail)
    with pytest.raises(expected):
        unpack_gguf(write_gguf(tmp_path / "model.gguf"))
