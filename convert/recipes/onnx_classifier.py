"""Image classifiers from an ONNX file; normalisation and a uint8 NHWC front are added to the graph.

preprocessor_config.json beside the file says how frames are prepared; labels.txt or config.json names classes.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_convert.convert.onnx_graph import (
    INNER,
    Original,
    load_graph,
    strip_softmax,
    surround,
    to_float32,
    write_graph,
)
from edge_convert.convert.recipe import Exported, Recipe, Request
from edge_convert.convert.recipes import image_classification
from edge_convert.convert.recipes.ladder import search_classifier
from edge_convert.convert.recipes.onnx_file import PRECISIONS, check_batch, check_precision, free_batch, source_path
from edge_convert.convert.recipes.onnx_preprocessing import FramePreparation, read_labels, read_preparation
from edge_convert.runtime.errors import UnsupportedModelError

if TYPE_CHECKING:
    import onnx
    from PIL.Image import Image

_LABELS_FILE = "labels.txt"


class OnnxClassifier:
    """The original file in ONNX Runtime with its normalisation in NumPy: a ClassifierReference."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.original = Original(path)
        if len(self.original.inputs) != 1 or len(self.original.outputs) != 1:
            raise UnsupportedModelError(
                f"{path.name} has {len(self.original.inputs)} inputs and {len(self.original.outputs)} outputs; an image "
                "classifier has one of each."
            )
        self.input, self.output = next(iter(self.original.inputs)), next(iter(self.original.outputs))
        kind, shape = self.original.inputs[self.input]
        self.planar = _layout_of(self.name, kind, shape)
        self.preparation: FramePreparation = read_preparation(
            path, shape[2:] if self.planar else shape[1:3], normalised=not self.planar
        )
        self.probabilities = strip_softmax(_structure(path), self.output) != self.output
        settings = self.preparation.settings
        found = self.logits(np.zeros((1, settings.height, settings.width, 3), np.uint8))
        if found.ndim != 2:
            raise UnsupportedModelError(
                f"The output of {path.name} has the shape {found.shape}; a classifier gives (batch, classes)."
            )
        self.classes = int(found.shape[1])

    def logits(self, frames: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Float32 (N, classes) of uint8 frames (N, H, W, 3); logarithms if the file gives probabilities."""
        rows = np.stack([self.original.run(self.output, {self.input: self._prepare(frame)})[0] for frame in frames])
        if self.probabilities:
            rows = np.log(np.maximum(rows.astype(np.float64), 1e-38))
        return rows.astype(np.float32)

    def preprocess(self, image: Image) -> NDArray[np.uint8]:
        """The recipe's resize and crop in plain PIL; uint8 (H, W, 3)."""
        import PIL.Image

        settings = self.preparation.settings
        image = image.convert("RGB")
        factor = settings.resize_short_px / min(image.size)
        image = image.resize(
            (round(image.width * factor), round(image.height * factor)),
            PIL.Image.Resampling[settings.interpolation.upper()],
        )
        left, top = (image.width - settings.width) // 2, (image.height - settings.height) // 2
        pixels = np.asarray(image.crop((left, top, left + settings.width, top + settings.height)))
        return pixels[:, :, ::-1].copy() if settings.channel_order == "BGR" else pixels.copy()

    def _prepare(self, frame: NDArray[np.uint8]) -> NDArray[Any]:
        if not self.planar:
            return np.ascontiguousarray(frame[None])
        mean, std = (np.asarray(value, np.float64) for value in (self.preparation.mean, self.preparation.std))
        pixels = (frame.astype(np.float64) - mean) / std
        return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None].astype(np.float32))


def export_classifier(request: Request, folder: Path) -> dict[str, Exported]:
    """Write the file with its normalisation in the graph, uint8 frames (batch, H, W, 3) in, float32 logits out."""
    from onnx import TensorProto, helper

    path = source_path(request)
    classifier = OnnxClassifier(path)
    read_labels(path, classifier.classes)
    model = load_graph(path, request.profile.opset_max)
    reduced = check_precision(request, model)
    free_batch(model, classifier.name)
    kind = classifier.original.outputs[classifier.output]
    preparation, inner, node = classifier.preparation, f"{INNER}{classifier.input}", helper.make_node
    constants: dict[str, NDArray[Any]] = {}
    if classifier.planar:
        scale = 1 / np.asarray(preparation.std, np.float64)
        shift = -np.asarray(preparation.mean, np.float64) * scale
        constants = {
            "scale": scale.astype(np.float32).reshape(1, 3, 1, 1),
            "shift": shift.astype(np.float32).reshape(1, 3, 1, 1),
        }
        front = [
            node("Transpose", ["frames"], ["planes"], perm=[0, 3, 1, 2]),
            node("Cast", ["planes"], ["pixels"], to=TensorProto.FLOAT),
            node("Mul", ["pixels", "scale"], ["scaled"]),
            node("Add", ["scaled", "shift"], [inner]),
        ]
    else:
        front = [node("Identity", ["frames"], [inner])]
    settings = preparation.settings
    wrapped = surround(
        model,
        front=front,
        back=[to_float32(INNER + strip_softmax(model, classifier.output), "logits", kind)],
        constants=constants,
        inputs=[
            helper.make_tensor_value_info("frames", TensorProto.UINT8, ("batch", settings.height, settings.width, 3))
        ],
        output=helper.make_tensor_value_info("logits", TensorProto.FLOAT, ("batch", classifier.classes)),
    )
    destination = folder / image_classification.FILE
    write_graph(wrapped, destination, fold=not reduced)
    feed = {"frames": np.zeros((2, settings.height, settings.width, 3), np.uint8)}
    check_batch(destination, "logits", feed, classifier.name)
    return {"classifier": Exported(destination)}


def quantise_classifier(
    request: Request, graphs: dict[str, Exported], folder: Path, *, fp32_nodes: int = 0
) -> dict[str, Exported]:
    """Write the graph at the asked precision; int8 is static, calibrated on photos, with `fp32_nodes` nodes or more left
    in fp32."""
    if request.precision == "fp32":
        return graphs
    settings = OnnxClassifier(source_path(request)).preparation.settings
    source = graphs["classifier"].path
    graph = image_classification.quantise_frames(request, source, settings, folder, fp32_nodes=fp32_nodes)
    return {"classifier": graph}


def package_classifier(request: Request, folder: Path) -> dict[str, Any]:
    """Write labels.txt if labels lie beside the file, and return the wrapper's settings."""
    path = source_path(request)
    classifier = OnnxClassifier(path)
    labels = read_labels(path, classifier.classes)
    if labels is not None:
        (folder / _LABELS_FILE).write_text("\n".join(labels) + "\n", "utf-8")
    return {**asdict(classifier.preparation.settings), "labels": _LABELS_FILE if labels else None}


def check(request: Request) -> tuple[str, ...]:
    """What had to be assumed about the frames and the photos, which must be usable before any work."""
    return (*OnnxClassifier(source_path(request)).preparation.warnings, *image_classification.check(request))


def _layout_of(name: str, kind: str, shape: tuple[int | str | None, ...]) -> bool:
    """True for float32 (N, 3, H, W), False for uint8 (N, H, W, 3)."""
    free = len(shape) == 4 and (not isinstance(shape[0], int) or shape[0] == 1)
    if free and kind == "tensor(float)" and shape[1] == 3:
        return True
    if free and kind == "tensor(uint8)" and shape[3] == 3:
        return False
    raise UnsupportedModelError(
        f"The input of {name} is {kind} {list(shape)}; supported: float32 (N, 3, H, W) and uint8 (N, H, W, 3) with a "
        "free N or 1. Export it again in one of these layouts."
    )


def _structure(path: Path) -> onnx.ModelProto:
    import onnx

    return onnx.load(path, load_external_data=False)


def classifier_reference(request: Request) -> OnnxClassifier:
    """The original file with its normalisation in NumPy."""
    return OnnxClassifier(source_path(request))


IMAGE_CLASSIFICATION = Recipe(
    task="image-classification",
    precisions=PRECISIONS,
    export=export_classifier,
    quantise=quantise_classifier,
    search=partial(search_classifier, quantise=quantise_classifier),
    package=package_classifier,
    reference=classifier_reference,
    check=check,
)
