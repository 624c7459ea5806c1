"""Dtype names between the manifest, NumPy and ONNX Runtime, and the check of a feed against its specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edge_convert.runtime.errors import FeedError
from edge_convert.runtime.manifest import TensorSpec

# The ONNX Runtime name is in brackets: tensor(float).
_ORT_NAMES = {
    "float32": "float", "float64": "double", "float16": "float16", "bfloat16": "bfloat16",
    "int8": "int8", "uint8": "uint8", "int16": "int16", "uint16": "uint16",
    "int32": "int32", "uint32": "uint32", "int64": "int64", "uint64": "uint64",
    "int4": "int4", "uint4": "uint4", "bool": "bool", "string": "string",
}  # fmt: skip
_NOT_IN_NUMPY = ("bfloat16", "int4", "uint4")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a manifest's dtype name; FeedError for those that NumPy does not have."""
    if name in _NOT_IN_NUMPY or name not in _ORT_NAMES:
        raise FeedError(f"NumPy has no dtype {name!r}. Convert with float32 or float16 inputs and outputs.")
    return np.dtype(object) if name == "string" else np.dtype(name)


def ort_type_name(name: str) -> str:
    """ONNX Runtime's name for a tensor of a manifest's dtype: "float32" -> "tensor(float)"."""
    if name not in _ORT_NAMES:
        raise FeedError(f"ONNX Runtime has no tensor of dtype {name!r}; known: {', '.join(_ORT_NAMES)}.")
    return f"tensor({_ORT_NAMES[name]})"


def check_feed(specs: Sequence[TensorSpec], feed: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Raise FeedError unless `feed` has every input, no other, each with its dtype, rank and dims.

    Fixed dims must be equal; dims with the same name must agree over all inputs.
    """
    if not isinstance(feed, Mapping):
        raise FeedError(f"A feed must be a dict of arrays by input name; found {type(feed).__name__}.")
    known = {spec.name for spec in specs}
    if unknown := sorted(set(feed) - known, key=str):
        raise FeedError(f"The graph has no input {unknown[0]!r}; its inputs: {', '.join(sorted(known))}.")
    if missing := sorted(known - set(feed)):
        raise FeedError(f"The input {missing[0]!r} is missing. Feed all of: {', '.join(sorted(known))}.")
    named: dict[str, tuple[int, str]] = {}
    for spec in specs:
        _check_array(spec, feed[spec.name], named)


def _check_array(spec: TensorSpec, array: Any, named: dict[str, tuple[int, str]]) -> None:
    if not isinstance(array, np.ndarray):
        raise FeedError(f"The input {spec.name!r} is {type(array).__name__}. Pass a NumPy array of {spec.dtype}.")
    if spec.dtype == "string":
        right = array.dtype.kind in "OUS"
    else:
        right = array.dtype == numpy_dtype(spec.dtype)
    if not right:
        raise FeedError(f"The input {spec.name!r} is {array.dtype}, and the graph takes {spec.dtype}. Cast it first.")
    shape = "(" + ", ".join(str(dim) for dim in spec.shape) + ")"
    if array.ndim != len(spec.shape):
        raise FeedError(
            f"The input {spec.name!r} has shape {array.shape}, and the graph takes {len(spec.shape)} dimensions {shape}."
        )
    for axis, (dim, size) in enumerate(zip(spec.shape, array.shape, strict=True)):
        if isinstance(dim, int):
            if dim != size:
                raise FeedError(
                    f"The input {spec.name!r} has shape {array.shape}, and axis {axis} must be {dim}: {shape}."
                )
        elif dim:
            first, owner = named.setdefault(dim, (size, spec.name))
            if first != size:
                raise FeedError(
                    f"The dimension {dim!r} is {first} in {owner!r} and {size} in {spec.name!r}. Make them equal."
                )
