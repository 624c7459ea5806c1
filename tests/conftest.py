"""What every test run shares: a header with the versions, and an environment without network or stray threads."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

# Before anything imports a Hugging Face library: no test may reach the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TESTS = Path(__file__).resolve().parent
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))  # `from assets import ...` works from every test folder

_PACKAGES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-genai", "onnx", "torch", "transformers", "numpy")


@pytest.fixture(scope="session", autouse=True)
def cache_of_exports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache of exports; within a run it is shared, as a user's is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGE_CONVERT_CACHE", str(tmp_path_factory.mktemp("exports")))
        yield


def pytest_report_header() -> list[str]:
    """The versions that a result depends on, and the number of CPUs this process may use."""
    return [f"edge-convert on Python {platform.python_version()}, {_cpus()} CPUs", ", ".join(_versions())]


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _versions() -> list[str]:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found
