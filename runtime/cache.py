"""All layers' keys and values as one object, built from the manifest's CacheSpec."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from edge_convert.runtime.errors import BundleError, ContextLengthError, DeviceError, UsageError, shown
from edge_convert.runtime.manifest import CacheSpec
from edge_convert.runtime.ort import import_onnxruntime

_DTYPES = {"float32": np.float32, "float16": np.float16}


class KVCache:
    """One preallocated buffer per past/present pair, and how many of its positions are in use.

    Each buffer is (1, kv_heads, max_length, head_dim) of the spec's dtype and serves as past and as present:
    the graph appends in place and nothing is copied between steps. On the CPU untouched pages cost no memory.
    """

    def __init__(self, spec: CacheSpec, *, device_type: str = "cpu", device_id: int = 0) -> None:
        if spec.dtype not in _DTYPES:
            raise BundleError(
                f"The cache has dtype {spec.dtype}, and this runtime holds {', '.join(sorted(_DTYPES))}. "
                "Convert with another precision."
            )
        if not spec.share_buffer:
            raise BundleError("The decoder does not share its past and present buffers. Convert the model again.")
        make = import_onnxruntime().OrtValue.ortvalue_from_numpy
        self.spec = spec
        self._length = 0
        shape = (1, spec.kv_heads, spec.max_length, spec.head_dim)
        self._buffers: list[Any] = []
        try:
            for _ in spec.past:
                self._buffers.append(make(np.zeros(shape, _DTYPES[spec.dtype]), device_type, device_id))
        except Exception as error:  # MemoryError, or ONNX Runtime's own for a device
            raise DeviceError(
                f"The cache of {self.nbytes} bytes does not fit into memory. Convert with a smaller --context."
            ) from error

    @property
    def length(self) -> int:
        """Positions in use, in tokens."""
        return self._length

    @property
    def max_length(self) -> int:
        """Positions that the buffers hold, in tokens."""
        return self.spec.max_length

    @property
    def nbytes(self) -> int:
        """Size of all buffers in bytes."""
        spec = self.spec
        return len(spec.past) * spec.kv_heads * spec.max_length * spec.head_dim * np.dtype(_DTYPES[spec.dtype]).itemsize

    def bind(self, binding: Any) -> None:
        """Bind every buffer as its past input and as its present output of an onnxruntime.IOBinding, once."""
        for past, present, buffer in zip(self.spec.past, self.spec.present, self._buffers, strict=True):
            binding.bind_ortvalue_input(past, buffer)
            binding.bind_ortvalue_output(present, buffer)

    def reserve(self, tokens: int) -> None:
        """Raise ContextLengthError unless `tokens` more positions are free."""
        if self._length + tokens > self.spec.max_length:
            raise ContextLengthError(self._length + tokens, self.spec.max_length)

    def advance(self, tokens: int) -> None:
        """Count `tokens` more positions as used, after the graph wrote them."""
        self.reserve(tokens)
        self._length += tokens

    def rewind(self, length: int) -> None:
        """Forget everything after the first `length` positions; what follows overwrites them."""
        try:
            wanted = -1 if isinstance(length, bool) else operator.index(length)
        except TypeError:
            wanted = -1
        if not 0 <= wanted <= self._length:
            raise UsageError(f"Cannot rewind the cache to {shown(length)} tokens: it holds {self._length}.")
        self._length = wanted

    def reset(self) -> None:
        """Forget all positions; the buffers are kept."""
        self._length = 0
