"""The wheel installs the package `edge_convert` and nothing else, with its data files and every module."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("runtime", "wrappers", "validate", "convert")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built offline from a copy so that the checkout stays clean."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in (*PACKAGES, "tests", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (*ROOT.glob("*.py"), *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE", "py.typed"))):
        shutil.copy(file, source)
    shutil.copy(ROOT / "devices.yaml", source)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(work), "."],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = work.glob("*.whl")
    return zipfile.ZipFile(path)


def test_only_the_package_and_its_metadata(wheel: zipfile.ZipFile) -> None:
    tops = {PurePosixPath(name).parts[0] for name in wheel.namelist()}
    (info,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {"edge_convert", info}


def test_no_tests_docs_or_tools_inside(wheel: zipfile.ZipFile) -> None:
    inside = {PurePosixPath(name).parts[1] for name in wheel.namelist() if name.startswith("edge_convert/")}
    assert not inside & {"tests", "docs", "benchmarks", "examples", "Makefile", "pyproject.toml"}


def test_every_module_and_data_file_is_inside(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    expected = {"edge_convert/devices.yaml", "edge_convert/py.typed", "edge_convert/cli.py"}
    for package in PACKAGES:
        for pattern in ("*.py", "*.txt"):
            expected |= {
                f"edge_convert/{file.relative_to(ROOT).as_posix()}" for file in (ROOT / package).rglob(pattern)
            }
    assert expected <= names, sorted(expected - names)


def test_metadata_names_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "edge-convert = edge_convert.__main__:run" in wheel.read(entry_points).decode()
    assert any(name.endswith("licenses/LICENSE") for name in names)
