"""Two bundles of one encoder or classifier, side by side in one run: the second's throughput over the first's.

    python benchmarks/compare.py FIRST SECOND [--batch-size 16] [--repeats 9] [--threads 2]

Texts are validation's, in their mixed lengths; frames are noise, as speed does not depend on what they show. The two take
turns, with a pause in which the threads of the one before stop spinning for work, and the ratio is the median over the
repeats. Prints one line of text and one of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from edge_convert.runtime.bundle import Bundle
from edge_convert.runtime.threads import available_cpus
from edge_convert.validate.texts import load_texts
from edge_convert.wrappers.embed import TextEmbedder
from edge_convert.wrappers.image import ImageClassifier

FRAMES = 32
PAUSE_S = 0.3


def work_of(path: Path, batch_size: int, threads: int) -> tuple[Callable[[], object], int]:
    """One round of work on the bundle, and how many items it has."""
    bundle = Bundle.open(path)
    if bundle.manifest.task == "feature-extraction":
        embedder, texts = TextEmbedder.load(bundle, threads=threads), load_texts()
        return lambda: embedder.embed(texts, batch_size=batch_size), len(texts)
    classifier = ImageClassifier.load(bundle, threads=threads)
    frame = classifier.preprocess(np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8))
    batch = np.stack([frame] * batch_size)
    return lambda: [
        classifier.logits(batch) for _ in range(max(1, FRAMES // batch_size))
    ], FRAMES // batch_size * batch_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs=2, type=Path)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=available_cpus())
    options = parser.parse_args()
    works = [work_of(path, options.batch_size, options.threads) for path in options.bundles]
    rates: list[list[float]] = [[], []]
    for repeat in range(options.repeats + 1):
        for (work, items), found in zip(works, rates, strict=True):
            time.sleep(PAUSE_S)
            work()  # the first after a pause is slower
            start = time.perf_counter()
            work()
            if repeat:  # the first round warms up
                found.append(items / (time.perf_counter() - start))
    ratio = statistics.median(second / first for first, second in zip(*rates, strict=True))
    speeds = [round(statistics.median(found), 1) for found in rates]
    print(
        f"{speeds[0]} and {speeds[1]} items/s in batches of {options.batch_size}: the second is {ratio:.2f} times as fast"
    )
    print(
        json.dumps(
            {
                "items_per_s": speeds,
                "ratio": round(ratio, 3),
                "batch_size": options.batch_size,
                "threads": options.threads,
            }
        )
    )


if __name__ == "__main__":
    main()
