"""Sentence embedders: a transformers encoder, its pooling and its normalisation as one graph."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_convert.convert.calibration_texts import check_texts
from edge_convert.convert.fp16 import to_float16
from edge_convert.convert.interrupt import raise_if_disk_full, raise_if_interrupted
from edge_convert.convert.quantize import quantise_dynamic, rename_output
from edge_convert.convert.recipe import Exported, Recipe, Request
from edge_convert.convert.recipes.ladder import search_encoder
from edge_convert.convert.source import read_json, read_object
from edge_convert.convert.weights import first_line, load_whole
from edge_convert.runtime.errors import ExportError, SourceError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

FILE = "encoder.onnx"
OUTPUT = "embedding"
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
POOLINGS = ("cls", "mean", "max")
_ATTENTION = "edge_convert_mha"
_EXPORT_OUTPUT = "edge_convert_embedding"  # the exporter calls the token table's rows "embedding" already
_NO_LIMIT = 1_000_000  # tokenizers without a limit write 1e30


@dataclass(frozen=True, slots=True)
class EncoderLayout:
    """What surrounds the transformer: how tokens become one vector, and how many tokens it reads."""

    pooling: str
    normalise: bool
    max_length: int


def read_layout(folder: Path, config: dict[str, Any]) -> EncoderLayout:
    """Read modules.json, the pooling's config and the length limits; mean pooling without modules.json."""
    pooling, normalise = "mean", False
    modules = read_json(folder / "modules.json")
    if not isinstance(modules or [], list) or not all(isinstance(module, dict) for module in modules or []):
        raise SourceError("modules.json is not a list of modules. Copy or download it again.")
    for module in modules or []:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _read_pooling(folder / str(module.get("path", "")) / "config.json")
        elif kind == "Normalize":
            normalise = True
        elif kind != "Transformer":
            raise UnsupportedModelError(
                f"modules.json has the module {kind!r}; supported: Transformer, Pooling, Normalize. "
                "Merge it into the model, or convert through module:factory."
            )
    return EncoderLayout(pooling, normalise, _max_length(folder, config))


def export(request: Request, folder: Path) -> dict[str, Exported]:
    """Write the fp32 graph with dynamic batch and sequence and ONNX Runtime's fused attention."""
    import torch

    source = _folder(request)
    layout = read_layout(source, request.source.config)
    _register_attention()
    encoder = _load_model(request, attention=_ATTENTION)
    names = _input_names(encoder)
    module = _sentence_encoder(encoder, names, layout)
    ids = torch.randint(0, int(encoder.config.vocab_size), (2, 7), generator=torch.Generator().manual_seed(0))
    feed = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    path = folder / FILE
    try:
        torch.onnx.export(
            module,
            tuple(feed[name] for name in names),
            path,
            dynamo=True,
            opset_version=min(request.profile.opset_max, 21),
            external_data=False,
            input_names=list(names),
            output_names=[_EXPORT_OUTPUT],
            dynamic_shapes={"args": tuple(axes for _ in names)},
        )
    except Exception as error:
        raise_if_interrupted(error)
        raise_if_disk_full(error)
        raise ExportError(
            f"{request.source.name} could not be exported ({type(error).__name__}: {first_line(error)}). Run again with "
            "--verbose for the trace."
        ) from error
    rename_output(path, _EXPORT_OUTPUT, OUTPUT)
    return {"encoder": Exported(path)}


def quantise(
    request: Request, graphs: dict[str, Exported], folder: Path, *, exclude: Sequence[str] = ()
) -> dict[str, Exported]:
    """Write the graph at the asked precision: dynamic int8 per channel of all products but `exclude`, or fp16 where
    measurement allows it."""
    source, path = graphs["encoder"].path, folder / FILE
    if request.precision == "fp32":
        return graphs
    if request.precision == "fp16":
        to_float16(source, path)
    else:
        quantise_dynamic(source, path, exclude=exclude, reduce_range=request.profile.reduce_range)
    return {"encoder": Exported(path)}


def package(request: Request, folder: Path) -> dict[str, Any]:
    """Write tokenizer.json and return the wrapper's settings."""
    source, encoder = _folder(request), _load_model(request, attention="eager")
    if (source / "tokenizer.json").is_file():
        shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    else:
        _load_tokenizer(source).backend_tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer = _load_tokenizer(source)
    return {
        "tokenizer": "tokenizer.json",
        "max_length": read_layout(source, request.source.config).max_length,
        "pad_token_id": int(tokenizer.pad_token_id or 0),
        "pad_token_type_id": int(tokenizer.pad_token_type_id),
        "dimension": int(encoder.config.hidden_size),
        "inputs": list(_input_names(encoder)),
        "output": OUTPUT,
    }


class OriginalEmbedder:
    """The original in fp32, one unpadded text at a time: an EmbedderReference."""

    def __init__(self, name: str, module: torch.nn.Module, names: Sequence[str], tokenizer: Any, max_length: int):
        self.name = name
        self._module = module
        self._names = tuple(names)
        self._tokenizer = tokenizer
        self._max_length = max_length
        self.pad_token_id = int(tokenizer.pad_token_id or 0)

    def tokenize(self, text: str) -> list[int]:
        """Token ids with special tokens, cut to the model's length."""
        return list(self._encode(text)["input_ids"][0].tolist())

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embeddings, float32 (N, D)."""
        import torch

        rows = []
        with torch.inference_mode():
            for text in texts:
                encoded = self._encode(text)
                rows.append(self._module(*(encoded[name] for name in self._names))[0].numpy())
        return np.stack(rows).astype(np.float32)

    def _encode(self, text: str) -> Any:
        return self._tokenizer(
            text, truncation=True, max_length=self._max_length, return_tensors="pt", return_token_type_ids=True
        )


def reference(request: Request) -> OriginalEmbedder:
    """The original transformer with eager attention in fp32, its pooling and normalisation."""
    source = _folder(request)
    layout = read_layout(source, request.source.config)
    encoder = _load_model(request, attention="eager")
    names = _input_names(encoder)
    module = _sentence_encoder(encoder, names, layout)
    return OriginalEmbedder(request.source.name, module, names, _load_tokenizer(source), layout.max_length)


def _folder(request: Request) -> Path:
    if request.source.kind != "huggingface" or request.source.path is None:
        raise UnsupportedModelError(
            f"feature-extraction needs a Hugging Face folder; {request.source.name} is of kind {request.source.kind!r}."
        )
    return request.source.path


def _read_pooling(path: Path) -> str:
    """The one pooling that the config asks for; raises UnsupportedModelError for any other."""
    config = read_object(path)
    if not path.is_file():
        raise SourceError(f"modules.json asks for {path.parent.name}/config.json, and it is missing. Copy it too.")
    if "pooling_mode" in config:
        modes = config["pooling_mode"] if isinstance(config["pooling_mode"], list) else [config["pooling_mode"]]
    else:
        flags = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_max_tokens": "max"}
        modes = [flags.get(key, key) for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise UnsupportedModelError(
            f"The pooling {', '.join(map(str, modes)) or 'none'} is not supported; supported: one of "
            f"{', '.join(POOLINGS)}."
        )
    return str(modes[0])


def _max_length(folder: Path, config: dict[str, Any]) -> int:
    """The smallest of the sentence length, the tokenizer's limit and the position table."""
    sentence = read_object(folder / "sentence_bert_config.json").get("max_seq_length")
    limits = [sentence] if sentence else [read_object(folder / "tokenizer_config.json").get("model_max_length")]
    positions = config.get("max_position_embeddings")
    for limit in (*limits, positions):
        if limit is not None and not isinstance(limit, int | float):
            raise SourceError(f"A length limit of {folder.name} is {limit!r:.80}; a number is needed. Correct it.")
    if positions and config.get("model_type") in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        positions -= int(config.get("pad_token_id") or 1) + 1  # positions start behind the padding index
    found = [int(limit) for limit in (*limits, positions) if limit and limit < _NO_LIMIT]
    return min(found, default=512)


def _load_model(request: Request, *, attention: str) -> Any:
    """The encoder in fp32; its pooler is not used, and many embedders were saved without one."""
    import torch
    from transformers import AutoModel

    return load_whole(
        AutoModel,
        _folder(request),
        request.source.name,
        unused=("pooler.",),
        attn_implementation=attention,
        dtype=torch.float32,
        local_files_only=True,
    ).eval()


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise_if_interrupted(error)
        raise SourceError(
            f"The tokenizer of {folder.name} cannot be loaded ({first_line(error)}). Copy or download it again."
        ) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UnsupportedModelError(f"The tokenizer of {folder.name} has no tokenizer.json form, which bundles need.")
    return tokenizer


def _input_names(encoder: Any) -> tuple[str, ...]:
    accepted = inspect.signature(encoder.forward).parameters
    return tuple(name for name in INPUTS if name in accepted)


def _sentence_encoder(encoder: Any, names: Sequence[str], layout: EncoderLayout) -> torch.nn.Module:
    """A module from token tensors, int64 (batch, sequence), to embeddings, float32 (batch, dimension)."""
    import torch

    class SentenceEncoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            feed = dict(zip(names, args, strict=True))
            hidden = self.encoder(**feed).last_hidden_state
            kept = feed["attention_mask"].unsqueeze(-1)
            if layout.pooling == "cls":
                vector = hidden[:, 0]
            elif layout.pooling == "max":
                vector = torch.where(kept > 0, hidden, -1e9).amax(1)
            else:
                weights = kept.to(hidden.dtype)
                vector = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(vector, dim=-1) if layout.normalise else vector

    return SentenceEncoder().eval()


def _register_attention() -> None:
    """Teach transformers an attention that exports as ONNX Runtime's MultiHeadAttention.

    The 2-D attention mask is handed through untouched and becomes the operator's key padding mask. Only
    for export: outside it the operator has no values.
    """
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """(batch, heads, sequence, head_dim) thrice to (batch, sequence, heads, head_dim)."""
        batch, heads, length, size = query.shape
        flat = [tensor.transpose(1, 2).reshape(batch, length, heads * size) for tensor in (query, key, value)]
        mask = None if attention_mask is None else attention_mask.to(torch.int32)
        mixed = torch.onnx.ops.symbolic(
            "com.microsoft::MultiHeadAttention",
            (*flat, None, mask),
            {"num_heads": heads, "scale": float(scaling or size**-0.5)},
            dtype=query.dtype,
            shape=(batch, length, heads * size),
            version=1,
        )
        return mixed.reshape(batch, length, heads, size), None

    def pass_mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> torch.Tensor | None:
        return attention_mask

    AttentionInterface.register(_ATTENTION, attend)
    AttentionMaskInterface.register(_ATTENTION, pass_mask)


RECIPE = Recipe(
    task="feature-extraction",
    precisions=("fp32", "fp16", "int8"),
    export=export,
    quantise=quantise,
    search=partial(search_encoder, quantise=quantise),
    package=package,
    reference=reference,
    check=check_texts,
)
