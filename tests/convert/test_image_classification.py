from __future__ import annotations

import dataclasses
import types
from pathlib import Path

import numpy as np
import onnx
import pytest
from assets import efficientnet_weights, photos
from PIL import Image

from edge_convert.convert.calibration import METHODS
from edge_convert.convert.fp16 import emulated, first_fault, prepared
from edge_convert.convert.graph_tools import cpu_session
from edge_convert.convert.recipe import Request
from edge_convert.convert.recipes.image_classification import RECIPE, read_preprocessing
from edge_convert.convert.source import open_source
from edge_convert.runtime.device import load_profile
from edge_convert.runtime.errors import ConversionError, UnsupportedModelError
from edge_convert.wrappers.image import ImageSettings, preprocess

TINY = """
import torch

def build(**changes):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
        torch.nn.Linear(4, 3),
    )
    model.edge_convert = {"mean": [10, 20, 30], "std": 50, "height": 16, "width": 24, "labels": ["a", " b\\n", "c"]}
    return model

def broken():
    raise OSError("weights are missing")

def number():
    return 3
"""


def make_request(tmp_path, factory="build", precision="fp32", calibration=None) -> Request:
    file = tmp_path / "tiny.py"
    file.write_text(TINY, "utf-8")
    source = open_source(f"{file}:{factory}")
    return Request(source, load_profile("cpu"), precision, None, calibration, lambda _: None)


def run(path, frames):
    return cpu_session(path).run(["logits"], {"frames": frames})[0]


def make_pictures(folder: Path, count: int) -> Path:
    folder.mkdir()
    for index in range(count):
        pixels = np.random.default_rng(index).integers(0, 256, (30, 40, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return folder


def test_normalisation_is_in_the_graph(tmp_path):
    import torch

    request = make_request(tmp_path)
    (tmp_path / "out").mkdir()
    graph = RECIPE.export(request, tmp_path / "out")["classifier"]
    frames = np.random.default_rng(0).integers(0, 256, (3, 16, 24, 3), np.uint8)
    namespace: dict = {}
    exec(TINY, namespace)
    pixels = (frames.astype(np.float32) - np.array([10, 20, 30], np.float32)) / 50
    with torch.inference_mode():
        wanted = namespace["build"]().eval()(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())).numpy()
    np.testing.assert_allclose(run(graph.path, frames), wanted, atol=1e-5)
    np.testing.assert_allclose(RECIPE.reference(request).logits(frames), wanted, atol=1e-5)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["classifier.onnx"]


def test_package_writes_clean_labels(tmp_path):
    processing = RECIPE.package(make_request(tmp_path), tmp_path)
    assert (tmp_path / "labels.txt").read_text("utf-8") == "a\nb\nc\n"
    assert processing["labels"] == "labels.txt"
    assert ImageSettings.from_processing(processing).width == 24


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        (None, "no attribute"),
        ({"mean": 0, "std": 1, "height": 2}, "lacks 'width'"),
        ({"mean": 0, "std": 1, "height": 2, "width": 2, "size": 3}, "unknown key 'size'"),
        ({"mean": 0, "std": 0, "height": 2, "width": 2}, "not positive"),
        ({"mean": [1, 2], "std": 1, "height": 2, "width": 2}, "one number or three"),
        ({"mean": 0, "std": 1, "height": 2, "width": 2, "interpolation": "area"}, "interpolation"),
    ],
)
def test_wrong_preprocessing_is_explained(attribute, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read_preprocessing(types.SimpleNamespace(edge_convert=attribute), "tiny")


def test_a_failing_factory_is_one_sentence(tmp_path):
    with pytest.raises(ConversionError, match="weights are missing"):
        RECIPE.package(make_request(tmp_path, "broken"), tmp_path)
    with pytest.raises(UnsupportedModelError, match="returned int"):
        RECIPE.package(make_request(tmp_path, "number"), tmp_path)


def test_calibration_problems_are_explained(tmp_path):
    def quantise(folder):
        RECIPE.quantise(make_request(tmp_path, precision="int8", calibration=folder), graphs, tmp_path / "q")

    (tmp_path / "out").mkdir()
    (tmp_path / "q").mkdir()
    graphs = RECIPE.export(make_request(tmp_path), tmp_path / "out")
    with pytest.raises(ConversionError, match="does not exist"):
        quantise(tmp_path / "gone")
    with pytest.raises(ConversionError, match="has 0 different images"):
        quantise(make_pictures(tmp_path / "empty", 0))
    folder = make_pictures(tmp_path / "broken", 9)
    picture = (folder / "3.png").read_bytes()
    (folder / "3.png").write_bytes(picture[: len(picture) // 2])
    RECIPE.check(make_request(tmp_path, precision="int8", calibration=folder))  # the head is whole
    with pytest.raises(ConversionError, match=r"3\.png"):
        quantise(folder)
    (folder / "3.png").write_bytes(b"no picture")
    with pytest.raises(ConversionError, match=r"3\.png cannot be opened"):
        RECIPE.check(make_request(tmp_path, precision="int8", calibration=folder))


def test_samples_calibrate_where_the_user_gives_no_photos(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "q").mkdir()
    request = make_request(tmp_path, precision="int8")
    (warning,) = RECIPE.check(request)
    assert "sample photos of scikit-image" in warning
    assert "--calibration" in warning
    graph = RECIPE.quantise(request, RECIPE.export(request, tmp_path / "out"), tmp_path / "q")["classifier"]
    calibration = graph.measured["calibration"]
    assert calibration["chosen"] in calibration["errors"]
    assert set(calibration["errors"]) <= set(calibration["errors_nearest"]) == set(METHODS)
    assert graph.measured["costs"]


@pytest.mark.real
def test_efficientnet_agrees_with_the_original(tmp_path):
    efficientnet_weights()
    pictures = photos()
    calibration = tmp_path / "photos"
    calibration.mkdir()
    for path in pictures:
        (calibration / path.name).write_bytes(path.read_bytes())
    example = Path(__file__).parents[2] / "examples" / "efficientnet_lite0.py"
    request = Request(open_source(f"{example}:build"), load_profile("cpu"), "fp32", None, calibration, lambda _: None)
    reference = RECIPE.reference(request)
    settings = ImageSettings.from_processing(RECIPE.package(request, tmp_path))
    images = []
    for path in pictures:
        image = Image.open(path).convert("RGB")
        width, height = image.size
        corners = [(0, 0), (width // 2, height // 2)]
        images += [image, *(image.crop((x, y, x + width // 2, y + height // 2)) for x, y in corners)]
    frames = np.stack([reference.preprocess(image) for image in images])
    for image, frame in zip(images, frames, strict=True):
        np.testing.assert_array_equal(preprocess(image, settings), frame)
    wanted = reference.logits(frames)
    (tmp_path / "fp32").mkdir()
    graphs = RECIPE.export(request, tmp_path / "fp32")
    for precision, agreement, error in (("fp32", 1.0, 1e-4), ("fp16", 0.97, 0.1), ("int8", 0.92, 2.0)):
        (tmp_path / precision).mkdir(exist_ok=True)
        graph = RECIPE.quantise(dataclasses.replace(request, precision=precision), graphs, tmp_path / precision)
        found = np.concatenate([run(graph["classifier"].path, frame[None]) for frame in frames])
        assert (found.argmax(1) == wanted.argmax(1)).mean() >= agreement, precision
        assert np.abs(found - wanted).max() < error, precision
    fp32 = prepared(onnx.load(graphs["classifier"].path))
    rounded = emulated(fp32, [{"frames": frame[None]} for frame in frames])
    found = np.concatenate([outputs[0] for outputs in rounded.outputs])
    assert first_fault(fp32, rounded.values) is None
    assert (found.argmax(1) == wanted.argmax(1)).mean() >= 0.99
