"""Exporters of decoder-only language models: a Hugging Face folder in, one ONNX decode graph out.

`DecoderExporter` is the interface; `GenaiExporter` (the graph builder of onnxruntime-genai) is the first.
"""

from __future__ import annotations

import gc
import json
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from edge_convert.convert.interrupt import raise_if_disk_full, raise_if_interrupted
from edge_convert.convert.weights import first_line
from edge_convert.runtime.errors import EdgeError, ExportError, MissingExtraError, UnsupportedModelError

log = logging.getLogger(__name__)

GRAPH_FILE = "decoder.onnx"


@dataclass(frozen=True, slots=True)
class RawDecoder:
    """What an exporter wrote: the graph, its cache's sizes, and the rows of its rotary tables at most."""

    path: Path
    layers: int
    kv_heads: int
    head_dim: int
    context_length: int


class DecoderExporter(Protocol):
    """Writes a decode graph with one past and one present tensor per layer for keys and for values."""

    @property
    def name(self) -> str:
        """The library that writes the graph."""
        ...

    def export(self, checkpoint: Path, folder: Path, *, precision: str, provider: str) -> RawDecoder:
        """Write `checkpoint` (a Hugging Face folder) into `folder` at "fp32" or "fp16" for "cpu" or "cuda"."""
        ...


@dataclass(frozen=True, slots=True)
class GenaiExporter:
    """onnxruntime-genai's model builder: fused attention, packed QKV, one gate-and-up projection a layer."""

    name: str = "onnxruntime-genai"

    def export(self, checkpoint: Path, folder: Path, *, precision: str, provider: str) -> RawDecoder:
        """See DecoderExporter; raises UnsupportedModelError for architectures the builder does not know."""
        try:
            self._build(checkpoint, folder, precision, provider, fuse=True)
        except ValueError as error:
            if "fuse_mlp_gate_up" not in str(error):
                raise _export_error(checkpoint, error) from error
            log.info("gate and up projections stay apart: %s", error)
            self._build_plain(checkpoint, folder, precision, provider)
        except EdgeError:
            raise
        except Exception as error:
            raise _export_error(checkpoint, error) from error
        settings = json.loads((folder / "genai_config.json").read_text("utf-8"))["model"]
        decoder = settings["decoder"]
        return RawDecoder(
            path=folder / GRAPH_FILE,
            layers=decoder["num_hidden_layers"],
            kv_heads=decoder["num_key_value_heads"],
            head_dim=decoder["head_size"],
            context_length=settings["context_length"],
        )

    def _build_plain(self, checkpoint: Path, folder: Path, precision: str, provider: str) -> None:
        try:
            self._build(checkpoint, folder, precision, provider, fuse=False)
        except EdgeError:
            raise
        except Exception as error:
            raise _export_error(checkpoint, error) from error

    def _build(self, checkpoint: Path, folder: Path, precision: str, provider: str, *, fuse: bool) -> None:
        try:
            from onnxruntime_genai.models.builder import create_model, parse_extra_options
        except ImportError as error:
            raise MissingExtraError("onnxruntime-genai", "convert") from error
        options = ["hf_token=false", f"filename={GRAPH_FILE}", "windowed_kv_cache=false"]
        options.append(f"fuse_mlp_gate_up={str(fuse).lower()}")
        place = ("", str(checkpoint), str(folder), precision, provider)
        with tempfile.TemporaryDirectory(prefix="edge-convert-builder-") as cache:
            parsed = parse_extra_options(*place, cache, options)
            adapt_config(parsed["hf_details"]["hf_config"])
            try:
                create_model(*place, cache, **parsed)
            except NotImplementedError as error:
                raise_if_interrupted(error)
                raise _unsupported(checkpoint, error) from error
        del parsed
        gc.collect()  # the builder's graph and the model that it loaded refer to each other


def adapt_config(config: Any) -> None:
    """Spell a transformers config the way the builder reads it, in place; the model is loaded from its folder.

    Rotary settings per kind of layer (Gemma 3) become one global and one local base. A sliding window
    without `layer_types` (Mistral, Phi-3) is of every layer; the builder would drop it silently.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    if isinstance(rope, dict) and "full_attention" in rope:
        local = rope.get("sliding_attention") or rope["full_attention"]
        config.rope_parameters = dict(rope["full_attention"])
        config.rope_theta = rope["full_attention"]["rope_theta"]
        config.rope_local_base_freq = local["rope_theta"]
    if getattr(text, "sliding_window", None) and getattr(text, "layer_types", None) is None:
        config.layer_types = ["sliding_attention"] * int(text.num_hidden_layers)


def _config(checkpoint: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text("utf-8"))
    return config


def _unsupported(checkpoint: Path, error: Exception) -> UnsupportedModelError:
    config = _config(checkpoint)
    found = ", ".join(config.get("architectures") or [str(config.get("model_type"))])
    return UnsupportedModelError(
        f"The exporter of decoder models does not know the architecture {found} ({error}). Convert a model of a "
        "known family instead, such as Llama, Mistral, Qwen2, Qwen3, Gemma 3, Phi-3 or SmolLM."
    )


def _export_error(checkpoint: Path, error: Exception) -> ExportError:
    """The error in one sentence; an interrupt and a full disk are raised as themselves."""
    raise_if_interrupted(error)
    raise_if_disk_full(error)
    config = _config(checkpoint)
    found = ", ".join(config.get("architectures") or [str(config.get("model_type"))])
    return ExportError(
        f"The exporter failed on the architecture {found} ({type(error).__name__}: {first_line(error)}). Check that the "
        "folder loads in transformers, and run again with --verbose for the trace."
    )
