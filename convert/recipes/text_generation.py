"""text-generation: a decoder-only language model as one cached decode graph, its tokenizer and chat template."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from edge_convert.convert import decoder_passes as passes
from edge_convert.convert.calibration_texts import calibration_texts, check_texts
from edge_convert.convert.decoder_export import GRAPH_FILE, DecoderExporter, GenaiExporter
from edge_convert.convert.decoder_quantize import halve_weights, quantise_graph, uniform_plan
from edge_convert.convert.decoder_search import Judge, search_decoder
from edge_convert.convert.gguf import unpack_gguf
from edge_convert.convert.interrupt import raise_if_interrupted
from edge_convert.convert.recipe import Exported, Found, Recipe, Request
from edge_convert.convert.search import Build, Graphs, Search, open_journal
from edge_convert.convert.source import Source
from edge_convert.convert.weights import check_whole, compute_in_fp32, first_line, load_whole
from edge_convert.runtime.errors import ConversionError, ExportError, InputError, UnsupportedModelError
from edge_convert.runtime.manifest import AUTO, CacheSpec
from edge_convert.validate.runner import DecoderReference, Reference

log = logging.getLogger(__name__)

EXPORTER: DecoderExporter = GenaiExporter()
PRECISIONS = ("fp32", "fp16", "int8", "int4")
SEARCH_TEXTS, SEARCH_TOKENS = 6, 96
_CUDA = "CUDAExecutionProvider"
_TOKENIZER, _TEMPLATE = "tokenizer.json", "chat_template.jinja"


def export(request: Request, folder: Path) -> dict[str, Exported]:
    """Write the decode graph in fp32, or in fp16 for a CUDA target asked for fp16, into `folder`."""
    from transformers import AutoModelForCausalLM

    checkpoint = _checkpoint(request.source)
    check_whole(AutoModelForCausalLM, checkpoint, request.source.name)
    raw_folder = folder / "raw"
    native_half = request.precision == "fp16" and _on_cuda(request)
    precision, provider = ("fp16", "cuda") if native_half else ("fp32", "cpu")
    raw = EXPORTER.export(checkpoint, raw_folder, precision=precision, provider=provider)
    length = context_length(request, raw.context_length)
    model = passes.load_graph(raw.path)
    passes.share_embedding(model)
    passes.take_lengths(model)
    passes.add_logits_positions(model)
    passes.drop_trailing_inputs(model)
    passes.fix_cache_shapes(model, raw.head_dim)
    passes.trim_rotary(model, length)
    passes.lower_opset(model, request.profile.opset_max)
    path = folder / GRAPH_FILE
    passes.save_graph(model, path)
    del model
    shutil.rmtree(raw_folder)
    cache = CacheSpec(
        past=tuple(f"past_key_values.{layer}.{kind}" for layer in range(raw.layers) for kind in ("key", "value")),
        present=tuple(f"present.{layer}.{kind}" for layer in range(raw.layers) for kind in ("key", "value")),
        kv_heads=raw.kv_heads,
        head_dim=raw.head_dim,
        max_length=length,
        dtype="float16" if native_half else "float32",
    )
    return {"decoder": Exported(path, cache)}


def context_length(request: Request, model_length: int) -> int:
    """Positions of the cache: what was asked for, or the smaller of the model's and the target's default."""
    asked = request.context_tokens
    if asked is None:
        return min(model_length, request.profile.default_context_tokens)
    if asked > model_length:
        raise ExportError(
            f"A context of {asked} tokens was asked for, and {request.source.name} was trained for {model_length}. "
            f"Pass --context {model_length} or less."
        )
    return asked


def quantise(request: Request, graphs: dict[str, Exported], folder: Path) -> dict[str, Exported]:
    """Write the exported graph at the asked precision into `folder`; fp32 (and fp16 for CUDA) pass through."""
    source = graphs["decoder"]
    if request.precision == "fp32" or (request.precision == "fp16" and _on_cuda(request)):
        return graphs
    model = passes.load_graph(source.path)
    if request.precision == "fp16":
        log.warning("On the CPU fp16 weights are kept in half the size and computed in fp32: smaller, not faster.")
        changed = halve_weights(model)
    else:
        changed = len(quantise_graph(model, uniform_plan(request.precision, model, request.profile.accuracy_level)))
    if not changed:
        raise ExportError(f"No weight of {request.source.name} could be written as {request.precision}; use fp32.")
    path = folder / GRAPH_FILE
    passes.save_graph(model, path)
    return {"decoder": Exported(path, source.cache)}


def search(request: Request, graphs: dict[str, Exported], reference: Reference, folder: Path) -> Found:
    """The cheapest of int4, int4 with int8 layers, int8, and what is wider, that is within the target's bounds."""
    original = cast("DecoderReference", reference)
    texts = calibration_texts(request.calibration)
    ids = [np.asarray(original.tokenize(text)[:SEARCH_TOKENS], dtype=np.int64) for text in texts]
    longest = sorted((item for item in ids if len(item) > 1), key=len, reverse=True)[:SEARCH_TEXTS]
    if not longest:
        raise ConversionError("No calibration text gave two tokens or more. Pass --calibration DIR with longer texts.")
    journal = open_journal(request, RECIPE.task, [item.tolist() for item in longest])
    state = Search(request.profile.gate_bounds(RECIPE.task, AUTO), folder, journal, request.progress)
    judge = Judge(longest, [np.asarray(original.logits(item), np.float32) for item in longest])
    best = search_decoder(state, graphs["decoder"], judge, accuracy_level=request.profile.accuracy_level)
    for precision in ("fp16", "fp32"):
        if best.refused and precision in (*request.profile.native_precisions, "fp32"):
            best = state.attempt(precision, _wide(replace(request, precision=precision), graphs), judge.measure)
    return state.found()


def _wide(request: Request, graphs: dict[str, Exported]) -> Build:
    """How to write the graph in fp16 or fp32 into a folder; an fp16 graph for CUDA is exported as one."""

    def build(folder: Path) -> Graphs:
        if request.precision == "fp16" and _on_cuda(request):
            return export(request, folder)
        return quantise(request, graphs, folder)

    return build


def package(request: Request, folder: Path) -> dict[str, Any]:
    """Write tokenizer.json and, if there is one, chat_template.jinja; returns Manifest.processing."""
    from transformers import AutoConfig

    checkpoint = _checkpoint(request.source)
    tokenizer = _tokenizer(checkpoint)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModelError(
            f"{request.source.name} has the tokenizer {type(tokenizer).__name__}, which has no tokenizer.json form. "
            "Convert a model with a fast tokenizer."
        )
    backend.no_truncation()
    backend.no_padding()
    (folder / _TOKENIZER).write_text(backend.to_str(pretty=False), "utf-8")
    template = _template(tokenizer)
    if template is not None:
        (folder / _TEMPLATE).write_text(template, "utf-8")
    config = AutoConfig.from_pretrained(checkpoint)
    text_config = config.get_text_config()
    return {
        "tokenizer": _TOKENIZER,
        "chat_template": None if template is None else _TEMPLATE,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_ids": stop_ids(checkpoint, tokenizer),
        "context_length": context_length(request, int(text_config.max_position_embeddings)),
        "add_special_tokens": True,
    }


def stop_ids(checkpoint: Path, tokenizer: Any) -> list[int]:
    """Ids that end a generation: of the generation config, the config, the tokenizer, and a chat turn's end."""
    from transformers import AutoConfig, GenerationConfig

    found: list[int | None] = []
    config = AutoConfig.from_pretrained(checkpoint)
    sources: list[Any] = [config, config.get_text_config()]
    if (checkpoint / "generation_config.json").is_file():
        sources.insert(0, GenerationConfig.from_pretrained(checkpoint))
    for item in sources:
        ids = getattr(item, "eos_token_id", None)
        found.extend(ids if isinstance(ids, (list, tuple)) else [ids])
    found += [tokenizer.eos_token_id, _turn_end(tokenizer)]
    return sorted({int(token) for token in found if token is not None})


def _turn_end(tokenizer: Any) -> int | None:
    """The special token that the chat template writes right after an assistant's words, if any."""
    from jinja2 import TemplateError

    if _template(tokenizer) is None:
        return None
    marker = "edge-convert-turn"
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": marker}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, TypeError, ValueError) as error:
        log.warning("The chat template could not be tried for its end-of-turn token: %s", error)
        return None
    tail = text.rpartition(marker)[2].lstrip()
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special and token.content and tail.startswith(token.content):
            return int(token_id)
    return None


def _template(tokenizer: Any) -> str | None:
    """The tokenizer's chat template; of several, the one called "default"."""
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("default")
    return template or None


def _on_cuda(request: Request) -> bool:
    return request.profile.providers[0].name == _CUDA


def _checkpoint(source: Source) -> Path:
    """The Hugging Face folder to read: the source itself, or what a GGUF file was dequantised into."""
    if source.path is None or source.kind not in ("huggingface", "gguf"):
        raise UnsupportedModelError(
            f"text-generation needs a Hugging Face folder or a .gguf file; {source.location} is of kind {source.kind}."
        )
    return unpack_gguf(source.path) if source.kind == "gguf" else source.path


def _tokenizer(checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise_if_interrupted(error)
        raise UnsupportedModelError(
            f"{checkpoint.name} has no tokenizer that transformers can load ({first_line(error)}). Save it beside the weights."
        ) from error


class TorchDecoderReference:
    """The original in fp32 in transformers: token ids in, logits of every position out."""

    def __init__(self, checkpoint: Path, name: str) -> None:
        from transformers import AutoModelForCausalLM

        self.name = name
        self._model = compute_in_fp32(load_whole(AutoModelForCausalLM, checkpoint, name, dtype="auto").eval())
        self._tokenizer = _tokenizer(checkpoint)

    def logits(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Logits float32 (S, vocab) for token ids int64 (S,)."""
        import torch

        with torch.inference_mode():
            output = self._model(torch.from_numpy(np.asarray(ids, dtype=np.int64))[None], use_cache=False)
        values: npt.NDArray[np.float32] = output.logits[0].float().numpy()
        return values

    def tokenize(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens the original adds."""
        if not isinstance(text, str):
            raise InputError(f"Text is needed; found {type(text).__name__}.")
        return [int(token) for token in self._tokenizer.encode(text)]

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """The prompt of a conversation with the assistant's opening, or None without a chat template."""
        if _template(self._tokenizer) is None:
            return None
        return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))


def reference(request: Request) -> TorchDecoderReference:
    """The original of `request` in fp32; for GGUF the dequantised model."""
    return TorchDecoderReference(_checkpoint(request.source), request.source.name)


RECIPE = Recipe(
    task="text-generation",
    precisions=PRECISIONS,
    export=export,
    quantise=quantise,
    search=search,
    package=package,
    reference=reference,
    check=check_texts,
)
