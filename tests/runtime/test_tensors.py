from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edge_convert.runtime.errors import FeedError
from edge_convert.runtime.manifest import DTYPES, TensorSpec
from edge_convert.runtime.tensors import check_feed, numpy_dtype, ort_type_name

SPECS = (
    TensorSpec("input_ids", "int64", ("batch", "sequence")),
    TensorSpec("attention_mask", "int64", ("batch", "sequence")),
    TensorSpec("frames", "uint8", ("batch", 4, 4, 3)),
)


def feed(**changes: Any) -> dict[str, Any]:
    arrays: dict[str, Any] = {
        "input_ids": np.zeros((2, 5), np.int64),
        "attention_mask": np.ones((2, 5), np.int64),
        "frames": np.zeros((2, 4, 4, 3), np.uint8),
    }
    return {**arrays, **changes}


def test_a_right_feed_passes() -> None:
    check_feed(SPECS, feed())


def test_any_order_and_layout_passes() -> None:
    arrays = feed(frames=np.asfortranarray(np.zeros((2, 4, 4, 3), np.uint8)))
    check_feed(SPECS, dict(reversed(arrays.items())))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": np.zeros(1)}, "no input 'extra'"),
        ({"input_ids": np.zeros((2, 5), np.int32)}, r"'input_ids' is int32.*int64"),
        ({"input_ids": np.zeros((2, 5), ">i8")}, "'input_ids' is >i8"),
        ({"input_ids": np.zeros(5, np.int64)}, r"'input_ids' has shape \(5,\).*2 dimensions"),
        ({"input_ids": [[1, 2]]}, "'input_ids' is list"),
        ({"frames": np.zeros((2, 4, 5, 3), np.uint8)}, r"'frames'.*axis 2 must be 4"),
        ({"attention_mask": np.ones((2, 6), np.int64)}, r"'sequence' is 5 in 'input_ids' and 6 in 'attention_mask'"),
        ({"frames": np.zeros((1, 4, 4, 3), np.uint8)}, r"'batch' is 2 in 'input_ids' and 1 in 'frames'"),
    ],
)
def test_a_wrong_feed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FeedError, match=message):
        check_feed(SPECS, feed(**changes))


def test_a_missing_input_is_named() -> None:
    arrays = feed()
    del arrays["frames"]
    with pytest.raises(FeedError, match="'frames' is missing"):
        check_feed(SPECS, arrays)


def test_unnamed_dims_are_independent() -> None:
    specs = (TensorSpec("a", "float32", ("",)), TensorSpec("b", "float32", ("",)))
    check_feed(specs, {"a": np.zeros(1, np.float32), "b": np.zeros(2, np.float32)})


def test_a_dim_named_twice_in_one_input_must_agree() -> None:
    spec = (TensorSpec("square", "float32", ("n", "n")),)
    check_feed(spec, {"square": np.zeros((3, 3), np.float32)})
    with pytest.raises(FeedError, match="'n'"):
        check_feed(spec, {"square": np.zeros((3, 4), np.float32)})


def test_strings_may_be_objects_or_text() -> None:
    spec = (TensorSpec("text", "string", ("n",)),)
    check_feed(spec, {"text": np.array(["a"], dtype=object)})
    check_feed(spec, {"text": np.array(["a"])})
    with pytest.raises(FeedError):
        check_feed(spec, {"text": np.array([1])})


def test_every_manifest_dtype_has_an_ort_name() -> None:
    assert len({ort_type_name(name) for name in DTYPES}) == len(DTYPES)
    assert ort_type_name("float32") == "tensor(float)"
    with pytest.raises(FeedError):
        ort_type_name("complex64")


def test_numpy_dtypes() -> None:
    assert numpy_dtype("float16") == np.float16
    assert numpy_dtype("bool") == np.bool_
    for name in ("bfloat16", "int4", "uint4", "complex64"):
        with pytest.raises(FeedError, match=name):
            numpy_dtype(name)
