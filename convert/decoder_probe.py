"""A decoder graph as a function from token ids to logits, with weights that can be exchanged: for measuring.

Opens the graph on the CPU, whatever the target; there is no cache between calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_convert.convert.graph_tools import cpu_session
from edge_convert.convert.recipe import Exported
from edge_convert.runtime.threads import available_cpus

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
_KINDS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class Probe:
    """One open decoder graph.

    With `exchangeable` names of initializers (as in the graph), `logits` may be given other values for them; ONNX
    Runtime then keeps those weights as they are in the file, mapped, and packs nothing.
    """

    def __init__(self, graph: Exported, exchangeable: Sequence[str] = ()) -> None:
        assert graph.cache is not None
        path = _with_inputs(graph.path, exchangeable) if exchangeable else graph.path
        settings = {"session.disable_prepacking": "1"} if exchangeable else {}
        try:
            self._session: Any = cpu_session(path, threads=available_cpus(), settings=settings)
        finally:
            if path != graph.path:
                path.unlink()
        self._cache = graph.cache
        self._inputs = {item.name: item.type for item in self._session.get_inputs()}

    def logits(self, ids: Ids, weights: Mapping[str, Floats] | None = None) -> Floats:
        """Logits float32 (S, vocabulary) of every position of `ids` int64 (S,)."""
        count = len(ids)
        feed: dict[str, Any] = {
            "input_ids": ids[None],
            "seqlens_k": np.array([count - 1], np.int32),
            "total_sequence_length": np.array(count, np.int32),
            "logits_positions": np.arange(count),
            "position_ids": np.arange(count)[None],
        }
        for name in self._cache.past:
            shape = (1, self._cache.kv_heads, count, self._cache.head_dim)
            feed[name] = np.zeros(shape, _KINDS[self._inputs[name]])
        feed = {name: value for name, value in feed.items() if name in self._inputs} | dict(weights or {})
        (values,) = self._session.run(["logits"], feed)
        return np.asarray(values[0], np.float32)


def _with_inputs(path: Path, names: Sequence[str]) -> Path:
    """The graph at `path` with the initializers `names` also as inputs, in a file beside it (same external data)."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        if tensor.name in names:
            model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    beside = path.with_name(f"probe_{path.name}")
    onnx.save(model, beside)
    return beside
