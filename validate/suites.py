"""Validation of one bundle: opens it, runs the task's checks, measures time, returns the report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from edge_convert.runtime.device import DeviceProfile, with_cpu_only
from edge_convert.runtime.errors import DeviceError, ProviderUnavailableError
from edge_convert.validate.environment import describe
from edge_convert.validate.gates import GateList
from edge_convert.validate.golden import GOLDEN_FILE, read_golden
from edge_convert.validate.report import Report
from edge_convert.validate.runner import ClassifierReference, DecoderReference, EmbedderReference, Reference

if TYPE_CHECKING:
    from edge_convert.runtime.bundle import Bundle
    from edge_convert.runtime.generate import Decoder
    from edge_convert.runtime.session import Session
    from edge_convert.validate.suites_text import DecoderSubject
    from edge_convert.wrappers.image import ImageLike
    from edge_convert.wrappers.text import TextGenerator

log = logging.getLogger(__name__)

ON_CPU = "(on CPU)"
NO_GOLDEN = f"the bundle has no {GOLDEN_FILE}"
# Metrics of the latency run that a target may bound, by their name in devices.yaml.
LATENCY_METRICS = {
    "load_ms": ("load_ms",),
    "ttft_ms": ("ttft_ms",),
    "decode_tokens_per_s": ("decode_tokens_per_s",),
    "prefill_tokens_per_s": ("prefill_tokens_per_s",),
    "token_ms_p90": ("token_ms", "p90"),
    "token_ms_p99": ("token_ms", "p99"),
    "call_ms_p50": ("call_ms", "p50"),
    "call_ms_p90": ("call_ms", "p90"),
    "call_ms_p99": ("call_ms", "p99"),
    "peak_memory_mb": ("peak_memory_mb",),
}

Wrapper = TypeVar("Wrapper")


def validate_bundle(
    bundle: Bundle,
    reference: Reference | None,
    *,
    images: Sequence[ImageLike] = (),
    threads: int | None = None,
    measure_latency: bool = True,
    progress: Callable[[str], None] = log.info,
) -> Report:
    """Compare `bundle` with the original, check its invariants and measure it; never raises for a failed gate.

    Without `reference` the accuracy is that of the bundle's golden data. Where the target's provider is
    not available the numerics run on the CPU under a label, and time is not measured. `images` are for
    image classifiers. Raises EdgeError if the bundle cannot be opened or run at all.
    """
    manifest = bundle.manifest
    bounds = bundle.profile.gate_bounds(manifest.task, manifest.precision)
    gates = GateList(bounds)
    progress("opening the bundle")
    if manifest.task == "text-generation":
        session, missing, accuracy = _decoder(bundle, reference, gates, threads, progress)
    elif manifest.task == "feature-extraction":
        session, missing, accuracy = _embedder(bundle, reference, gates, threads, progress)
    else:
        session, missing, accuracy = _classifier(bundle, reference, images, gates, threads, progress)
    gates.label = ""
    measurements: dict[str, Any] = {"accuracy": accuracy}
    timing = _latency(bundle, gates, missing, threads, measure_latency, progress)
    if timing:
        measurements["latency"] = timing
    notes = [f"Accuracy is against {'the golden data' if reference is None else reference.name + ' in fp32'}."]
    if missing:
        notes.append(f"{missing}; accuracy and invariants were measured on the CPU instead.")
    if timing:
        notes.append("Peak memory is that of a separate process that only opened and ran the bundle.")
    return Report(
        task=manifest.task,
        target=manifest.target,
        precision=manifest.precision,
        gates=tuple(gates.gates),
        measurements=measurements,
        environment=describe(providers=session.providers, threads=session.threads),
        notes=tuple(notes),
    )


def open_for_validation(
    load: Callable[[DeviceProfile], Wrapper], session_of: Callable[[Wrapper], Session], profile: DeviceProfile
) -> tuple[Wrapper, str | None]:
    """The opened wrapper, and None or the reason why it is on the CPU instead of the target's provider."""
    wanted = profile.providers[0].name
    missing = f"{wanted} is not available here"
    try:
        wrapper = load(profile)
    except ProviderUnavailableError as error:
        log.warning("%s", error)
        return load(with_cpu_only(profile)), missing
    return wrapper, None if session_of(wrapper).providers[:1] == (wanted,) else missing


def _decoder(
    bundle: Bundle,
    reference: Reference | None,
    gates: GateList,
    threads: int | None,
    progress: Callable[[str], None],
) -> tuple[Session, str | None, dict[str, Any]]:
    from edge_convert.validate import suites_text as suite
    from edge_convert.wrappers.text import TextGenerator

    generator, missing = open_for_validation(
        lambda profile: TextGenerator.load(bundle, profile=profile, threads=threads),
        lambda wrapper: wrapper.decoder.session,
        bundle.profile,
    )
    gates.label = ON_CPU if missing else ""
    subject = _decoder_subject(generator, bundle.manifest.precision)
    accuracy: dict[str, Any] = {}
    if reference is not None:
        accuracy = suite.check_decoder(subject, cast("DecoderReference", reference), gates, progress)
    elif (golden := read_golden(bundle)) is not None:
        accuracy = suite.check_decoder_golden(subject, golden, gates)
    else:
        gates.not_run("golden logits", "kl_mean", NO_GOLDEN)
    gates.attempt("invariants", "errors", lambda: suite.check_decoder_invariants(subject, gates, progress))
    return generator.decoder.session, missing, accuracy


def _decoder_subject(generator: TextGenerator, precision: str) -> DecoderSubject:
    from edge_convert.runtime.generate import Decoder
    from edge_convert.validate.suites_text import DecoderSubject

    decoder = generator.decoder

    def chunked() -> Decoder:
        return Decoder(decoder.session, chunk_tokens=7)

    return DecoderSubject(
        decoder=decoder,
        chunked=chunked,
        encode=generator.encode,
        render=lambda messages: generator.render(cast("Any", messages)),
        context_length=decoder.context_length,
        precision=precision,
        exact=decoder.session.device_type == "cpu",
    )


def _embedder(
    bundle: Bundle,
    reference: Reference | None,
    gates: GateList,
    threads: int | None,
    progress: Callable[[str], None],
) -> tuple[Session, str | None, dict[str, Any]]:
    from edge_convert.validate import suites_embed as suite
    from edge_convert.wrappers.embed import TextEmbedder

    embedder, missing = open_for_validation(
        lambda profile: TextEmbedder.load(bundle, profile=profile, threads=threads),
        lambda wrapper: wrapper.session,
        bundle.profile,
    )
    gates.label = ON_CPU if missing else ""
    accuracy: dict[str, Any] = {}
    if reference is not None:
        accuracy = suite.check_embedder(embedder, cast("EmbedderReference", reference), gates, progress)
    elif (golden := read_golden(bundle)) is not None:
        accuracy = suite.check_embedder_golden(embedder, golden, gates)
    else:
        gates.not_run("golden embeddings", "cosine_mean", NO_GOLDEN)
    exact = embedder.session.device_type == "cpu"
    precision = bundle.manifest.precision
    gates.attempt(
        "invariants",
        "errors",
        lambda: suite.check_embedder_invariants(embedder, precision, gates, progress, exact=exact),
    )
    return embedder.session, missing, accuracy


def _classifier(
    bundle: Bundle,
    reference: Reference | None,
    images: Sequence[ImageLike],
    gates: GateList,
    threads: int | None,
    progress: Callable[[str], None],
) -> tuple[Session, str | None, dict[str, Any]]:
    from edge_convert.validate import suites_image as suite
    from edge_convert.wrappers.image import ImageClassifier

    classifier, missing = open_for_validation(
        lambda profile: ImageClassifier.load(bundle, profile=profile, threads=threads),
        lambda wrapper: wrapper.session,
        bundle.profile,
    )
    gates.label = ON_CPU if missing else ""
    accuracy: dict[str, Any] = {}
    if reference is not None:
        accuracy = suite.check_classifier(classifier, cast("ClassifierReference", reference), images, gates, progress)
    elif (golden := read_golden(bundle)) is not None:
        accuracy = suite.check_classifier_golden(classifier, golden, gates)
    else:
        gates.not_run("golden logits", "top1_agreement", NO_GOLDEN)
    exact = classifier.session.device_type == "cpu"
    precision = bundle.manifest.precision
    gates.attempt(
        "invariants",
        "errors",
        lambda: suite.check_classifier_invariants(classifier, precision, gates, progress, exact=exact),
    )
    return classifier.session, missing, accuracy


def _latency(
    bundle: Bundle,
    gates: GateList,
    missing: str | None,
    threads: int | None,
    wanted: bool,
    progress: Callable[[str], None],
) -> dict[str, Any] | None:
    """Measure and judge what the target bounds; None where nothing was measured."""
    from edge_convert.validate.latency import measure

    bounded = [name for name in LATENCY_METRICS if f"{name}_min" in gates.bounds or f"{name}_max" in gates.bounds]
    reason, timing = missing, None
    if missing is None and not wanted:
        reason = "latency was left out"
    elif missing is None:
        progress("measuring latency")
        try:
            timing = measure(bundle, threads=threads)
        except DeviceError as error:
            reason = str(error)
    if timing is None:
        assert reason is not None
        for name in bounded or ([] if missing is None and not wanted else ["latency"]):
            gates.not_run("latency", name, reason)
        return None
    for name in bounded:
        value: Any = timing
        for key in LATENCY_METRICS[name]:
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            gates.not_run("latency", name, "this task has no such measurement")
        else:
            gates.declared("latency", name, float(value))
    return timing
