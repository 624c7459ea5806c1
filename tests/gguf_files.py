"""A tiny whole GGUF file, and ways to break it."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

WIDTH, LAYERS, WIDE, VOCAB = 64, 2, 128, 300
SHAPES = {
    "attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH // 2, WIDTH), "attn_v": (WIDTH // 2, WIDTH),
    "attn_output": (WIDTH, WIDTH), "ffn_gate": (WIDE, WIDTH), "ffn_up": (WIDE, WIDTH), "ffn_down": (WIDTH, WIDE),
}  # fmt: skip


def write_gguf(
    path: Path, architecture: str = "llama", *, extra: dict[str, np.ndarray] | None = None, kind: str = "F32"
) -> Path:
    """A whole random Llama of two blocks under the name `architecture`, with `extra` tensors.

    Matrices of the blocks are of GGUF's type `kind`, the other tensors float32.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quants
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    writer = GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(VOCAB)
    tokens = ["<unk>", "<s>", "</s>", *bytes_to_unicode().values(), "x1", "x2", "x1x2"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens, *(f"y{index}" for index in range(VOCAB - len(tokens)))])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["x1 x2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    random = np.random.default_rng(0)
    tensors = {"token_embd": (VOCAB, WIDTH), "output": (VOCAB, WIDTH)}
    tensors |= {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in SHAPES.items()}
    for name, shape in tensors.items():
        values = (random.standard_normal(shape) * 0.05).astype(np.float32)
        if kind == "F32" or "blk" not in name:
            writer.add_tensor(f"{name}.weight", values)
        else:
            stored = GGMLQuantizationType[kind]
            writer.add_tensor(f"{name}.weight", quants.quantize(values, stored), raw_dtype=stored)
    norms = ["output_norm", *(f"blk.{layer}.{kind}_norm" for layer in range(LAYERS) for kind in ("attn", "ffn"))]
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def patch(path: Path, key: str, value: int) -> None:
    """Overwrite the 32-bit metadata value `key` in place."""
    content = bytearray(path.read_bytes())
    place = content.index(key.encode()) + len(key) + 4
    content[place : place + 4] = struct.pack("<I", value)
    path.write_bytes(content)


def rename(path: Path, old: bytes, new: bytes) -> None:
    assert len(old) == len(new)
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))
