"""Whether this CPU's int8 kernels are exact, and what makes ONNX Runtime use those that are.

x86-64 with AVX2 and without VNNI multiplies uint8 activations with int8 weights and adds neighbours in saturating int16
(vpmaddubsw): 255 (127 + 127) becomes 32767. ONNX Runtime uses these kernels unless it is told otherwise, and the exact
ones are slower. So they are asked for only where they are needed: with AMX, ONNX Runtime 1.32 told so takes 1.6 times as
long for the same result.
"""

from __future__ import annotations

import logging
from functools import cache

import numpy as np

from edge_convert.runtime.one_node import INT8, INT32, UINT8, one_node_graph
from edge_convert.runtime.ort import import_onnxruntime

EXACT_INT8 = "session.x64quantprecision"
_INNER, _COLUMNS = 64, 16
_log = logging.getLogger(__name__)


@cache
def saturates() -> bool:
    """Whether a product of uint8 and int8 that fits int32 comes out wrong on this machine (asked once, about 1 ms)."""
    ort = import_onnxruntime()
    model = one_node_graph(
        "MatMulInteger",
        ("a", "b"),
        {"a": (UINT8, (4, _INNER)), "b": (INT8, (_INNER, _COLUMNS))},
        (INT32, (4, _COLUMNS)),
    )
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001 - a build without this operator: what cannot be asked is not relied on
        _log.info("This ONNX Runtime has no MatMulInteger to try int8 products with; exact kernels are asked for.")
        return True
    feed = {"a": np.full((4, _INNER), 255, np.uint8), "b": np.full((_INNER, _COLUMNS), 127, np.int8)}
    (found,) = session.run(None, feed)
    return bool((found != 255 * 127 * _INNER).any())


def exact_int8() -> dict[str, str]:
    """The entries of ONNX Runtime's session configuration that make int8 products exact on this machine."""
    return {EXACT_INT8: "1"} if saturates() else {}
