"""The main job on real weights, and the device side as a device has it: Python 3.10, the built wheel, no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edge_convert.convert.gguf import unpack_gguf
from edge_convert.convert.pipeline import convert
from edge_convert.runtime.bundle import Bundle
from edge_convert.runtime.device import load_profile
from edge_convert.validate.report import Report
from tests import assets
from tests.leaks import machine_paths

pytestmark = pytest.mark.real
ROOT = Path(__file__).resolve().parents[1]
MB = 1_000_000
METRICS = ("kl_mean", "cosine_mean", "top1_agreement")  # what compares with the original


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos and crops of them, enough to calibrate with some and to judge by the others."""
    return assets.write_photos(tmp_path_factory.mktemp("photos"))


def source_of(model: str) -> str:
    return {
        "smollm2": lambda: str(assets.smollm2_gguf()),
        "minilm": lambda: str(assets.minilm_folder()),
        "efficientnet": lambda: f"{ROOT / 'examples' / 'efficientnet_lite0.py'}:build",
    }[model]()


@pytest.fixture(scope="module")
def jetson_bundles(tmp_path_factory: pytest.TempPathFactory, images: Path) -> dict[str, Path]:
    """One jetson bundle of each model, at the precisions whose operators are newest."""
    assets.efficientnet_weights()
    folder = tmp_path_factory.mktemp("jetson")
    for model, precision in (("smollm2", "int4"), ("minilm", "int8"), ("efficientnet", "int8")):
        convert(
            source_of(model),
            target="jetson",
            precision=precision,
            output=folder / model,
            calibration=images if model == "efficientnet" else None,
            validate=False,
        )
    return {path.name: path for path in folder.iterdir()}


def judged(report: Report | None) -> dict[str, str]:
    assert report is not None
    return {f"{gate.name} {gate.metric}": f"{gate.outcome} {gate.value}" for gate in report.gates}


@pytest.mark.parametrize(("precision", "limit_mb"), [("int8", 165), ("int4", 100)])
def test_smollm2_passes_its_gates_and_is_small(tmp_path: Path, precision: str, limit_mb: int) -> None:
    result = convert(source_of("smollm2"), target="cpu", precision=precision, output=tmp_path / "out")
    assert result.report is not None
    assert result.report.passed, judged(result.report)
    assert all(gate.outcome == "passed" for gate in result.report.gates), judged(result.report)
    size = sum(spec.size for spec in result.bundle.manifest.files.values())
    assert size <= limit_mb * MB
    graph = result.bundle.manifest.graphs["decoder"]
    assert graph.node_counts["GroupQueryAttention"] == 30
    assert graph.cache is not None
    assert graph.cache.share_buffer


@pytest.mark.parametrize(
    ("model", "precision"), [("minilm", "fp32"), ("minilm", "int8"), ("efficientnet", "fp32"), ("efficientnet", "int8")]
)
def test_encoders_and_classifiers_pass_their_gates(tmp_path: Path, images: Path, model: str, precision: str) -> None:
    assets.efficientnet_weights()
    result = convert(
        source_of(model),
        target="cpu",
        precision=precision,
        output=tmp_path / "out",
        calibration=images if model == "efficientnet" else None,
    )
    assert result.report is not None
    assert all(gate.outcome == "passed" for gate in result.report.gates), judged(result.report)


@pytest.mark.parametrize(
    ("model", "chosen", "limit_mb"), [("smollm2", "int4", 100), ("minilm", "int8", 30), ("efficientnet", "int8", 12)]
)
def test_auto_finds_small_weights_that_pass(tmp_path: Path, model: str, chosen: str, limit_mb: int) -> None:
    """How many nodes of int8 stay in fp32 is the measurement's, and may differ between CPUs."""
    assets.efficientnet_weights()
    result = convert(source_of(model), target="cpu", output=tmp_path / "out")
    assert result.bundle.manifest.quantisation["chosen"].startswith(chosen), result.bundle.manifest.quantisation
    assert result.report is not None
    assert all(gate.outcome == "passed" for gate in result.report.gates), judged(result.report)
    assert sum(spec.size for spec in result.bundle.manifest.files.values()) <= limit_mb * MB
    written = {form for graph in result.bundle.manifest.graphs.values() for form in graph.formats.values()}
    assert any(form.startswith(chosen) for form in written), written
    assert not machine_paths(tmp_path / "out")


def test_smollm2_from_safetensors_is_the_one_from_gguf(tmp_path: Path, jetson_bundles: dict[str, Path]) -> None:
    folder = tmp_path / "SmolLM2-135M-Instruct"
    shutil.copytree(unpack_gguf(assets.smollm2_gguf()), folder)
    assert any(folder.glob("*.safetensors"))
    bundle = convert(
        str(folder), target="jetson", precision="int4", output=tmp_path / "out", validate=False
    ).bundle.manifest
    other = Bundle.open(jetson_bundles["smollm2"]).manifest
    assert bundle.source.kind == "huggingface"
    assert other.source.kind == "gguf"
    assert bundle.files["decoder.onnx.data"].sha256 == other.files["decoder.onnx.data"].sha256


@pytest.mark.parametrize("model", ["smollm2", "minilm", "efficientnet"])
def test_jetson_bundles_are_within_the_caps(jetson_bundles: dict[str, Path], model: str) -> None:
    bundle = Bundle.open(jetson_bundles[model])
    for graph in bundle.manifest.graphs.values():
        assert graph.ir_version <= bundle.profile.ir_max
        assert graph.opsets["ai.onnx"] <= bundle.profile.opset_max


def python310() -> str:
    """A real Python 3.10 (JetPack 6's), or skip with the way to get one."""
    candidates = [shutil.which("python3.10"), *map(str, Path.home().glob(".pyenv/versions/3.10.*/bin/python"))]
    for candidate in filter(None, candidates):
        found = subprocess.run(
            [candidate, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True
        )
        if found.stdout.strip() == "(3, 10)":
            return candidate
    pytest.skip(
        "Python 3.10 is not installed; install it (apt, pyenv or uv) to test the device side as JetPack 6 has it"
    )


@pytest.fixture(scope="module", params=["1.20", "1.23"])
def device_python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare Python 3.10 environment with the built wheel and an end of JetPack 6's range of ONNX Runtime."""
    interpreter = python310()
    folder = tmp_path_factory.mktemp("device")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL"))}

    def run(*command: str | Path) -> None:
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, env=environment, cwd=folder
        )
        assert done.returncode == 0, done.stdout + done.stderr

    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
    run(interpreter, "-m", "venv", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    wheel = next(folder.glob("edge_convert-*.whl"))
    run(python, "-m", "pip", "install", "-q", f"{wheel}[cpu]", f"onnxruntime=={request.param}.*")
    return python


def release(python: Path) -> str:
    """The ONNX Runtime ("major.minor") of that environment."""
    code = "from importlib.metadata import version; print(version('onnxruntime'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return ".".join(done.stdout.split(".")[:2])


@pytest.mark.parametrize("model", ["smollm2", "minilm", "efficientnet"])
def test_device_side_runs_jetson_bundles(device_python: Path, jetson_bundles: dict[str, Path], model: str) -> None:
    program = device_python.with_name("edge-convert")
    done = subprocess.run(
        [program, "selftest", jetson_bundles[model], "--on-cpu", "--json"],
        capture_output=True,
        text=True,
        cwd=device_python.parent,
    )
    if model == "smollm2" and release(device_python) == "1.20":
        assert done.returncode == 1
        assert "is older than 1.23, which the operators of decoder.onnx need" in done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    gates = json.loads(done.stdout)["gates"]
    assert any(gate["outcome"] == "passed" and gate["metric"] in METRICS for gate in gates), gates
    assert not any(gate["outcome"] == "failed" for gate in gates), gates


def test_the_ends_are_those_of_the_targets_range() -> None:
    profile = load_profile("jetson")
    assert (profile.onnxruntime_min, profile.onnxruntime_max) == ("1.20", "1.23")


def test_device_side_has_nothing_of_the_host(device_python: Path) -> None:
    code = "import edge_convert.runtime, edge_convert.wrappers, onnxruntime, sys; print(onnxruntime.__version__, *sys.modules)"
    done = subprocess.run([device_python, "-c", code], capture_output=True, text=True, cwd=device_python.parent)
    assert done.stdout.startswith(("1.20.", "1.23.")), done.stdout + done.stderr
    assert not {"torch", "transformers", "onnx", "optimum"} & set(done.stdout.split())
