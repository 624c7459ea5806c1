"""The self-test of a device: does this bundle give here what it gave where it was made?

Needs the device side's packages only: the golden data stand in for the original.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from edge_convert.runtime.device import with_cpu_only
from edge_convert.validate.gates import Gate
from edge_convert.validate.report import Report
from edge_convert.validate.suites import ON_CPU, validate_bundle

if TYPE_CHECKING:
    from edge_convert.runtime.bundle import Bundle

PROVIDER_GATE = "provider"
log = logging.getLogger(__name__)


def run_selftest(
    bundle: Bundle, *, on_cpu: bool = False, threads: int | None = None, progress: Callable[[str], None] = log.info
) -> Report:
    """Compare `bundle` with its own golden data and check its invariants; time is not measured.

    The first gate is whether the target's own provider did the work. `on_cpu` runs on the CPU whatever the
    target is, and the gate is then not run.
    """
    wanted = bundle.profile.providers[0].name
    tried = dataclasses.replace(bundle, own_profile=with_cpu_only(bundle.profile)) if on_cpu else bundle
    report = validate_bundle(tried, None, threads=threads, measure_latency=False, progress=progress)
    gates = tuple(gate for gate in report.gates if gate.name != "latency")
    if report.environment["providers"][:1] == [wanted]:
        provider = Gate(PROVIDER_GATE, "other_provider", 0, 0, "equal", "passed")
        return dataclasses.replace(report, gates=(provider, *gates))
    reason = f"{wanted} was left out by --on-cpu" if on_cpu and _built_in(wanted) else f"{wanted} is not available here"
    provider = Gate(PROVIDER_GATE, "other_provider", None, 0, "equal", "not_run", reason)
    return dataclasses.replace(report, gates=(provider, *map(_labelled, gates)))


def missing_provider(report: Report) -> str | None:
    """Why the target's own provider did not run in this self-test; None if it did."""
    found = (gate.reason for gate in report.gates if gate.name == PROVIDER_GATE and gate.outcome == "not_run")
    return next(found, None)


def _labelled(gate: Gate) -> Gate:
    return gate if gate.name.endswith(ON_CPU) else dataclasses.replace(gate, name=f"{gate.name} {ON_CPU}")


def _built_in(provider: str) -> bool:
    import onnxruntime

    return provider in onnxruntime.get_available_providers()
