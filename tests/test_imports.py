"""The device side never loads the host's libraries, and importing the package loads almost nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOST = ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "optimum", "onnxruntime_genai")
DEVICE = sorted(
    f"edge_convert.{folder}.{file.stem}"
    for folder in ("runtime", "wrappers")
    for file in (ROOT / folder).glob("*.py")
    if file.stem != "__init__"
)


def loaded_after(*modules: str) -> set[str]:
    """Top-level names in sys.modules of a new interpreter that imported `modules`."""
    code = f"import sys, {', '.join(modules)}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("package", ["edge_convert.runtime", "edge_convert.wrappers"])
def test_device_package_loads_no_host_library(package: str) -> None:
    loaded = loaded_after(package)
    assert "edge_convert" in loaded
    assert not loaded & set(HOST)


def test_no_device_module_loads_a_host_library() -> None:
    assert len(DEVICE) >= 10
    assert not loaded_after(*DEVICE) & set(HOST)


def test_selftest_loads_no_host_library() -> None:
    assert not loaded_after("edge_convert.validate.selftest") & set(HOST)


def test_package_itself_loads_nothing_heavy() -> None:
    assert not loaded_after("edge_convert", "edge_convert.cli") & {*HOST, "numpy", "onnxruntime", "tokenizers", "PIL"}


def test_the_check_can_fail() -> None:
    assert "numpy" in loaded_after("numpy")


def test_public_names_resolve() -> None:
    import edge_convert

    for name in edge_convert.__all__:
        assert getattr(edge_convert, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = edge_convert.no_such_name
