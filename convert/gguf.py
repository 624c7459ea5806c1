"""A GGUF file as a Hugging Face folder in fp32: dequantised once per process, kept until it ends.

The folder is what every later stage reads, so that export, packaging and the reference see the same weights.
"""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from edge_convert.runtime.errors import SourceError

_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def unpack_gguf(path: Path) -> Path:
    """The folder with config, tokenizer and fp32 safetensors of the GGUF file at `path`.

    Written under the temporary directory (4 bytes a parameter) and removed when the process ends.
    """
    return _unpack(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=2)
def _unpack(path: Path, changed: int) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    holder = tempfile.TemporaryDirectory(prefix="edge-convert-gguf-")
    folder = Path(holder.name)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        # The weights are plain fp32 now; transformers would refuse to save what it still calls quantised.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.config.architectures = [type(model).__name__]
        model.save_pretrained(folder)
        del model
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    except (ValueError, KeyError, NotImplementedError, RuntimeError, ImportError) as error:
        holder.cleanup()
        raise SourceError(
            f"{path.name} could not be dequantised ({type(error).__name__}: {_first_line(error)}). "
            "Give the original Hugging Face folder instead."
        ) from error
    except BaseException:
        holder.cleanup()
        raise
    _KEPT.append(holder)
    return folder


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]
