"""The files that keep an ONNX model's large tensors, each checked before anything opens it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edge_convert.runtime.errors import SourceError

if TYPE_CHECKING:
    import onnx

_AGAIN = "Save the model again with its data beside it."


def check_external_data(path: Path) -> list[Path]:
    """The external data files of the ONNX model at `path`, each once.

    Raises SourceError if the model cannot be read, or a tensor's data is outside its folder (by its name or
    through a link), missing, or shorter than the tensor says.
    """
    import onnx
    from google.protobuf.message import DecodeError
    from onnx.external_data_helper import _get_all_tensors, uses_external_data

    try:
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not an ONNX model ({error}). Export it again.") from error
    if not model.graph.output:
        raise SourceError(f"{path} is not an ONNX model (it has no outputs). Export it again.")
    files = set()
    for tensor in _get_all_tensors(model):
        if uses_external_data(tensor):
            entries = {entry.key: entry.value for entry in tensor.external_data}
            file = _locate(path, tensor.name, entries.get("location", ""))
            _check_range(path, tensor, file, entries)
            files.add(file)
    return sorted(files)


def _locate(path: Path, tensor: str, location: str) -> Path:
    """The file that `location` names, if it is a plain one in the folder of `path`."""
    folder = path.parent.resolve()
    try:
        file = folder / location
        missing = not file.is_file()
        # A link on the way makes the resolved path another one; a hard link is known by its count only.
        inside = file.resolve() == file and file.is_relative_to(folder)
        linked = not missing and file.stat().st_nlink > 1
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SourceError(
            f"{path.name} keeps the tensor {tensor!r} in a file whose name cannot be used ({location[:60]!r}: {reason}). "
            f"{_AGAIN}"
        ) from error
    if not location or not inside or linked:
        how = "that is a hard link to a file elsewhere" if linked and inside else "outside its folder or behind a link"
        raise SourceError(f"{path.name} keeps the tensor {tensor!r} in {location!r}, {how}; it is refused. {_AGAIN}")
    if missing:
        raise SourceError(f"{path.name} needs {location!r} beside it, and it is missing. Copy both files.")
    if file == path.resolve():
        raise SourceError(f"{path.name} keeps the tensor {tensor!r} in itself, as its own external data. {_AGAIN}")
    return file


def _check_range(path: Path, tensor: onnx.TensorProto, file: Path, entries: dict[str, str]) -> None:
    """Raise SourceError unless the tensor's bytes are within `file`."""
    size = file.stat().st_size
    try:
        offset = int(entries.get("offset") or 0)
        needed = _bytes(tensor)
        length = int(entries.get("length") or needed)
    except (KeyError, ValueError, TypeError) as error:
        raise SourceError(
            f"{path.name} gives the tensor {tensor.name!r} an offset, length or type that is none ({error}). {_AGAIN}"
        ) from error
    if offset < 0 or length < needed or offset + length > size:
        raise SourceError(
            f"{path.name} takes {length} bytes at {offset} of {file.name!r} for the {needed} of the tensor "
            f"{tensor.name!r}, and the file has {size}. Copy both files again."
        )


def _bytes(tensor: onnx.TensorProto) -> int:
    """Bytes of the tensor's elements; types below a byte are packed."""
    import math

    from onnx import TensorProto, helper

    count = math.prod(tensor.dims)
    bits = {TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.FLOAT4E2M1: 4}.get(tensor.data_type)
    if bits is None:
        bits = 8 * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    return int(count * bits + 7) // 8
