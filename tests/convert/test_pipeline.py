"""The straight line on a small classifier: a whole bundle or nothing, and a report that tells the truth."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest
from leaks import machine_paths
from PIL import Image

from edge_convert.convert import pipeline
from edge_convert.runtime.bundle import Bundle
from edge_convert.runtime.errors import OutputError, SourceError, UnknownNameError, UsageError

FACTORY = """
import torch

class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.features = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.nn.ReLU(),
            torch.nn.Conv2d(8, 16, 3, stride=2, padding=1), torch.nn.ReLU(),
        )
        self.head = torch.nn.Linear(16, 10)
        self.edge_convert = {
            "mean": [127.0] * 3, "std": [128.0] * 3, "height": 32, "width": 32,
            "resize_short_px": 36, "interpolation": "bicubic", "labels": [f"class {i}" for i in range(10)],
        }

    def forward(self, x):
        return self.head(self.features(x).mean(dim=(2, 3)))

def build():
    return Tiny().eval()
"""


@pytest.fixture
def factory(tmp_path: Path) -> str:
    path = tmp_path / "tiny_classifier.py"
    path.write_text(FACTORY)
    return f"{path}:build"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for index in range(24):
        small = rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)
        Image.fromarray(small).resize((48, 40), Image.Resampling.BICUBIC).save(folder / f"{index:02}.png")
    return folder


@pytest.mark.parametrize(("target", "precision"), [("cpu", "fp32"), ("cpu", "int8"), ("jetson", "fp16")])
def test_bundle_is_whole_and_within_the_caps(
    tmp_path: Path, factory: str, images: Path, target: str, precision: str
) -> None:
    output = tmp_path / "bundle"
    result = pipeline.convert(factory, target=target, precision=precision, output=output, calibration=images)
    bundle = Bundle.open(output)
    graph = bundle.manifest.graphs["classifier"]
    assert graph.ir_version <= bundle.profile.ir_max
    assert graph.opsets["ai.onnx"] <= bundle.profile.opset_max
    assert graph.inputs[0].dtype == "uint8"
    assert "report.json" in bundle.manifest.files
    assert result.report is not None
    outcomes = {gate.outcome for gate in result.report.gates}
    assert "passed" in outcomes
    if target == "jetson":
        reasons = [gate.reason for gate in result.report.gates if gate.outcome == "not_run"]
        assert any("CUDAExecutionProvider is not available here" in reason for reason in reasons)
    if precision == "int8":
        assert graph.node_counts.get("QuantizeLinear", 0) > 0
        assert graph.products["int8"] + graph.products.get("fp32", 0) == 3
        assert len(graph.fp32_nodes) == graph.products.get("fp32", 0)
        assert graph.initializer_bytes.get("int8", 0) > 0
    assert not machine_paths(output)


def assert_nothing_left(tmp_path: Path) -> None:
    left = [
        path.name for path in tmp_path.iterdir() if path.name not in ("images", "tiny_classifier.py", "__pycache__")
    ]
    assert left == []


@pytest.mark.parametrize("weight", ["head.bias", "features[0].weight"])
def test_a_weight_that_is_no_number_is_refused_however_small(
    tmp_path: Path, factory: str, images: Path, weight: str
) -> None:
    path = Path(factory.partition(":")[0])
    path.write_text(
        FACTORY
        + f"\n\ndef broken():\n    model = build()\n    model.{weight}.data[3] = float('nan')\n    return model\n"
    )
    with pytest.raises(SourceError, match=r"has \d+ values that are not finite numbers"):
        pipeline.convert(f"{path}:broken", target="cpu", output=tmp_path / "out", calibration=images)
    assert_nothing_left(tmp_path)


def test_interrupt_in_the_middle_leaves_nothing(tmp_path: Path, factory: str) -> None:
    def interrupt(stage: str) -> None:
        if "golden" in stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline.convert(factory, target="cpu", precision="fp32", output=tmp_path / "out", progress=interrupt)
    assert_nothing_left(tmp_path)


def test_full_disk_leaves_nothing(tmp_path: Path, factory: str) -> None:
    def fail(stage: str) -> None:
        if "golden" in stage:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutputError, match="disk is full"):
        pipeline.convert(factory, target="cpu", precision="fp32", output=tmp_path / "out", progress=fail)
    assert_nothing_left(tmp_path)


def test_existing_output_is_kept_without_force(tmp_path: Path, factory: str) -> None:
    output = tmp_path / "out"
    pipeline.convert(factory, target="cpu", precision="fp32", output=output, validate=False)
    before = json.loads((output / "manifest.json").read_text())
    with pytest.raises(OutputError, match="--force"):
        pipeline.convert(factory, target="cpu", precision="fp32", output=output, validate=False)
    assert json.loads((output / "manifest.json").read_text()) == before
    pipeline.convert(factory, target="cpu", precision="fp32", output=output, force=True, validate=False)
    assert Bundle.open(output).manifest.precision == "fp32"


def test_unknown_names(tmp_path: Path, factory: str) -> None:
    output = tmp_path / "out"
    with pytest.raises(UnknownNameError, match="target"):
        pipeline.convert(factory, target="toaster", output=output)
    with pytest.raises(UnknownNameError, match="precision"):
        pipeline.convert(factory, target="cpu", precision="int3", output=output)
    with pytest.raises(UnknownNameError, match="task"):
        pipeline.convert(factory, target="cpu", task="telepathy", output=output)
    with pytest.raises(UsageError, match="int4"):
        pipeline.convert(factory, target="cpu", precision="int4", output=output)
    assert_nothing_left(tmp_path)


def test_int8_without_photos_uses_the_samples_and_says_so(tmp_path: Path, factory: str) -> None:
    result = pipeline.convert(factory, target="cpu", precision="int8", output=tmp_path / "out")
    assert any("sample photos" in warning for warning in result.bundle.manifest.warnings)
    assert result.report is not None
    assert not [gate for gate in result.report.gates if gate.name == "logits" and gate.outcome == "not_run"]
    record = result.bundle.manifest.quantisation
    assert record["calibration"]["chosen"] == min(
        record["calibration"]["errors"], key=record["calibration"]["errors"].get
    )


def test_reference_of_another_source_is_refused(tmp_path: Path, factory: str) -> None:
    result = pipeline.convert(factory, target="cpu", precision="fp32", output=tmp_path / "out", validate=False)
    other = tmp_path / "other.py"
    other.write_text(FACTORY + "\n# changed\n")
    with pytest.raises(UsageError, match="not what this bundle was made from"):
        pipeline.load_reference(f"{other}:build", bundle=result.bundle)
