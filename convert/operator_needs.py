"""Which ONNX Runtime a graph needs: contrib operators take more from release to release under the same name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edge_convert.runtime.device import DeviceProfile
from edge_convert.runtime.errors import ExportError
from edge_convert.runtime.manifest import GraphSpec
from edge_convert.runtime.ort import version_numbers

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class Need:
    """Nodes of `operator` with these integer attributes run from ONNX Runtime `version` ("major.minor") on."""

    operator: str
    version: str
    words: str
    attributes: Mapping[str, int] = field(default_factory=dict)


# Opened and run on CPU with each release of Python 3.10: 1.20.1 and 1.21.1 do not open 8-bit products, 1.22.1 opens them and
# cannot run them at accuracy_level 0, and 1.23.2 runs them.
NEEDS = (Need("MatMulNBits", "1.23", "8-bit MatMulNBits", {"bits": 8}),)


def needed_onnxruntime(model: onnx.ModelProto) -> str:
    """The oldest ONNX Runtime ("major.minor") that runs the nodes in `NEEDS`; "" if there are none."""
    versions = [need.version for need in NEEDS if any(_matches(node, need) for node in model.graph.node)]
    return max(versions, key=version_numbers, default="")


def check_needs(graph: GraphSpec, profile: DeviceProfile) -> tuple[str, ...]:
    """What to know before shipping a graph whose operators are newer than the target's oldest ONNX Runtime.

    Only for targets whose range ends, as those are boards whose ONNX Runtime is not simply replaced. Raises ExportError
    if the graph needs a newer one than the range has.
    """
    needed, newest = graph.onnxruntime_min, profile.onnxruntime_max
    if not needed or newest is None or version_numbers(needed) <= version_numbers(profile.onnxruntime_min):
        return ()
    reason = ", ".join(need.words for need in NEEDS if need.version == needed)
    if version_numbers(needed) > version_numbers(newest)[: len(version_numbers(needed))]:
        raise ExportError(
            f"{graph.file} needs ONNX Runtime {needed} or newer ({reason}), and target {profile.name} ends at {newest}. "
            "Convert with --precision fp16 or fp32, or for a target with a newer one."
        )
    return (
        f"{graph.file} needs ONNX Runtime {needed} or newer ({reason}); the range of {profile.name} begins at "
        f"{profile.onnxruntime_min}. An older one refuses the bundle.",
    )


def _matches(node: onnx.NodeProto, need: Need) -> bool:
    numbers = {attribute.name: attribute.i for attribute in node.attribute}
    return node.op_type == need.operator and need.attributes.items() <= numbers.items()
