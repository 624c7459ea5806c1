"""Tiny random language models of many families as Hugging Face folders, and the requests that convert them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from edge_convert.convert.recipe import Request
from edge_convert.convert.source import open_source
from edge_convert.runtime.device import load_profile

VOCAB = 300
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# A rotary base far from the 10000 that readers of the older config form fall back to.
ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=ROPE),
    "llama-untied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=ROPE),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True, rope_parameters=ROPE),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True, rope_parameters=ROPE),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None, rope_parameters=ROPE),
    "mistral-sliding": lambda: MistralConfig(**SIZES, sliding_window=8, rope_parameters=ROPE),
    "phi3": lambda: Phi3Config(**SIZES, original_max_position_embeddings=128, rope_parameters=ROPE),
    "phi3-sliding": lambda: Phi3Config(
        **SIZES, sliding_window=8, original_max_position_embeddings=128, rope_parameters=ROPE
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, head_dim=32, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
}
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_tokenizer(folder: Path, *, template: str | None = TEMPLATE) -> None:
    """A byte-level tokenizer without merges, with ChatML's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=template
    )
    tokenizer.save_pretrained(folder)


def save_model(folder: Path, config: Any, *, scale: float = 0.1, **options: Any) -> Path:
    """A random model of `config` with weights large enough to matter, and its tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(0.5 if "norm" in name else 0.0, 0.3)
            else:
                parameter.normal_(0.0, scale)
    model.save_pretrained(folder)
    save_tokenizer(folder, **options)
    return folder


def request_for(folder: Path, precision: str = "fp32", *, target: str = "cpu", context: int | None = None) -> Request:
    """The request that the pipeline would make, without progress."""
    return Request(open_source(str(folder)), load_profile(target), precision, context, None, lambda _: None)


def prompt(length: int = 24) -> np.ndarray:
    """Random token ids, longer than the sliding windows above."""
    return np.random.default_rng(1).integers(5, VOCAB, length, dtype=np.int64)
