"""The example network and its class names, and the photos that the docs' commands use."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import assets
import numpy as np
import pytest
from PIL import Image

from edge_convert.convert.photos import MIN_PHOTOS, read_photos
from edge_convert.convert.source import load_factory

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "efficientnet_lite0.py"


def test_photos_are_enough_to_calibrate_and_to_judge(tmp_path: Path) -> None:
    folder = Path(assets.main(["photos", str(tmp_path / "new" / "photos")]))
    photos = read_photos(folder)
    assert len(photos.calibrating) == 18 >= MIN_PHOTOS
    assert {path.name.split("-")[1] for path in photos.judging} == {"chelsea", "coffee", "flower"}
    assert not {path.name.split("-")[1] for path in photos.calibrating} & {"chelsea", "coffee", "flower"}
    assert assets.main(["photos", str(folder)]) == str(folder)  # again into the same folder


@pytest.mark.parametrize("arguments", [[], ["photos"], ["gone"], ["minilm_folder", "more"]])
def test_other_arguments_get_the_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"Usage: python tests/assets\.py"):
        assets.main(arguments)


def test_without_the_package_there_are_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    names = load_factory(f"{EXAMPLE}:class_names")
    monkeypatch.setattr(metadata, "distribution", absent)
    assert names() is None


@pytest.mark.real
def test_names_are_in_the_order_of_the_logits() -> None:
    import torch

    assets.imagenet_names()
    assets.efficientnet_weights()
    network = load_factory(f"{EXAMPLE}:build")()
    labels = network.edge_convert["labels"]
    assert len(labels) == 1000
    cats = ("tabby, tabby cat", "tiger cat", "Egyptian cat")
    wanted = {"chelsea.png": cats, "coffee.png": ("espresso",), "flower.jpg": ("daisy",)}
    found = {}
    for path in assets.photos():
        if path.name in wanted:
            with Image.open(path) as photo:
                pixels = np.asarray(photo.convert("RGB").resize((224, 224)), np.float32)
            with torch.inference_mode():
                logits = network(torch.from_numpy((pixels - 127) / 128).permute(2, 0, 1)[None])
            found[path.name] = labels[int(logits.argmax())]
    assert all(found[name] in names for name, names in wanted.items()), found
