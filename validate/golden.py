"""Golden data: inputs and the original's outputs, kept in the bundle so that a device can test itself.

`golden.npz` is read with NumPy alone and never unpickles. For a decoder only the `KEPT` most probable
tokens of each position are kept; everything else becomes one class, which makes the KL a lower bound.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from edge_convert.runtime.errors import BundleError, UnknownNameError, clip, shown
from edge_convert.validate.golden_check import check_golden, json_of
from edge_convert.validate.metrics import log_softmax
from edge_convert.validate.runner import (
    ClassifierReference,
    DecoderReference,
    EmbedderReference,
    Reference,
)
from edge_convert.validate.texts import CHATS, load_texts, long_texts

if TYPE_CHECKING:
    from edge_convert.runtime.bundle import Bundle
    from edge_convert.wrappers.image import ImageLike

GOLDEN_FILE = "golden.npz"
GOLDEN_VERSION = 1
KEPT = 64
MAX_BYTES = 1 << 29
MAX_TOKENS = 32
MAX_IMAGES = 8
Golden = dict[str, npt.NDArray[Any]]


def write_golden(folder: Path, task: str, reference: Reference, *, images: Sequence[ImageLike] = ()) -> Path:
    """Run the original on a few inputs and write `golden.npz` into `folder`; returns its path."""
    if task == "text-generation":
        arrays = _decoder(cast("DecoderReference", reference))
    elif task == "feature-extraction":
        arrays = _embedder(cast("EmbedderReference", reference))
    elif task == "image-classification":
        arrays = _classifier(cast("ClassifierReference", reference), images)
    else:
        raise UnknownNameError("task", task, ("text-generation", "feature-extraction", "image-classification"))
    path = folder / GOLDEN_FILE
    np.savez_compressed(path, version=np.asarray(GOLDEN_VERSION), task=np.asarray(task), **cast("Any", arrays))
    return path


def read_golden(bundle: Bundle) -> Golden | None:
    """The bundle's golden arrays, or None if it has none; BundleError if they are not what `write_golden` writes."""
    if GOLDEN_FILE not in bundle.manifest.files:
        return None
    path = bundle.file(GOLDEN_FILE)
    try:
        with zipfile.ZipFile(path) as packed:
            size = sum(entry.file_size for entry in packed.infolist())
        if size > MAX_BYTES:
            raise ValueError(f"it unpacks to {size} bytes, and {MAX_BYTES} are possible")
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # zipfile, zlib and NumPy's header parser raise a dozen kinds
        reason = clip(" ".join(str(error).split()) or type(error).__name__)
        raise BundleError(f"{GOLDEN_FILE} cannot be read: {reason}. Copy the bundle again.") from error
    found = (arrays.get("version", np.asarray(0)).tolist(), arrays.get("task", np.asarray("")).tolist())
    if found != (GOLDEN_VERSION, bundle.manifest.task):
        raise BundleError(
            f"{GOLDEN_FILE} has version and task {shown(found)}, and {(GOLDEN_VERSION, bundle.manifest.task)} is expected. "
            "Convert the model again."
        )
    try:
        check_golden(arrays, bundle.manifest)
    except ValueError as error:
        raise BundleError(
            f"{GOLDEN_FILE} is not golden data of this bundle: {error}. Convert the model again."
        ) from error
    return arrays


def unpack_json(array: npt.NDArray[Any]) -> Any:
    """The value behind an array written by `pack_json`."""
    return json_of(array)


def pack_json(value: Any) -> npt.NDArray[np.uint8]:
    """`value` as UTF-8 JSON, uint8 (bytes,)."""
    return np.frombuffer(json.dumps(value).encode("utf-8"), dtype=np.uint8)


def synthetic_image(height: int = 300, width: int = 260) -> npt.NDArray[np.uint8]:
    """A fixed picture of gradients, a disc and stripes: uint8 (H, W, 3)."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    red = 255 * x / width
    green = 255 * y / height
    blue = 127 + 127 * np.sin(x / 7) * np.cos(y / 11)
    picture = np.stack([red, green, blue], axis=-1)
    picture[(x - width / 2) ** 2 + (y - height / 2) ** 2 < (height / 5) ** 2] = (250, 200, 40)
    return picture.astype(np.uint8)


def _decoder(reference: DecoderReference) -> Golden:
    texts = [*long_texts(4), "def add(a, b):\n    return a + b\n", "로봇이 복도 끝에서 멈췄다."]
    tokens = [reference.tokenize(text) for text in texts]
    ids, top_ids, top_values, lengths = [], [], [], []
    for found in tokens:
        kept = np.asarray(found[:MAX_TOKENS], dtype=np.int64)
        if len(kept) < 2:
            continue
        values = log_softmax(reference.logits(kept))
        count = min(KEPT, values.shape[-1])
        top = np.argsort(-values, axis=-1, kind="stable")[:, :count]
        ids.append(kept)
        lengths.append(len(kept))
        top_ids.append(top.astype(np.int32))
        top_values.append(np.take_along_axis(values, top, axis=-1).astype(np.float32))
    rendered = [reference.render(chat) for chat in CHATS]
    return {
        "ids": np.concatenate(ids),
        "lengths": np.asarray(lengths, dtype=np.int64),
        "top_ids": np.concatenate(top_ids),
        "top_log_probabilities": np.concatenate(top_values),
        "texts": pack_json(texts),
        "tokens": pack_json([list(map(int, found)) for found in tokens]),
        "chats": pack_json(CHATS),
        "rendered": pack_json(rendered),
    }


def _embedder(reference: EmbedderReference) -> Golden:
    texts = [*load_texts()[::6], *long_texts(2)]
    return {
        "texts": pack_json(texts),
        "tokens": pack_json([list(map(int, reference.tokenize(text))) for text in texts]),
        "embeddings": np.asarray(reference.embed(texts), dtype=np.float32),
    }


def _classifier(reference: ClassifierReference, images: Sequence[ImageLike]) -> Golden:
    from PIL import Image

    from edge_convert.wrappers.image import load_image

    pixels = synthetic_image()
    synthetic = reference.preprocess(Image.fromarray(pixels))
    frames = [reference.preprocess(load_image(image)) for image in images[:MAX_IMAGES]]
    stacked = np.stack([*frames, synthetic])
    return {
        "pixels": pixels,
        "frames": stacked,
        "logits": np.asarray(reference.logits(stacked), dtype=np.float32),
        "photos": np.asarray(len(frames)),
    }
