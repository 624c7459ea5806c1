"""Sentence encoders from an ONNX file; pooling and normalisation are added to the graph.

tokenizer.json must lie beside the file; modules.json and 1_Pooling/config.json say how to pool.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_convert.convert.calibration_texts import check_texts
from edge_convert.convert.interrupt import raise_if_interrupted
from edge_convert.convert.onnx_graph import INNER, Original, load_graph, opset_of, surround, to_float32, write_graph
from edge_convert.convert.recipe import Exported, Recipe, Request
from edge_convert.convert.recipes import feature_extraction
from edge_convert.convert.recipes.feature_extraction import EncoderLayout
from edge_convert.convert.recipes.ladder import search_encoder
from edge_convert.convert.recipes.onnx_file import PRECISIONS, check_batch, check_precision, free_batch, source_path
from edge_convert.convert.source import read_object
from edge_convert.runtime.errors import SourceError, UnsupportedModelError

if TYPE_CHECKING:
    import onnx

log = logging.getLogger(__name__)

_SENTENCE_OUTPUTS = ("sentence_embedding", "last_hidden_state", "token_embeddings")


class OnnxEmbedder:
    """The original file in ONNX Runtime, one unpadded text at a time, pooled in NumPy: an EmbedderReference."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.original = Original(path)
        self.inputs = _encoder_inputs(self.original)
        self.output = _encoder_output(self.original)
        self.layout = _layout(path.parent)
        self._tokenizer = _load_tokenizer(path.parent)
        self._tokenizer.enable_truncation(self.layout.max_length)
        self.pad_token_id, self.pad_token_type_id = _padding(path.parent)
        self.rank, self.dimension = self._probe()

    def tokenize(self, text: str) -> list[int]:
        """Token ids with special tokens, cut to the model's length."""
        return list(self._tokenizer.encode(text).ids)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embeddings, float32 (N, D)."""
        return np.stack([self._pool(self._run(text)[0]) for text in texts]).astype(np.float32)

    def _run(self, text: str) -> NDArray[Any]:
        encoded = self._tokenizer.encode(text)
        ids, types = encoded.ids or [self.pad_token_id], encoded.type_ids or [self.pad_token_type_id]
        values = {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": types}
        kinds = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
        feed = {name: np.asarray([values[name]], kinds[self.original.inputs[name][0]]) for name in self.inputs}
        return self.original.run(self.output, feed)

    def _pool(self, hidden: NDArray[Any]) -> NDArray[np.float64]:
        """One vector (D,) of one text's (D,) or (S, D); no position is padding."""
        vector = np.asarray(hidden, np.float64)
        if self.rank == 2:
            return vector
        pooled: NDArray[np.float64] = {"cls": vector[0], "max": vector.max(0), "mean": vector.mean(0)}[
            self.layout.pooling
        ]
        return pooled / max(float(np.linalg.norm(pooled)), 1e-12) if self.layout.normalise else pooled

    def _probe(self) -> tuple[int, int]:
        """Rank and last size of the output, from a run."""
        found = self._run("a b c")
        if found.ndim not in (2, 3) or not np.issubdtype(found.dtype, np.floating):
            raise UnsupportedModelError(
                f"The output {self.output!r} of {self.name} is {found.dtype} {found.shape}; an encoder gives floats "
                "(batch, dimension) or (batch, sequence, dimension)."
            )
        return found.ndim, int(found.shape[-1])


def export_encoder(request: Request, folder: Path) -> dict[str, Exported]:
    """Write the file with its pooling and normalisation in the graph, int64 tokens in, float32 (batch, D) out."""
    from onnx import TensorProto, helper

    path = source_path(request)
    embedder = OnnxEmbedder(path)
    model = load_graph(path, request.profile.opset_max)
    reduced = check_precision(request, model)
    free_batch(model, embedder.name)
    front = [
        helper.make_node("Cast", [name], [f"{INNER}{name}"], to=_input_type(embedder.original, name))
        for name in embedder.inputs
    ]
    back, constants = _pooling(embedder, opset_of(model))
    shape = ("batch", "sequence")
    wrapped = surround(
        model,
        front=front,
        back=back,
        constants=constants,
        inputs=[helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in embedder.inputs],
        output=helper.make_tensor_value_info(
            feature_extraction.OUTPUT, TensorProto.FLOAT, ("batch", embedder.dimension)
        ),
    )
    destination = folder / feature_extraction.FILE
    write_graph(wrapped, destination, fold=not reduced)
    feed = {name: np.ones((2, 5), np.int64) for name in embedder.inputs}
    check_batch(destination, feature_extraction.OUTPUT, feed, embedder.name)
    return {"encoder": Exported(destination)}


def package_encoder(request: Request, folder: Path) -> dict[str, Any]:
    """Copy tokenizer.json and return the wrapper's settings."""
    path = source_path(request)
    embedder = OnnxEmbedder(path)
    shutil.copyfile(path.parent / "tokenizer.json", folder / "tokenizer.json")
    return {
        "tokenizer": "tokenizer.json",
        "max_length": embedder.layout.max_length,
        "pad_token_id": embedder.pad_token_id,
        "pad_token_type_id": embedder.pad_token_type_id,
        "dimension": embedder.dimension,
        "inputs": list(embedder.inputs),
        "output": feature_extraction.OUTPUT,
    }


def check(request: Request) -> tuple[str, ...]:
    """What had to be assumed, since no file beside the graph says it."""
    check_texts(request)
    path = source_path(request)
    if (path.parent / "modules.json").is_file():
        return ()
    text = f"No modules.json lies beside {path.name}: token outputs are mean-pooled and normalised to length 1."
    log.warning(text)
    return (text,)


def _pooling(embedder: OnnxEmbedder, opset: int) -> tuple[list[onnx.NodeProto], dict[str, NDArray[Any]]]:
    """Nodes from the file's output to `embedding`, and their constants; padding is masked out."""
    from onnx import TensorProto, helper

    output, node = feature_extraction.OUTPUT, helper.make_node
    inner = f"{INNER}{embedder.output}"
    if embedder.rank == 2:
        return [to_float32(inner, output, embedder.original.outputs[embedder.output])], {}
    constants: dict[str, NDArray[Any]] = {"axis_1": np.array([1], np.int64), "axis_2": np.array([2], np.int64)}
    nodes = [
        to_float32(inner, "hidden", embedder.original.outputs[embedder.output]),
        node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["mask", "axis_2"], ["kept"]),
    ]
    pooled = "pooled" if embedder.layout.normalise else output
    if embedder.layout.pooling == "cls":
        constants["first"] = np.array(0, np.int64)
        nodes.append(node("Gather", ["hidden", "first"], [pooled], axis=1))
    elif embedder.layout.pooling == "max":
        constants |= {"one": np.array(1, np.float32), "far": np.array(-1e9, np.float32)}
        nodes += [
            node("Sub", ["one", "kept"], ["dropped"]),
            node("Mul", ["dropped", "far"], ["penalty"]),
            node("Add", ["hidden", "penalty"], ["masked"]),
            _reduce("ReduceMax", "masked", pooled, opset),
        ]
    else:
        constants["tiny"] = np.array(1e-9, np.float32)
        nodes += [
            node("Mul", ["hidden", "kept"], ["masked"]),
            node("ReduceSum", ["masked", "axis_1"], ["summed"], keepdims=0),
            node("ReduceSum", ["kept", "axis_1"], ["count"], keepdims=0),
            node("Max", ["count", "tiny"], ["length"]),
            node("Div", ["summed", "length"], [pooled]),
        ]
    if embedder.layout.normalise:
        constants["tiny_norm"] = np.array(1e-12, np.float32)
        nodes += [
            _reduce("ReduceL2", "pooled", "norm", opset, keepdims=1),
            node("Max", ["norm", "tiny_norm"], ["safe_norm"]),
            node("Div", ["pooled", "safe_norm"], [output]),
        ]
    return nodes, constants


def _reduce(kind: str, value: str, output: str, opset: int, *, keepdims: int = 0) -> onnx.NodeProto:
    """A reduction over axis 1, which became an input in opset 18."""
    from onnx import helper

    if opset < 18:
        return helper.make_node(kind, [value], [output], axes=[1], keepdims=keepdims)
    return helper.make_node(kind, [value, "axis_1"], [output], keepdims=keepdims)


def _encoder_inputs(original: Original) -> tuple[str, ...]:
    known = feature_extraction.INPUTS
    found = original.inputs
    if not {"input_ids", "attention_mask"} <= set(found) or not set(found) <= set(known):
        raise UnsupportedModelError(
            f"{original.name} has the inputs {', '.join(found)}; an encoder has input_ids, attention_mask and, if it "
            "likes, token_type_ids. Export it again with these names."
        )
    for name, (kind, shape) in found.items():
        fixed = len(shape) == 2 and (isinstance(shape[1], int) or (isinstance(shape[0], int) and shape[0] != 1))
        if kind not in ("tensor(int64)", "tensor(int32)") or len(shape) != 2 or fixed:
            raise UnsupportedModelError(
                f"The input {name} of {original.name} is {kind} {list(shape)}; integers of free (batch, sequence) are "
                "needed. Export it again with dynamic axes."
            )
    return tuple(name for name in known if name in found)


def _encoder_output(original: Original) -> str:
    for name in _SENTENCE_OUTPUTS:
        if name in original.outputs:
            return name
    if len(original.outputs) == 1:
        return next(iter(original.outputs))
    raise UnsupportedModelError(
        f"{original.name} has the outputs {', '.join(original.outputs)}; one of them must be called "
        f"{' or '.join(_SENTENCE_OUTPUTS)}, or be the only one."
    )


def _input_type(original: Original, name: str) -> int:
    from onnx import TensorProto

    return int(TensorProto.INT32 if original.inputs[name][0] == "tensor(int32)" else TensorProto.INT64)


def _layout(folder: Path) -> EncoderLayout:
    layout = feature_extraction.read_layout(folder, read_object(folder / "config.json"))
    if (folder / "modules.json").is_file():
        return layout
    return EncoderLayout("mean", True, layout.max_length)


def _load_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise SourceError("tokenizer.json must lie beside the ONNX file, and it does not. Copy it from the model.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise_if_interrupted(error)
        raise SourceError(f"tokenizer.json beside the ONNX file cannot be read: {str(error)[:160]}") from error
    tokenizer.no_padding()
    return tokenizer


def _padding(folder: Path) -> tuple[int, int]:
    """Pad token id and pad token type id: tokenizer.json's own, else config.json's, else 0."""
    padding = read_object(folder / "tokenizer.json").get("padding") or {}
    fallback = read_object(folder / "config.json").get("pad_token_id") or 0
    return int(padding.get("pad_id", fallback)), int(padding.get("pad_type_id", 0))


def encoder_reference(request: Request) -> OnnxEmbedder:
    """The original file with pooling and normalisation in NumPy."""
    return OnnxEmbedder(source_path(request))


FEATURE_EXTRACTION = Recipe(
    task="feature-extraction",
    precisions=PRECISIONS,
    export=export_encoder,
    quantise=feature_extraction.quantise,
    search=partial(search_encoder, quantise=feature_extraction.quantise),
    package=package_encoder,
    reference=encoder_reference,
    check=check,
)
