"""preprocessor_config.json beside an ONNX classifier: normalisation and sizes of a frame."""

from __future__ import annotations

import json

import numpy as np
import pytest

from edge_convert.convert.recipes.onnx_preprocessing import read_preparation
from edge_convert.runtime.errors import SourceError

SIZE = 32


def preparation(folder, value):
    (folder / "preprocessor_config.json").write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("config", "mean", "std"),
    [
        ({"mean": [1, 2, 3], "std": 2}, (1, 2, 3), (2, 2, 2)),
        ({"image_mean": [0.5] * 3, "image_std": [0.25] * 3}, (127.5,) * 3, (63.75,) * 3),
        ({"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 0.01}, (50,) * 3, (50,) * 3),
        ({"image_mean": [127] * 3, "image_std": [128] * 3, "do_rescale": False}, (127,) * 3, (128,) * 3),
        ({"do_normalize": False, "rescale_factor": 1 / 255}, (0,) * 3, (255,) * 3),
    ],
)
def test_mean_and_std(tmp_path, config, mean, std):
    preparation(tmp_path, config)
    found = read_preparation(tmp_path / "net.onnx", (SIZE, SIZE), normalised=False)
    np.testing.assert_allclose((found.mean, found.std), (mean, std))


@pytest.mark.parametrize(
    ("config", "graph", "wanted"),
    [
        ({"mean": 0, "std": 1}, (20, 30), (20, 30, 30)),
        ({"mean": 0, "std": 1, "size": 40, "crop_size": 32}, ("h", "w"), (32, 32, 40)),
        ({"mean": 0, "std": 1, "size": {"shortest_edge": 28}, "crop_pct": 0.875, "crop_size": 28}, (28, 28), (28, 28, 32)),
        ({"mean": 0, "std": 1, "size": {"height": 32, "width": 32}}, ("h", "w"), (32, 32, 32)),
    ],
)  # fmt: skip
def test_sizes(tmp_path, config, graph, wanted):
    preparation(tmp_path, config)
    found = read_preparation(tmp_path / "net.onnx", graph, normalised=False).settings
    assert (found.height, found.width, found.resize_short_px) == wanted


def test_a_side_file_that_is_nested_too_deeply(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text('{"size":' * 100_000)
    with pytest.raises(SourceError, match="nested too deeply"):
        read_preparation(tmp_path / "model.onnx", (SIZE, SIZE), normalised=False)
