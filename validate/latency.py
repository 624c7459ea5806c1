"""Time and memory of a bundle, measured in a process of its own that does nothing else.

`measure` starts `python -m edge_convert.validate.latency`, so that the peak memory is the bundle's and
not that of the process which also holds the original. Times are wall clock in milliseconds.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_convert.runtime.errors import DeviceError, EdgeError
from edge_convert.validate.metrics import percentile

if TYPE_CHECKING:
    from edge_convert.runtime.bundle import Bundle
    from edge_convert.runtime.device import DeviceProfile
    from edge_convert.runtime.session import Session

PROMPT_TOKENS = 40
DECODE_TOKENS = 64
WARM_UP = 3
REPEATS = 5
CALLS = 30
TIMEOUT_S = 300
_TEXT = "The inspection robot starts its round at the south gate and reads every gauge. " * 4


def measure(bundle: Bundle, *, threads: int | None = None, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Latency and peak memory of `bundle` from a fresh process; raises DeviceError if that fails."""
    command = [sys.executable, "-m", "edge_convert.validate.latency", str(bundle.path)]
    if threads is not None:
        command += ["--threads", str(threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise DeviceError(f"The latency run did not end within {timeout_s:g} s. Measure on an idle device.") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        detail = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise DeviceError(f"The latency run ended with code {done.returncode}: {detail}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def measure_here(bundle: Bundle, *, profile: DeviceProfile | None = None, threads: int | None = None) -> dict[str, Any]:
    """Latency of `bundle` in this process; `peak_memory_mb` is then that of the whole process."""
    task = bundle.manifest.task
    if task == "text-generation":
        values = _decoder(bundle, profile, threads)
    elif task == "feature-extraction":
        values = _embedder(bundle, profile, threads)
    else:
        values = _classifier(bundle, profile, threads)
    values["peak_memory_mb"] = peak_memory_mb()
    return values


def peak_memory_mb() -> float | None:
    """The highest resident memory of this process so far, in MiB; None where it cannot be read."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass  # not Linux: ask getrusage below
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1024**2 if sys.platform == "darwin" else peak / 1024


def spread(samples_ms: list[float]) -> dict[str, float]:
    """p50, p90 and p99 in ms, and how many samples they come from."""
    shares = {f"p{share}": percentile(samples_ms, share) for share in (50, 90, 99)}
    return {**shares, "samples": len(samples_ms)}


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1000


def _facts(session: Session) -> dict[str, Any]:
    return {"threads": session.threads, "providers": list(session.providers)}


def _decoder(bundle: Bundle, profile: DeviceProfile | None, threads: int | None) -> dict[str, Any]:
    from tokenizers import Tokenizer

    from edge_convert.runtime.generate import Decoder, generate
    from edge_convert.runtime.sampling import GenerationConfig

    start = time.perf_counter()
    session = bundle.session("decoder", profile=profile, threads=threads)
    inside: list[float] = []
    _time_runs(session, inside)
    decoder = Decoder(session)
    tokenizer = Tokenizer.from_file(str(bundle.file(bundle.manifest.processing["tokenizer"])))
    load_ms = (time.perf_counter() - start) * 1000
    room = decoder.context_length
    prompt = tokenizer.encode(_TEXT).ids[: max(1, min(PROMPT_TOKENS, room // 2))]
    count = max(1, min(DECODE_TOKENS, room - len(prompt)))
    config = GenerationConfig(max_tokens=count)

    def first_token() -> None:
        decoder.reset()
        decoder.prefill(prompt)

    for _ in range(WARM_UP):
        first_token()
    firsts = [_timed(first_token) for _ in range(REPEATS)]
    steps, overheads = [], []
    gc.collect()
    for _ in range(2):
        inside.clear()
        stamps = []
        for _token in generate(decoder, prompt, config):
            stamps.append(time.perf_counter())
        gaps = [(after - before) * 1000 for before, after in itertools.pairwise(stamps)]
        steps += gaps
        runs = inside[-len(gaps) :] if gaps else []
        overheads += [gap - run for gap, run in zip(gaps, runs, strict=True)]
    values: dict[str, Any] = {
        "load_ms": load_ms,
        "prompt_tokens": len(prompt),
        "ttft_ms": percentile(firsts, 50),
        "prefill_tokens_per_s": len(prompt) / percentile(firsts, 50) * 1000,
        "warm_up": f"{WARM_UP} prefills",
        "cache_mb": decoder.cache_bytes / 2**20,
        **_facts(session),
    }
    if steps:
        values["decode_tokens_per_s"] = 1000 / float(np.mean(steps))
        values["token_ms"] = spread(steps)
        values["loop_overhead_ms_per_token"] = percentile(overheads, 50)
    return values


def _time_runs(session: Session, inside: list[float]) -> None:
    """Append the duration in ms of every bound run of `session` to `inside`."""
    run = session.ort.run_with_iobinding

    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = run(*arguments, **options)
        inside.append((time.perf_counter() - start) * 1000)
        return result

    session.ort.run_with_iobinding = timed


def _embedder(bundle: Bundle, profile: DeviceProfile | None, threads: int | None) -> dict[str, Any]:
    from edge_convert.validate.texts import load_texts
    from edge_convert.wrappers.embed import TextEmbedder

    start = time.perf_counter()
    embedder = TextEmbedder.load(bundle, profile=profile, threads=threads)
    load_ms = (time.perf_counter() - start) * 1000
    texts = load_texts()[:CALLS]
    for text in texts[:WARM_UP]:
        embedder.embed(text)
    singles = [_timed(lambda: embedder.embed(text)) for text in texts]
    batch_ms = _timed(lambda: embedder.embed(texts))
    return {
        "load_ms": load_ms,
        "call_ms": spread(singles),
        "texts_per_s": len(texts) / batch_ms * 1000,
        "warm_up": f"{WARM_UP} calls",
        **_facts(embedder.session),
    }


def _classifier(bundle: Bundle, profile: DeviceProfile | None, threads: int | None) -> dict[str, Any]:
    from edge_convert.validate.golden import synthetic_image
    from edge_convert.wrappers.image import ImageClassifier

    start = time.perf_counter()
    classifier = ImageClassifier.load(bundle, profile=profile, threads=threads)
    load_ms = (time.perf_counter() - start) * 1000
    image = synthetic_image()
    frame = classifier.preprocess(image)[None]
    for _ in range(WARM_UP):
        classifier.logits(frame)
    calls = [_timed(lambda: classifier.logits(frame)) for _ in range(CALLS)]
    prepare = [_timed(lambda: classifier.preprocess(image)) for _ in range(REPEATS)]
    return {
        "load_ms": load_ms,
        "call_ms": spread(calls),
        "preprocess_ms": percentile(prepare, 50),
        "frames_per_s": 1000 / percentile(calls, 50),
        "warm_up": f"{WARM_UP} calls",
        **_facts(classifier.session),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure the bundle named on the command line; one line of JSON on standard output."""
    from edge_convert.runtime.bundle import Bundle

    parser = argparse.ArgumentParser(prog="python -m edge_convert.validate.latency")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args(arguments)
    try:
        values = measure_here(Bundle.open(options.bundle, verify=False), threads=options.threads)
    except EdgeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(values) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
