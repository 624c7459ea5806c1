"""Decoders whose files do not fit together, and what happens when the builder fails on one."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import FAMILIES, VOCAB, prompt, request_for, save_model

from edge_convert.convert.decoder_export import GenaiExporter
from edge_convert.convert.recipes.text_generation import RECIPE
from edge_convert.runtime.errors import ExportError, SourceError, UnsupportedModelError


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("source") / "llama", FAMILIES["llama"]())


def broken_copy(
    source: Path, folder: Path, *, drop: str = "", add: dict[str, tuple[int, ...]] | None = None, **config: Any
) -> Path:
    """A copy without the tensors whose names contain `drop`, with those of `add`, and `config` over its config."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if not drop or drop not in name}
    kept |= {name: torch.ones(shape) for name, shape in (add or {}).items()}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(settings | config), "utf-8")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": "layers.1.mlp"}, r"broken lacks 3 tensors .*first: model\.layers\.1\.mlp\.down_proj\.weight"),
        ({"drop": "embed_tokens"}, "lacks .*first: "),
        ({"num_hidden_layers": 3}, r"lacks 9 tensors .*layers\.2"),
        ({"num_hidden_layers": 1}, r"9 tensors that its config leaves out .*layers\.1"),
        ({"intermediate_size": 48}, r"6 tensors of another shape .*\(64, 96\) found, \(64, 48\) needed"),
        ({"intermediate_size": 2**40}, "another shape"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "k_norm"),
        (
            {"add": {"model.layers.0.self_attn.q_proj.bias": (64,)}},
            r"1 tensor that its config leaves out .*q_proj\.bias",
        ),
        ({"num_attention_heads": 0}, "cannot be loaded by transformers"),
    ],
)
def test_weights_that_are_not_the_configs(llama: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    request = request_for(broken_copy(llama, tmp_path / "broken", **change))
    with pytest.raises(SourceError, match=message):
        RECIPE.export(request, tmp_path)
    with pytest.raises(SourceError, match=message):
        RECIPE.reference(request)


def test_weights_of_another_part_are_left_alone(llama: Path, tmp_path: Path) -> None:
    folder = broken_copy(llama, tmp_path / "broken", add={"vision_tower.layers.30.proj.weight": (4, 4)})
    assert RECIPE.reference(request_for(folder)).logits(prompt(4)).shape == (4, VOCAB)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), OSError),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), OSError),
        (OSError(errno.EIO, "odd"), ExportError),
        (ZeroDivisionError("odd"), ExportError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
@pytest.mark.parametrize("fused", [True, False])
def test_what_the_builder_raises(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    raised: BaseException,
    expected: type[BaseException],
    fused: bool,
) -> None:
    def fail(*_: Any, fuse: bool) -> None:
        if fuse and not fused:
            raise ValueError("fuse_mlp_gate_up is not supported here")
        raise RuntimeError("wrapped by a library") from raised

    monkeypatch.setattr(GenaiExporter, "_build", fail)
    with pytest.raises(expected) as found:
        RECIPE.export(request_for(llama), tmp_path)
    assert type(found.value) is expected


def test_a_broken_tokenizer_is_named(llama: Path, tmp_path: Path) -> None:
    folder = broken_copy(llama, tmp_path / "broken")
    settings = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    settings["model"]["merges"] = ["q1 q2"]
    (folder / "tokenizer.json").write_text(json.dumps(settings), "utf-8")
    with pytest.raises(UnsupportedModelError, match="tokenizer"):
        RECIPE.package(request_for(folder), tmp_path)
