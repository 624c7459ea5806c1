"""One graph on one device: named arrays in and out, and never silently on another provider."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_convert.runtime.device import CPU_PROVIDER, DeviceProfile
from edge_convert.runtime.errors import BundleError, DeviceError, ProviderUnavailableError, shown
from edge_convert.runtime.int8 import exact_int8
from edge_convert.runtime.manifest import GraphSpec, TensorSpec
from edge_convert.runtime.ort import import_onnxruntime, version_numbers
from edge_convert.runtime.tensors import check_feed, ort_type_name
from edge_convert.runtime.threads import available_cpus, check_threads

if TYPE_CHECKING:
    import onnxruntime

_CUDA_PROVIDERS = ("CUDAExecutionProvider", "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider")
_LOG_ERRORS_ONLY = 3
_log = logging.getLogger(__name__)


class Session:
    """An open ONNX graph.

    `path` is the graph's file (opened by name, so that external data is found beside it and mapped into
    memory), `spec` what the manifest says of it. `threads` is the size of the pool inside operators
    (None: `available_cpus()`); operators run one after the other.

    Raises ProviderUnavailableError if the profile's first provider is not the one running and the
    profile does not allow fallback, BundleError if the file cannot be opened or differs from `spec`.
    """

    def __init__(self, path: Path, spec: GraphSpec, profile: DeviceProfile, *, threads: int | None = None) -> None:
        if threads is not None:
            threads = check_threads(threads)
        ort = import_onnxruntime()
        self.spec = spec
        self.profile = profile
        self.threads = available_cpus() if threads is None else threads
        _check_version(ort.__version__, profile, spec)
        chosen = _available(ort, profile)
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = _LOG_ERRORS_ONLY
        exact = {} if profile.reduce_range else exact_int8()
        for name, value in {**exact, **profile.session_config}.items():
            options.add_session_config_entry(name, value)
        if not path.is_file():
            raise BundleError(f"The graph {path} is missing. Copy the bundle again.")
        try:
            self.ort: onnxruntime.InferenceSession = ort.InferenceSession(str(path), options, providers=chosen)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise BundleError(f"ONNX Runtime {ort.__version__} cannot open {path.name}: {reason}") from error
        self.ort.disable_fallback()
        self.providers: tuple[str, ...] = tuple(self.ort.get_providers())
        first = profile.providers[0].name
        if not profile.allow_fallback and self.providers[:1] != (first,):
            hint = (
                f"ONNX Runtime has {first} and could not start it: check the driver and the CUDA and cuDNN libraries."
            )
            raise ProviderUnavailableError(first, profile.name, self.providers, hint)
        _check_signature(path.name, "input", spec.inputs, self.ort.get_inputs())
        _check_signature(path.name, "output", spec.outputs, self.ort.get_outputs())
        self._output_names = [output.name for output in spec.outputs]

    @property
    def device_type(self) -> str:
        """Where bound buffers belong: "cuda" or "cpu", by the first active provider."""
        return "cuda" if self.providers and self.providers[0] in _CUDA_PROVIDERS else "cpu"

    def run(self, feed: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """All outputs by name; `feed` has one array for each of `spec.inputs`, else FeedError before running."""
        check_feed(self.spec.inputs, feed)
        try:
            values = self.ort.run(self._output_names, dict(feed))
        except Exception as error:
            reason = " ".join(str(error).split())
            raise DeviceError(f"Running {self.spec.file} on {self.providers[0]} failed: {reason}") from error
        return dict(zip(self._output_names, values, strict=True))


def _check_version(version: str, profile: DeviceProfile, spec: GraphSpec) -> None:
    needs = {
        f"target {profile.name} needs": profile.onnxruntime_min,
        f"the operators of {spec.file} need": spec.onnxruntime_min,
    }
    for who, oldest in needs.items():
        needed = version_numbers(oldest)
        if version_numbers(version)[: len(needed)] < needed:
            raise DeviceError(f"ONNX Runtime {version} is older than {oldest}, which {who}. Install a newer one.")


def _available(ort: Any, profile: DeviceProfile) -> list[tuple[str, dict[str, str]]]:
    """The profile's providers that this ONNX Runtime was built with, for InferenceSession."""
    found = tuple(ort.get_available_providers())
    first = profile.providers[0].name
    if first not in found and not profile.allow_fallback:
        hint = ""
        if first in _CUDA_PROVIDERS:
            hint = (
                "Install the GPU build (pip uninstall onnxruntime, then edge-convert's wheel with its extra [gpu]), "
                "or use the target cpu."
            )
        raise ProviderUnavailableError(first, profile.name, found, hint)
    chosen = [(provider.name, dict(provider.options)) for provider in profile.providers if provider.name in found]
    if any(name in _CUDA_PROVIDERS for name, _ in chosen) and hasattr(ort, "preload_dlls"):
        _preload_cuda(ort)
    return chosen or [(CPU_PROVIDER, {})]


def _preload_cuda(ort: Any) -> None:
    """Load CUDA and cuDNN where they are installed as Python packages; what ONNX Runtime prints goes to the log."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        ort.preload_dlls()
    if text := printed.getvalue().strip():
        _log.info("preload_dlls: %s", text)


def _check_signature(file: str, kind: str, specs: Sequence[TensorSpec], actual: Sequence[Any]) -> None:
    expected = {spec.name: ort_type_name(spec.dtype) for spec in specs}
    found = {value.name: value.type for value in actual}
    if expected != found:
        differing = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
        name = differing[0]
        raise BundleError(
            f"{file}: the {kind} {shown(name)} is {found.get(name, 'absent')} in the graph and "
            f"{expected.get(name, 'absent')} in the manifest. Convert again."
        )
