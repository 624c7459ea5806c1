"""The straight line from a source to a validated bundle.

Source -> Recipe -> export -> quantise -> stamp -> package -> golden data -> Bundle -> validate -> report.
Everything happens in a staging folder beside the output, which is moved into place when it is whole.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from edge_convert.convert.export_cache import cached_export
from edge_convert.convert.operator_needs import check_needs
from edge_convert.convert.photos import read_photos
from edge_convert.convert.recipe import Exported, Found, Progress, Recipe, Request, find_recipe
from edge_convert.convert.saturation import check_saturation
from edge_convert.convert.source import Source, detect_task, open_source
from edge_convert.convert.stamp import check_finite, read_back, stamp
from edge_convert.runtime.bundle import Bundle, collect_files, staged, write_manifest
from edge_convert.runtime.device import DeviceProfile, load_profile
from edge_convert.runtime.errors import ExportError, MissingExtraError, UnknownNameError, UsageError
from edge_convert.runtime.manifest import AUTO, REQUESTS, Manifest, SourceSpec
from edge_convert.validate.report import REPORT_FILE, Report
from edge_convert.validate.runner import Reference

log = logging.getLogger(__name__)

_FEW_IMAGES = 20
_TOOLS = ("edge-convert", "torch", "transformers", "onnx", "onnxruntime", "onnxruntime-genai")


@dataclass(frozen=True, slots=True)
class Result:
    """A written bundle and, unless validation was left out, its report."""

    bundle: Bundle
    report: Report | None


def convert(
    source_text: str,
    *,
    target: str,
    output: Path,
    task: str | None = None,
    precision: str = AUTO,
    force: bool = False,
    context_tokens: int | None = None,
    calibration: Path | None = None,
    validate: bool = True,
    targets_file: Path | None = None,
    progress: Progress = log.info,
) -> Result:
    """Convert `source_text` for `target` into the bundle `output`; raises EdgeError leaves.

    Nothing is left at `output` unless the whole bundle is.
    """
    profile = load_profile(target, targets_file)
    if precision not in REQUESTS:
        raise UnknownNameError("precision", precision, REQUESTS)
    if context_tokens is not None and context_tokens < 1:
        raise UsageError(f"--context must be at least 1; found {context_tokens}.")
    _require_host_packages()
    progress("checking the source")
    source = open_source(source_text)
    recipe = find_recipe(task or detect_task(source), source.kind)
    if precision not in (AUTO, *recipe.precisions):
        raise UsageError(
            f"{recipe.task} models are not converted to {precision}; choose one of: {', '.join(recipe.precisions)}."
        )
    request = Request(source, profile, precision, context_tokens, calibration, progress)
    warnings = (*_warnings(request), *recipe.check(request))
    with staged(output, force=force) as folder:
        report = _build(request, recipe, folder, warnings, validate=validate)
    return Result(Bundle.open(output, profile=profile), report)


def load_reference(source_text: str, *, bundle: Bundle) -> Reference:
    """The original of `bundle` in fp32; raises UsageError if the source is not the bundle's."""
    _require_host_packages()
    source = open_source(source_text)
    if source.sha256 != bundle.manifest.source.sha256:
        raise UsageError(
            f"{source_text} is not what this bundle was made from ({bundle.manifest.source.name}, SHA-256 "
            f"{bundle.manifest.source.sha256[:12]}…; found {source.sha256[:12]}…). Give the same source."
        )
    manifest = bundle.manifest
    request = Request(source, bundle.profile, manifest.precision, None, None, log.info)
    return find_recipe(manifest.task, source.kind).reference(request)


def _build(
    request: Request, recipe: Recipe, folder: Path, warnings: tuple[str, ...], *, validate: bool
) -> Report | None:
    """Fill `folder` with the bundle and validate it there."""
    from edge_convert.validate.golden import write_golden
    from edge_convert.validate.suites import validate_bundle

    with tempfile.TemporaryDirectory(prefix=".edge-convert-", dir=folder.parent) as work:
        request.progress("exporting the graph")
        graphs = cached_export(request, recipe, _subfolder(work, "export"))
        for graph in graphs.values():
            check_finite(graph.path, request.source.name)
        if request.precision == AUTO:
            request.progress("loading the original")
            reference = recipe.reference(request)
            found = recipe.search(request, graphs, reference, Path(work) / "quantise")
        else:
            request.progress(f"writing {request.precision}")
            graphs = recipe.quantise(request, graphs, _subfolder(work, "quantise"))
            found = Found(graphs, {name: value for graph in graphs.values() for name, value in graph.measured.items()})
        request.progress(f"stamping for {request.profile.name}")
        graphs = {role: _move(graph, folder) for role, graph in found.graphs.items()}
    for graph in graphs.values():
        stamp(graph.path, request.profile)
        if request.profile.reduce_range:
            check_saturation(graph.path)
    specs = {role: read_back(graph.path, graph.cache) for role, graph in graphs.items()}
    for spec in specs.values():
        warnings = (*warnings, *check_needs(spec, request.profile))
    processing = recipe.package(request, folder)
    if request.precision != AUTO:
        request.progress("loading the original")
        reference = recipe.reference(request)
    images = read_photos(request.calibration).judging if recipe.task == "image-classification" else ()
    request.progress("writing golden data")
    write_golden(folder, recipe.task, reference, images=images)
    manifest = Manifest(
        task=recipe.task,
        target=request.profile.name,
        precision=request.precision,
        source=_source_spec(request.source),
        graphs=specs,
        processing=processing,
        files=collect_files(folder),
        tools=_tool_versions(_TOOLS),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        warnings=warnings,
        quantisation=found.record,
    )
    _check_caps(manifest, request.profile)
    write_manifest(folder, manifest)
    if not validate:
        return None
    bundle = Bundle.open(folder, profile=request.profile)
    report = validate_bundle(bundle, reference, images=images, progress=request.progress)
    if request.calibration is not None and images and len(images) < _FEW_IMAGES:
        warnings = (
            *warnings,
            f"Only {len(images)} photos judged this bundle; give {3 * _FEW_IMAGES} or more to trust it.",
        )
    report = replace(report, notes=(*report.notes, *found.notes, *warnings))
    bundle.update_file(REPORT_FILE, report.to_json().encode())
    return report


def _warnings(request: Request) -> tuple[str, ...]:
    """What the user should know before shipping; kept in the manifest."""
    profile, precision = request.profile, request.precision
    if precision in (AUTO, *profile.native_precisions):
        return ()
    text = (
        f"{profile.providers[0].name} on {profile.name} does not run {precision} natively "
        f"(native: {', '.join(profile.native_precisions)}); expect no speed-up from it."
    )
    log.warning(text)
    return (text,)


def _move(graph: Exported, folder: Path) -> Exported:
    """Move the graph and its external data (a file whose name starts with the graph's) into `folder`."""
    for file in sorted(graph.path.parent.glob(f"{graph.path.name}*")):
        shutil.move(file, folder / file.name)
    return replace(graph, path=folder / graph.path.name)


def _subfolder(work: str, name: str) -> Path:
    path = Path(work) / name
    path.mkdir()
    return path


def _source_spec(source: Source) -> SourceSpec:
    architectures = source.config.get("architectures") or [source.config.get("model_type")]
    return SourceSpec(source.kind, source.name, source.sha256, architecture=architectures[0])


def _check_caps(manifest: Manifest, profile: DeviceProfile) -> None:
    """What was written must be within the target's caps, whatever the exporter was told."""
    for role, graph in manifest.graphs.items():
        opset = graph.opsets.get("ai.onnx", 0)
        if graph.ir_version > profile.ir_max or opset > profile.opset_max:
            raise ExportError(
                f"The {role} graph has IR {graph.ir_version} / opset {opset}, and target {profile.name} reads at "
                f"most {profile.ir_max} / {profile.opset_max}."
            )


def _tool_versions(names: Iterable[str]) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _require_host_packages() -> None:
    """Raise MissingExtraError if the `convert` extra is not installed."""
    from importlib.util import find_spec

    for module in ("torch", "transformers", "onnx", "onnxruntime"):
        if find_spec(module) is None:
            raise MissingExtraError(module, "convert")
