"""The import of ONNX Runtime, and what is really wrong when it fails."""

from __future__ import annotations

import re
from typing import Any

from edge_convert.runtime.errors import DeviceError, MissingExtraError


def import_onnxruntime() -> Any:
    """The module `onnxruntime`.

    Raises:
        MissingExtraError: It, or a part of it, is not installed.
        DeviceError: It is installed and does not start; says why.
        KeyboardInterrupt: The user interrupted the import, which ONNX Runtime turns into errors of its own.
    """
    try:
        import onnxruntime
    except Exception as error:
        if _interrupted(error):
            raise KeyboardInterrupt from error
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and missing.split(".")[0] == "onnxruntime":
            raise MissingExtraError("onnxruntime", "cpu") from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DeviceError(
            f"ONNX Runtime is installed and cannot be imported ({reason}). "
            "Reinstall exactly one of onnxruntime and onnxruntime-gpu."
        ) from error
    if not hasattr(onnxruntime, "InferenceSession"):  # what remains when one of the two packages is uninstalled
        raise MissingExtraError("onnxruntime", "cpu")
    return onnxruntime


def version_numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a release ("1.23.2+cu12": 1, 23, 2), to compare."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _interrupted(error: BaseException) -> bool:
    """Whether a KeyboardInterrupt is behind `error`."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if item is None or id(item) in seen:
            continue
        if isinstance(item, KeyboardInterrupt):
            return True
        seen.add(id(item))
        waiting += [item.__cause__, item.__context__]
    return False
