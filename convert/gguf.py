"""GGUF files: their metadata checked against their tensors, and their weights as a Hugging Face folder in fp32.

The folder is made once per process and is what every later stage reads, so that export, packaging and the
reference see the same weights.
"""

from __future__ import annotations

import re
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from edge_convert.convert.interrupt import raise_if_disk_full, raise_if_interrupted
from edge_convert.convert.weights import check_loaded, first_line
from edge_convert.runtime.errors import EdgeError, SourceError

_KEPT: list[tempfile.TemporaryDirectory[str]] = []
_BLOCK = re.compile(r"blk\.(\d+)\.")
_MAX_SIZE = 2**24  # of a context, a vocabulary, a layer
_ROPE_FACTORS = "rope_freqs.weight"


def check_gguf(path: Path) -> str:
    """The architecture of the GGUF file at `path`.

    Raises SourceError if the file is truncated, or its metadata contradicts its tensors or itself.
    """
    from gguf import GGUFReader

    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise SourceError(f"{path} does not start with the GGUF magic. Download it again.")
    try:
        reader = GGUFReader(path)
        architecture = str(reader.fields["general.architecture"].contents())
        end = max(int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors)
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, AttributeError) as error:
        raise SourceError(f"{path} is truncated or not a GGUF model ({error}). Download it again.") from error
    if end > path.stat().st_size:
        raise SourceError(f"{path} is truncated: {path.stat().st_size} bytes found, {end} expected. Download it again.")
    if problem := _contradiction(reader, architecture):
        raise SourceError(f"{path} contradicts itself: {problem}. Download it again.")
    return architecture


def _contradiction(reader: Any, architecture: str) -> str | None:
    """What of the metadata cannot be true, given the tensors; None if all fits."""
    names = [str(tensor.name) for tensor in reader.tensors]
    found = 1 + max((int(match[1]) for name in names if (match := _BLOCK.match(name))), default=-1)
    counted = _value(reader, f"{architecture}.block_count")
    if not isinstance(counted, int) or counted != found:
        return f"{architecture}.block_count is {counted}, and its tensors are of {found} blocks"
    wanted = ["embedding_length", "context_length"]
    if any(".attn_" in name for name in names):
        wanted += ["attention.head_count"]
    sizes = {key: _value(reader, f"{architecture}.{key}") for key in wanted}
    for key in ("attention.head_count_kv", "feed_forward_length", "vocab_size", "attention.key_length"):
        value = _value(reader, f"{architecture}.{key}")
        if value is not None:
            sizes[key] = value
    for key, value in sizes.items():
        # A list has one number per block; blocks without attention have 0 heads there.
        largest = max(value, default=0) if isinstance(value, list) and all(map(_whole, value)) else value
        if not _whole(largest) or not 1 <= largest <= _MAX_SIZE:
            return f"{architecture}.{key} is {value}, and it must be a positive number that a model can have"
    width, heads = sizes["embedding_length"], sizes.get("attention.head_count")
    if isinstance(heads, int) and "attention.key_length" not in sizes and width % heads:
        return f"{architecture}.embedding_length {width} is not a multiple of attention.head_count {heads}"
    groups = sizes.get("attention.head_count_kv", heads)
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        return f"{architecture}.attention.head_count {heads} is not a multiple of attention.head_count_kv {groups}"
    # GGUF writes the fastest axis first.
    for key, tensor, axis in (
        ("embedding_length", "token_embd.weight", 0),
        ("vocab_size", "token_embd.weight", 1),
        ("feed_forward_length", "blk.0.ffn_down.weight", 0),
    ):
        shape = next(([int(size) for size in item.shape] for item in reader.tensors if item.name == tensor), None)
        if shape and isinstance(sizes.get(key), int) and (len(shape) != 2 or shape[axis] != sizes[key]):
            return f"{architecture}.{key} is {sizes[key]}, and {tensor} has the shape {shape}"
    return _tokenizer_contradiction(reader)


def _tokenizer_contradiction(reader: Any) -> str | None:
    field = reader.fields.get("tokenizer.ggml.tokens")
    count = 0 if field is None else len(field.data)
    if not count:
        return "it has no tokenizer.ggml.tokens"
    for kind in ("bos", "eos", "unknown", "padding"):
        key = f"tokenizer.ggml.{kind}_token_id"
        token = _value(reader, key)
        if token is not None and (not _whole(token) or not 0 <= token < count):
            return f"{key} is {token}, and there are {count} tokens"
    return None


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _value(reader: Any, key: str) -> Any:
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def unpack_gguf(path: Path) -> Path:
    """The folder with config, tokenizer and fp32 safetensors of the GGUF file at `path`.

    Written under the temporary directory (4 bytes a parameter) and removed when the process ends. Raises
    SourceError if a weight of the model is missing in the file, or one of the file in the model.
    """
    return _unpack(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=2)
def _unpack(path: Path, changed: int) -> Path:
    holder = tempfile.TemporaryDirectory(prefix="edge-convert-gguf-")
    folder = Path(holder.name)
    try:
        _write(path, folder)
    except EdgeError:
        holder.cleanup()
        raise
    except BaseException as error:
        holder.cleanup()
        raise_if_interrupted(error)
        raise_if_disk_full(error)
        # A panic of the tokenizers library is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise SourceError(
            f"{path.name} could not be dequantised ({type(error).__name__}: {first_line(error)}). "
            "Give the original Hugging Face folder instead."
        ) from error
    _KEPT.append(holder)
    return folder


def _write(path: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any
    model, info = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    check_loaded(model, info, path.name)
    if dropped := _dropped(path, model, info):
        raise SourceError(
            f"{path.name} has {len(dropped)} tensors that transformers has no place for in a "
            f"{type(model).__name__} (first: {dropped[0]}). Give the original Hugging Face folder instead."
        )
    # The weights are plain fp32 now; transformers would refuse to save what it still calls quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    del model
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)


def _dropped(path: Path, model: Any, info: dict[str, Any]) -> list[str]:
    """Names of the file's tensors that are not in `model`.

    transformers' newer loader reports them; its older one, still used for most architectures, skips them
    silently, so its table of names is asked.
    """
    if getattr(model.hf_quantizer, "supported", False):
        return sorted(info["unexpected_keys"])
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    reader = GGUFReader(path)
    processor = TENSOR_PROCESSORS.get(_value(reader, "general.architecture"), TensorProcessor)
    # Stacked experts are in the table without their suffix, and GPT-2's head is not in it.
    used = {*get_gguf_hf_weights_map(model, processor(config=model.config.to_dict())), "output.weight"}
    left = [tensor for tensor in reader.tensors if not {tensor.name, tensor.name.removesuffix(".weight")} & used]
    # Factors of 1 leave the rotary frequencies as they are.
    return sorted(
        str(tensor.name) for tensor in left if tensor.name != _ROPE_FACTORS or not bool(np.all(tensor.data == 1))
    )
