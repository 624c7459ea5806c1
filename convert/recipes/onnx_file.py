"""ONNX files as a source: what the encoder's and the classifier's recipe share."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from edge_convert.convert.onnx_graph import Original, reduced_precision
from edge_convert.convert.recipe import Request
from edge_convert.runtime.errors import UnsupportedModelError, UsageError

if TYPE_CHECKING:
    import onnx

log = logging.getLogger(__name__)

PRECISIONS = ("fp32", "fp16", "int8")


def source_path(request: Request) -> Path:
    """The ONNX file of the request."""
    assert request.source.path is not None
    return request.source.path


def check_precision(request: Request, model: onnx.ModelProto) -> bool:
    """Whether the file's weights are reduced already; raises UsageError if they would be reduced twice."""
    found = reduced_precision(model)
    if found and request.precision != "fp32":
        raise UsageError(
            f"{request.source.name} is {found}, and {request.precision} would reduce it twice. Pass --precision fp32 "
            "to keep it as it is, or give the fp32 file."
        )
    return found is not None


def free_batch(model: onnx.ModelProto, name: str) -> None:
    """Make the first axis of every input free, in place: a batch of 1 is what exporters write unasked."""
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if dims and dims[0].dim_value == 1:
            log.info("The batch axis of %s is 1; it is made free.", name)
            dims[0].dim_param = "batch"


def check_batch(path: Path, output: str, feed: dict[str, NDArray[Any]], name: str) -> None:
    """Raise UnsupportedModelError unless the written graph runs a batch of 2."""
    try:
        found = Original(path).run(output, feed)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{name} does not run a batch of 2 ({error}). Export it again with a dynamic batch axis."
        ) from error
    if found.ndim != 2 or len(found) != 2:
        raise UnsupportedModelError(
            f"{name} gives {found.shape} for a batch of 2; the batch size is fixed inside. Export it again with a "
            "dynamic batch axis."
        )
