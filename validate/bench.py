"""How fast a bundle runs here: prefill and decode apart, throughput of embedders, latency of classifiers.

The first `warmup` runs are not counted. Times are wall-clock of the whole call from Python.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge_convert.runtime.errors import UsageError
from edge_convert.validate import figures

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Group

    from edge_convert.runtime.bundle import Bundle
    from edge_convert.runtime.device import DeviceProfile
    from edge_convert.runtime.generate import Decoder
    from edge_convert.runtime.manifest import GraphSpec


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """How long to measure: tokens of prompt and of answer, items per batch, counted runs, runs not counted."""

    prompt_tokens: int = 128
    tokens: int = 64
    batch_size: int = 8
    runs: int = 3
    warmup: int = 1
    threads: int | None = None
    cache: bool = True


@dataclass(frozen=True, slots=True)
class Bench:
    """What was measured.

    `measurements` has the unit in each name, and the names are those of a report's latency. `series` has
    (tokens so far, milliseconds per token) for decoders, `cached_series` the same of the run with the cache
    that a run without it is compared with.
    """

    task: str
    mode: str
    target: str
    precision: str
    providers: tuple[str, ...]
    threads: int
    settings: BenchSettings
    measurements: dict[str, Any]
    series: tuple[tuple[int, float], ...] = ()
    cached_series: tuple[tuple[int, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """A plain dict for JSON."""
        return dataclasses.asdict(self)


def bench_bundle(
    bundle: Bundle,
    settings: BenchSettings,
    *,
    profile: DeviceProfile | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Bench:
    """Measure the bundle by its task; `profile` overrides where it runs."""
    task = bundle.manifest.task
    if not settings.cache and task != "text-generation":
        raise UsageError(f"--no-cache is for text-generation bundles, and this one is {task}. Leave it out.")
    if min(settings.prompt_tokens, settings.tokens, settings.batch_size, settings.runs) < 1 or settings.warmup < 0:
        raise UsageError("Token counts, batch size and runs must be 1 or more, warm-up 0 or more.")
    if task == "text-generation":
        return _bench_decoder(bundle, settings, profile, progress)
    if task == "feature-extraction":
        return _bench_embedder(bundle, settings, profile, progress)
    return _bench_classifier(bundle, settings, profile, progress)


def percentiles(milliseconds: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 of a non-empty list, linearly interpolated."""
    import numpy as np

    values = np.percentile(np.asarray(milliseconds, np.float64), (50, 90, 99))
    return dict(zip(("p50", "p90", "p99"), (float(value) for value in values), strict=True))


def ends(series: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Mean milliseconds per token in the first and in the last quarter of a non-empty series."""
    edge = max(1, len(series) // 4)
    first, last = (sum(value for _, value in part) / edge for part in (series[:edge], series[-edge:]))
    return first, last


def sentences(bench: Bench) -> list[str]:
    """How the time of a token grows with the text and, without the cache, what the cache saves: a line each."""
    if not bench.series:
        return []
    first, last = bench.series[0][0], bench.series[-1][0]
    early, late = ends(bench.series)
    lines = [
        f"A token takes {figures.number(early)} ms at {first} tokens and {figures.number(late)} ms at {last}: "
        f"{figures.number(late / early)}x."
    ]
    if bench.cached_series:
        with_cache, without = (
            1e3 * len(series) / sum(value for _, value in series) for series in (bench.cached_series, bench.series)
        )
        lines.append(
            f"Cached {figures.number(with_cache)} tokens/s, without {figures.number(without)} tokens/s: "
            f"{figures.number(with_cache / without, 2)}x at {first} to {last} tokens."
        )
    return lines


def chart(series: Sequence[tuple[int, float]], *, width: int = 50, rows: int = 12) -> str:
    """A bar chart of text: one row per group of positions, the bar is the mean ms per token."""
    if not series:
        return ""
    count = min(rows, len(series))
    edges = [round(index * len(series) / count) for index in range(count + 1)]
    groups = [series[start:end] for start, end in itertools.pairwise(edges)]
    means = [sum(value for _, value in group) / len(group) for group in groups]
    top = max(means) or 1.0
    lines = ["  tokens   ms/token"]
    for group, mean in zip(groups, means, strict=True):
        lines.append(f"{group[-1][0]:8d} {figures.number(mean):>10} {'█' * max(1, round(width * mean / top))}")
    return "\n".join(lines)


def tables(bench: Bench) -> list[Group]:
    """What a terminal shows of the measurements."""
    from rich.text import Text

    table = figures.table("measurement", "value", "unit", right=("value",))
    for what, value, unit in figures.rows(bench.measurements):
        table.add_row(Text(what), value, unit)
    settings = bench.settings
    facts = [bench.mode, f"{bench.threads} threads", *bench.providers]
    if bench.task == "text-generation":
        facts.insert(0, f"{settings.prompt_tokens} prompt tokens, {settings.tokens} generated, runs: {settings.runs}")
    title = f"{bench.task} · {bench.precision} · {bench.target}"
    return [figures.titled(title, table, Text(", ".join(facts), style="dim"))]


def _bench_decoder(
    bundle: Bundle, settings: BenchSettings, profile: DeviceProfile | None, progress: Callable[[str], None]
) -> Bench:
    from edge_convert.runtime.errors import ContextLengthError
    from edge_convert.runtime.generate import Decoder

    progress("loading the decoder")
    started = time.perf_counter()
    session = bundle.session("decoder", profile=profile, threads=settings.threads)
    decoder = Decoder(session)
    load_ms = (time.perf_counter() - started) * 1e3
    needed = settings.prompt_tokens + settings.tokens
    if needed > decoder.context_length:
        raise ContextLengthError(needed, decoder.context_length)
    measure = _cached_run if settings.cache else _uncached_run
    ids = _prompt(settings.prompt_tokens, session.spec)
    prefills: list[float] = []
    steps: list[list[float]] = []
    for index in range(settings.warmup):
        progress(f"warm-up {index + 1} of {settings.warmup}")
        measure(decoder, ids, settings.tokens if settings.cache else 1)
    for index in range(settings.runs):
        progress(f"run {index + 1} of {settings.runs}{'' if settings.cache else ' without the cache'}")
        prefill_ms, step_ms = measure(decoder, ids, settings.tokens)
        prefills.append(prefill_ms)
        steps.append(step_ms)
    every = [value for run in steps for value in run]
    ttft = percentiles(prefills)["p50"]
    values: dict[str, Any] = {
        "load_ms": load_ms,
        "ttft_ms": ttft,
        "prefill_tokens_per_s": settings.prompt_tokens / ttft * 1e3,
        "decode_tokens_per_s": len(every) / sum(every) * 1e3,
        "token_ms": percentiles(every),
    }
    series = _series(steps, settings.prompt_tokens)
    cached: tuple[tuple[int, float], ...] = ()
    if not settings.cache:
        progress("the same with the cache")
        _cached_run(decoder, ids, 1)
        cached = _series([_cached_run(decoder, ids, settings.tokens)[1]], settings.prompt_tokens)
        values["cached_decode_tokens_per_s"] = len(cached) / sum(value for _, value in cached) * 1e3
        values["cache_speedup"] = values["cached_decode_tokens_per_s"] / values["decode_tokens_per_s"]
    early, late = ends(series)
    values["growth_last_to_first_quarter"] = late / early
    return Bench(
        task=bundle.manifest.task,
        mode="with cache" if settings.cache else "without cache: the whole sequence again for each token",
        target=bundle.manifest.target,
        precision=bundle.manifest.precision,
        providers=tuple(session.providers),
        threads=session.threads,
        settings=settings,
        measurements=values,
        series=series,
        cached_series=cached,
    )


def _series(steps: Sequence[Sequence[float]], prompt_tokens: int) -> tuple[tuple[int, float], ...]:
    """(tokens so far, mean milliseconds of that token over the runs)."""
    mean = (sum(column) / len(column) for column in zip(*steps, strict=True))
    return tuple((prompt_tokens + index, value) for index, value in enumerate(mean, start=1))


def _prompt(length: int, spec: GraphSpec) -> NDArray[np.int64]:
    """Ids that the graph's vocabulary has, spread out: int64 (length,)."""
    import numpy as np

    size = next((output.shape[-1] for output in spec.outputs if output.name == "logits"), 200)
    return (np.arange(length, dtype=np.int64) * 37) % (min(size, 200) if isinstance(size, int) else 200)


def _cached_run(decoder: Decoder, ids: NDArray[np.int64], tokens: int) -> tuple[float, list[float]]:
    decoder.reset()
    started = time.perf_counter()
    token = int(decoder.prefill(ids).argmax())
    prefill_ms = (time.perf_counter() - started) * 1e3
    times = []
    for _ in range(tokens):
        started = time.perf_counter()
        token = int(decoder.step(token).argmax())
        times.append((time.perf_counter() - started) * 1e3)
    return prefill_ms, times


def _uncached_run(decoder: Decoder, ids: NDArray[np.int64], tokens: int) -> tuple[float, list[float]]:
    """The same tokens from the same graph, but every token pays for the whole sequence before it."""
    import numpy as np

    times = []
    for _ in range(tokens + 1):
        started = time.perf_counter()
        decoder.reset()
        token = int(decoder.prefill(ids).argmax())
        times.append((time.perf_counter() - started) * 1e3)
        ids = np.append(ids, np.int64(token))
    return times[0], times[1:]


def _bench_embedder(
    bundle: Bundle, settings: BenchSettings, profile: DeviceProfile | None, progress: Callable[[str], None]
) -> Bench:
    from edge_convert.wrappers.embed import TextEmbedder

    progress("loading the embedder")
    started = time.perf_counter()
    embedder = TextEmbedder.load(bundle, profile=profile, threads=settings.threads)
    load_ms = (time.perf_counter() - started) * 1e3
    words = "The drone followed the river north until the wind turned and the battery asked for home"
    texts = [f"{words}, report {index}." for index in range(settings.batch_size)]
    single = _timed(lambda: embedder.embed(texts[0]), settings, progress, "one text")
    batch = _timed(lambda: embedder.embed(texts, batch_size=settings.batch_size), settings, progress, "a batch")
    values: dict[str, Any] = {"load_ms": load_ms, "call_ms": percentiles(single), "batch_ms": percentiles(batch)}
    values["texts_per_s"] = settings.batch_size * len(batch) / sum(batch) * 1e3
    values["tokens_per_text"] = len(embedder.encode_ids(texts[0]))
    return _result(bundle, settings, embedder, values, f"batches of {settings.batch_size}")


def _bench_classifier(
    bundle: Bundle, settings: BenchSettings, profile: DeviceProfile | None, progress: Callable[[str], None]
) -> Bench:
    import numpy as np

    from edge_convert.wrappers.image import ImageClassifier

    progress("loading the classifier")
    started = time.perf_counter()
    classifier = ImageClassifier.load(bundle, profile=profile, threads=settings.threads)
    load_ms = (time.perf_counter() - started) * 1e3
    processing = bundle.manifest.processing
    shape = (int(processing["height"]), int(processing["width"]), 3)
    photo = np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    frame = np.random.default_rng(1).integers(0, 256, (1, *shape), dtype=np.uint8)
    frames = np.repeat(frame, settings.batch_size, axis=0)
    prepare = _timed(lambda: classifier.preprocess(photo), settings, progress, "preprocessing 640x480")
    single = _timed(lambda: classifier.logits(frame), settings, progress, "one frame")
    batch = _timed(lambda: classifier.logits(frames), settings, progress, "a batch")
    values: dict[str, Any] = {
        "load_ms": load_ms,
        "preprocess_ms": percentiles(prepare)["p50"],
        "call_ms": percentiles(single),
    }
    values["frames_per_s"] = len(single) / sum(single) * 1e3
    values["batch_frames_per_s"] = settings.batch_size * len(batch) / sum(batch) * 1e3
    return _result(bundle, settings, classifier, values, f"single and batches of {settings.batch_size}")


def _timed(call: Callable[[], Any], settings: BenchSettings, progress: Callable[[str], None], text: str) -> list[float]:
    """Milliseconds of each counted call; at least 10, for percentiles need some."""
    progress(text)
    for _ in range(settings.warmup):
        call()
    times = []
    for _ in range(max(10, settings.runs)):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e3)
    return times


def _result(bundle: Bundle, settings: BenchSettings, wrapper: Any, values: dict[str, Any], mode: str) -> Bench:
    session = getattr(wrapper, "session", None)
    return Bench(
        task=bundle.manifest.task,
        mode=mode,
        target=bundle.manifest.target,
        precision=bundle.manifest.precision,
        providers=tuple(getattr(session, "providers", ())),
        threads=int(getattr(session, "threads", None) or settings.threads or 0),
        settings=settings,
        measurements=values,
    )
