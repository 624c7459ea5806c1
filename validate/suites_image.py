"""What is asked of an image classifier: accuracy and preprocessing against the original, invariants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from edge_convert.runtime.errors import FeedError
from edge_convert.validate import metrics
from edge_convert.validate.gates import GateList
from edge_convert.validate.golden import Golden, synthetic_image
from edge_convert.validate.runner import ClassifierReference

if TYPE_CHECKING:
    from PIL.Image import Image

    from edge_convert.wrappers.image import ImageLike

MAX_IMAGES = 32
BATCH = 8
NO_IMAGES = "no images were given (--calibration DIR)"
# Largest change of any class's probability when a frame runs in a batch instead of alone.
SAME_RESULT_PROBABILITY = {"auto": 0.05, "fp32": 1e-4, "fp16": 0.01, "int8": 0.05, "int4": 0.05}

Frames = npt.NDArray[np.uint8]


class ClassifierLike(Protocol):
    """The part of `wrappers.image.ImageClassifier` that validation drives."""

    def preprocess(self, image: Any, /) -> Frames:
        """uint8 (H, W, 3) of one image."""
        ...

    def logits(self, frames: Frames, /) -> npt.NDArray[np.float32]:
        """Logits (N, C) of frames (N, H, W, 3)."""
        ...


def check_classifier(
    classifier: ClassifierLike,
    reference: ClassifierReference,
    images: Sequence[ImageLike],
    gates: GateList,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Add accuracy and equality gates against `reference`; returns the measurements."""
    from edge_convert.wrappers.image import load_image

    loaded = [load_image(path) for path in images[:MAX_IMAGES]]
    progress("comparing preprocessing with the original")
    _preprocessing(gates, classifier, reference, [*loaded, load_image(synthetic_image())])
    if not loaded:
        gates.not_run("logits", "top1_agreement", NO_IMAGES)
        gates.not_run("logits", "probability_error_mean", NO_IMAGES)
        return {}
    progress("comparing logits with the original")
    views = [view for image in loaded for view in (image, *crops(image))]
    frames = np.stack([reference.preprocess(view) for view in views])
    expected = in_batches(reference.logits, frames)
    found = in_batches(classifier.logits, frames)
    return {"images": len(loaded), **_accuracy("logits", gates, expected, found, f"{len(loaded)} photos with crops")}


def check_classifier_golden(classifier: ClassifierLike, golden: Golden, gates: GateList) -> dict[str, Any]:
    """Add accuracy and equality gates against the bundle's golden data; returns the measurements."""
    differing = _differing(classifier.preprocess(golden["pixels"]), golden["frames"][-1])
    gates.equal("preprocessing = original", "differing_images", int(differing))
    photos = int(golden["photos"])
    if not photos:
        for metric in ("top1_agreement", "probability_error_mean"):
            gates.not_run("golden logits", metric, "the bundle was made without photos (--calibration DIR)")
        return {}
    found = in_batches(classifier.logits, golden["frames"][:photos])
    few = f"{photos} frames of the golden data"
    return {"images": photos, **_accuracy("golden logits", gates, golden["logits"][:photos], found, few)}


def check_classifier_invariants(
    classifier: ClassifierLike,
    precision: str,
    gates: GateList,
    progress: Callable[[str], None],
    *,
    exact: bool = True,
) -> None:
    """Add the gates that need no original: batched and repeated runs give the same."""
    progress("checking batches")
    frame = classifier.preprocess(synthetic_image())
    frames = np.stack([frame, frame[::-1], frame[:, ::-1], 255 - frame])
    single = np.concatenate([classifier.logits(frames[row : row + 1]) for row in range(len(frames))])
    again = np.concatenate([classifier.logits(frames[row : row + 1]) for row in range(len(frames))])
    if exact:
        gates.equal("repeated run", "differing_logits", int(np.count_nonzero(single != again)))
    else:
        gates.at_most("repeated run", "probability_change_max", _change(single, again), 1e-3)
    try:
        batched = classifier.logits(frames)
    except FeedError as error:
        gates.not_run("batch = single", "probability_change_max", f"the graph takes no batch of 4: {error}")
        return
    bound = SAME_RESULT_PROBABILITY[precision]
    gates.at_most("batch = single", "probability_change_max", _change(single, batched), bound, "bound by precision")


def crops(image: Image) -> Iterator[Image]:
    """The four corners and the centre, each 80 % and 90 % of the width and height (at least 1 pixel)."""
    for share in (0.8, 0.9):
        width, height = max(1, int(image.width * share)), max(1, int(image.height * share))
        right, bottom = image.width - width, image.height - height
        for left, top in ((0, 0), (right, 0), (0, bottom), (right, bottom), (right // 2, bottom // 2)):
            yield image.crop((left, top, left + width, top + height))


def in_batches(run: Callable[[Frames], npt.NDArray[Any]], frames: Frames) -> npt.NDArray[Any]:
    """`run` over `frames` (N, H, W, 3), at most `BATCH` at a time; one at a time if batches are refused."""
    try:
        first = run(frames[:BATCH])
    except FeedError:
        return np.concatenate([run(frames[row : row + 1]) for row in range(len(frames))])
    rest = [run(frames[start : start + BATCH]) for start in range(BATCH, len(frames), BATCH)]
    return np.concatenate([first, *rest])


def _preprocessing(
    gates: GateList, classifier: ClassifierLike, reference: ClassifierReference, images: Sequence[Image]
) -> None:
    differing = sum(_differing(classifier.preprocess(image), reference.preprocess(image)) for image in images)
    gates.equal("preprocessing = original", "differing_images", differing, "every pixel of every image must be equal")


def _differing(found: Frames, expected: Frames) -> bool:
    return found.shape != expected.shape or found.dtype != expected.dtype or not np.array_equal(found, expected)


def _accuracy(
    name: str, gates: GateList, expected: npt.NDArray[Any], found: npt.NDArray[Any], judged_on: str
) -> dict[str, Any]:
    if expected.shape != found.shape:
        gates.equal(name, "differing_classes", abs(found.shape[-1] - expected.shape[-1]) or 1)
        return {}
    errors = metrics.probability_error(expected, found)
    agreement = metrics.top1_agreement(expected, found)
    gates.declared(name, "top1_agreement", agreement, f"{len(expected)} frames: {judged_on}")
    gates.declared(name, "probability_error_mean", float(errors.mean()), "at the original's top class")
    return {
        "frames": len(expected),
        "probability_error": {
            "mean": float(errors.mean()),
            "p99": metrics.percentile(errors, 99),
            "max": float(errors.max()),
        },
    }


def _change(expected: npt.NDArray[Any], found: npt.NDArray[Any]) -> float:
    return float(np.abs(metrics.softmax(expected) - metrics.softmax(found)).max())
