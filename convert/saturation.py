"""int8 weights on CPUs whose kernels add two products in 16 bits: x86-64 with AVX2 and without VNNI.

vpmaddubsw multiplies uint8 activations with int8 weights and adds neighbours, a0 w0 + a1 w1, in int16: 255 (127 + 127)
becomes 32767 instead of 64770. With |w| <= 64 the largest sum is 255 (64 + 64) = 32640.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edge_convert.runtime.errors import ExportError

if TYPE_CHECKING:
    import onnx

_FULL, _REDUCED = 127, 64
_INTEGER = {"MatMulInteger": 1, "ConvInteger": 1, "QLinearMatMul": 3, "QLinearConv": 3, "DynamicQuantizeMatMul": 1}
_QDQ = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def weight_limit(*, reduce_range: bool) -> int:
    """The largest magnitude of an int8 weight."""
    return _REDUCED if reduce_range else _FULL


def check_saturation(path: Path) -> None:
    """Raise ExportError, naming the node, if int8 weights in the graph at `path` can saturate.

    That are those beyond 64 of products with 8-bit activations, as integer operators or between DequantizeLinear.
    """
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(path).graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        name = _weights(node, makers)
        if name not in tensors:
            continue
        largest = int(np.abs(numpy_helper.to_array(tensors[name]).astype(np.int16)).max(initial=0))
        if tensors[name].data_type == onnx.TensorProto.INT8 and largest > _REDUCED:
            raise ExportError(
                f"The int8 weights of {node.name or node.op_type} in {path.name} reach {largest}. Two of them next to each "
                f"other saturate on this target, whose weights must stay within {_REDUCED}. Convert from fp32 weights, or "
                "for the target cpu."
            )


def _weights(node: onnx.NodeProto, makers: dict[str, onnx.NodeProto]) -> str | None:
    """The name of the 8-bit weights that the node multiplies with 8-bit activations; None if it does not."""
    if node.op_type in _INTEGER:
        return str(node.input[_INTEGER[node.op_type]])
    if node.op_type not in _QDQ:
        return None
    both = [makers.get(name) for name in node.input[:2]]
    if any(maker is None or maker.op_type != "DequantizeLinear" for maker in both):
        return None
    assert both[1] is not None
    return str(both[1].input[0])
