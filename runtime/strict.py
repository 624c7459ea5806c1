"""JSON without its surprises, and JSON values as typed dataclasses without coercion."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import Any

from edge_convert.runtime.errors import ManifestError, clip, shown


def load_json(text: str) -> Any:
    """The value of a JSON text; ValueError for NaN, infinite numbers, lone surrogates and too many levels."""
    try:
        value = json.loads(text, parse_constant=_refuse_number, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise ValueError("it has too many levels") from error
    except UnicodeEncodeError as error:
        raise ValueError("a text in it has half a surrogate pair, which is no character") from error
    return value


def _refuse_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{clip(text)} is too large a number")
    return number


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise ManifestError unless `value` is from `low` to `high`."""
    if not low <= value <= high:
        raise ManifestError(
            f"{name} in manifest.json is {shown(value)}, and {low} to {high} is possible. Convert again."
        )


def parse(kind: Any, value: Any, where: str) -> Any:
    """`value` (from JSON) as `kind`: a dataclass, tuple, dict, union or plain type. No coercion.

    Raises ManifestError, which names the place, for another type, an unknown key or an absent one.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _parse_dataclass(kind, value, where)
    if origin in (types.UnionType, typing.Union):
        for option in args:
            if _fits(option, value):
                return parse(option, value, where)
    elif origin is tuple and isinstance(value, list):
        return tuple(parse(args[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    elif origin is dict and isinstance(value, dict):
        return {key: parse(args[1], item, f"{where}.{clip(key)}") for key, item in value.items()}
    elif kind is Any or _fits(kind, value):
        return value
    wanted = kind.__name__ if isinstance(kind, type) and origin is None else kind
    raise ManifestError(f"{where} in manifest.json is {type(value).__name__}, and {wanted} is expected.")


def _fits(kind: Any, value: Any) -> bool:
    if kind is types.NoneType:
        return value is None
    if dataclasses.is_dataclass(kind):
        return isinstance(value, dict)
    return isinstance(value, typing.get_origin(kind) or kind) and not (kind is int and isinstance(value, bool))


def _parse_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ManifestError(f"{where} in manifest.json is not an object.")
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise ManifestError(
            f"{where} in manifest.json has the unknown key {shown(unknown[0])}; known: {', '.join(sorted(hints))}."
        )
    for spec in dataclasses.fields(kind):
        required = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        if required and spec.name not in value:
            raise ManifestError(f"{where} in manifest.json has no {spec.name!r}.")
    return kind(**{key: parse(hints[key], item, f"{where}.{key}") for key, item in value.items()})
