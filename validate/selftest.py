"""The self-test of a device: does this bundle give here what it gave where it was made?

Needs the device side's packages only: the golden data stand in for the original.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from edge_convert.validate.report import Report
from edge_convert.validate.suites import validate_bundle

if TYPE_CHECKING:
    from edge_convert.runtime.bundle import Bundle

log = logging.getLogger(__name__)


def run_selftest(bundle: Bundle, *, threads: int | None = None, progress: Callable[[str], None] = log.info) -> Report:
    """Compare `bundle` with its own golden data and check its invariants; time is not measured."""
    return validate_bundle(bundle, None, threads=threads, measure_latency=False, progress=progress)
