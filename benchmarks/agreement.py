"""Top-1 agreement of classifier bundles with their original, on random crops of photos that never calibrated.

    python benchmarks/agreement.py SOURCE BUNDLE [BUNDLE ...] [--photos DIR] [--crops 480] [--smallest 0.35] [--seed 5]

Crops are `--smallest` to 100 % of each side, half of them mirrored, as many of each photo. Without --photos: the sample
photos that judge, and china and flower of scikit-learn where it is installed. The interval is that of Wilson at 95 %;
crops of few photos are alike, so the true one is wider. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import numpy as np
import PIL.Image

from edge_convert.convert.photos import SUFFIXES, read_photos
from edge_convert.convert.pipeline import load_reference
from edge_convert.runtime.bundle import Bundle
from edge_convert.runtime.device import with_cpu_only
from edge_convert.validate import metrics
from edge_convert.validate.runner import ClassifierReference
from edge_convert.validate.suites_image import in_batches
from edge_convert.wrappers.image import ImageClassifier, load_image


def photos_of(folder: Path | None) -> list[Any]:
    """The photos to cut: all of a folder, or those that judge by default."""
    if folder is not None:
        return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    found = list(read_photos(None).judging)
    try:
        package = metadata.distribution("scikit-learn")
    except metadata.PackageNotFoundError:
        return found
    return [
        *found,
        *(Path(str(package.locate_file(f"sklearn/datasets/images/{name}.jpg"))) for name in ("china", "flower")),
    ]


def crop(image: PIL.Image.Image, smallest: float, rng: np.random.Generator) -> PIL.Image.Image:
    """A random part of the picture, at least `smallest` of each side, mirrored every other time."""
    share = rng.uniform(smallest, 1)
    width, height = max(1, int(image.width * share)), max(1, int(image.height * share))
    left, top = (int(rng.integers(0, room + 1)) for room in (image.width - width, image.height - height))
    part = image.crop((left, top, left + width, top + height))
    return part.transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else part


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share of `count` samples (Wilson 1927)."""
    middle, width = share + z**2 / (2 * count), z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return (middle - width) / (1 + z**2 / count), (middle + width) / (1 + z**2 / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--crops", type=int, default=480)
    parser.add_argument("--smallest", type=float, default=0.35)
    parser.add_argument("--seed", type=int, default=5)
    options = parser.parse_args()
    bundles = [Bundle.open(path) for path in options.bundles]
    original = cast("ClassifierReference", load_reference(options.source, bundle=bundles[0]))
    images = [load_image(path) for path in photos_of(options.photos)]
    rng = np.random.default_rng(options.seed)
    frames = np.stack(
        [original.preprocess(crop(images[at % len(images)], options.smallest, rng)) for at in range(options.crops)]
    )
    expected = in_batches(original.logits, frames)
    rows = {}
    for path, bundle in zip(options.bundles, bundles, strict=True):
        profile = bundle.profile
        if profile.providers[0].name != "CPUExecutionProvider":
            profile = with_cpu_only(profile)
        found = in_batches(ImageClassifier.load(bundle, profile=profile).logits, frames)
        agreement = metrics.top1_agreement(expected, found)
        flipped = expected.argmax(1) != found.argmax(1)
        best = np.sort(expected, axis=1)[:, -2:]
        low, high = wilson(agreement, len(frames))
        rows[str(path)] = {
            "top1_agreement": agreement,
            "interval": [low, high],
            "flips_max_margin": float((best[:, 1] - best[:, 0])[flipped].max(initial=0)),
            "probability_error_mean": float(metrics.probability_error(expected, found).mean()),
            "snr_db": float(10 * np.log10(np.square(expected).sum() / max(np.square(expected - found).sum(), 1e-30))),
        }
        print(
            f"{path.name}: top-1 {agreement:.4f} ({low:.3f} to {high:.3f}), flips up to {rows[str(path)]['flips_max_margin']:.2f} "
            f"between the original's two best logits, probability error {rows[str(path)]['probability_error_mean']:.4f}, "
            f"SNR {rows[str(path)]['snr_db']:.1f} dB"
        )
    print(
        json.dumps(
            {
                "crops": options.crops,
                "photos": len(images),
                "smallest": options.smallest,
                "seed": options.seed,
                "bundles": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
