"""Open and run a bundle on a device. Names are imported when first used; ONNX Runtime when a graph is opened.

The loop itself is `edge_convert.runtime.generate.generate` (a package cannot have a function and a module
of one name).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_convert.runtime.bundle import Bundle
    from edge_convert.runtime.device import DeviceProfile, ProviderSpec, load_profile, load_profiles, with_cpu_only
    from edge_convert.runtime.errors import EdgeError
    from edge_convert.runtime.generate import Decoder
    from edge_convert.runtime.manifest import CacheSpec, FileSpec, GraphSpec, Manifest, SourceSpec, TensorSpec
    from edge_convert.runtime.sampling import GenerationConfig, Sampler
    from edge_convert.runtime.session import Session
    from edge_convert.runtime.threads import available_cpus

__all__ = [
    "Bundle",
    "CacheSpec",
    "Decoder",
    "DeviceProfile",
    "EdgeError",
    "FileSpec",
    "GenerationConfig",
    "GraphSpec",
    "Manifest",
    "ProviderSpec",
    "Sampler",
    "Session",
    "SourceSpec",
    "TensorSpec",
    "available_cpus",
    "load_profile",
    "load_profiles",
    "with_cpu_only",
]

_HOME = {
    "Bundle": "bundle",
    "CacheSpec": "manifest",
    "Decoder": "generate",
    "DeviceProfile": "device",
    "EdgeError": "errors",
    "FileSpec": "manifest",
    "GenerationConfig": "sampling",
    "GraphSpec": "manifest",
    "Manifest": "manifest",
    "ProviderSpec": "device",
    "Sampler": "sampling",
    "Session": "session",
    "SourceSpec": "manifest",
    "TensorSpec": "manifest",
    "available_cpus": "threads",
    "load_profile": "device",
    "load_profiles": "device",
    "with_cpu_only": "device",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module 'edge_convert.runtime' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"edge_convert.runtime.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
