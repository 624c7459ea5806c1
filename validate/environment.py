"""Where a measurement was made: versions, machine, threads, providers."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

_PACKAGES = ("edge-convert", "numpy", "tokenizers", "pillow")
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")


def describe(*, providers: tuple[str, ...] = (), threads: int | None = None) -> dict[str, Any]:
    """Plain JSON values that say where and with what a report was made; no host or user name."""
    from edge_convert.runtime.threads import available_cpus

    return {
        "providers": list(providers),
        "threads": threads,
        "cpus": available_cpus(),
        "machine": platform.machine(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {**_versions(), "onnxruntime": runtime_version()},
    }


def runtime_version() -> str | None:
    """The version of the ONNX Runtime that is imported, or None."""
    try:
        import onnxruntime
    except ImportError:
        return None
    version = getattr(onnxruntime, "__version__", None)
    return None if version is None else str(version)


def _versions() -> dict[str, str]:
    found = {}
    for name in (*_PACKAGES, *_RUNTIMES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith(("model name", "Model")):
                    return line.partition(":")[2].strip()
    except OSError:
        return platform.processor()
    return platform.processor() or os.uname().machine
