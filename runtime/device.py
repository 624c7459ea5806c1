"""Device profiles: what a target runs on, read from devices.yaml and checked key by key."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from edge_convert.runtime.errors import DeviceError, UnknownNameError
from edge_convert.runtime.manifest import PRECISIONS, REQUESTS, TASKS

DEVICES_FILE = Path(__file__).resolve().parents[1] / "devices.yaml"
CPU_PROVIDER = "CPUExecutionProvider"
_VERSION = re.compile(r"\d+\.\d+(\.\d+)?")
_ACCURACY_LEVELS = (0, 1, 2, 3, 4)
_INHERITS, _ABSTRACT = "inherits", "abstract"
_OWN = ("aliases", "description", _ABSTRACT)  # what no entry inherits
# What an ONNX Runtime session may be told; it ignores an entry that it does not know, so a slip would change nothing.
SESSION_ENTRIES = (
    "session.intra_op.allow_spinning",
    "session.inter_op.allow_spinning",
    "session.set_denormal_as_zero",
    "session.use_env_allocators",
)
Gates = dict[str, dict[str, dict[str, float]]]


@dataclass(frozen=True, slots=True)
class ProviderSpec:
    """An ONNX Runtime execution provider and its options (names and values as ONNX Runtime spells them)."""

    name: str
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One target; the only way to say where something runs.

    `providers` and `native_precisions` are in order of preference. `memory_bandwidth_gb_s` is the peak
    (None: it depends on the machine). `ir_max` and `opset_max` cap what is written; `onnxruntime_min`
    and `onnxruntime_max` (inclusive, "major.minor") are the releases the target is kept for.
    `gates[task][precision]` has bounds named `<metric>_min` or `<metric>_max`. `session_config` has entries of ONNX
    Runtime's session configuration. With `reduce_range` int8 weights that meet uint8 activations use 7 of their 8 bits,
    so that sums of two products fit 16 bits; without it sessions use exact kernels (`runtime.int8`).
    """

    name: str
    description: str
    providers: tuple[ProviderSpec, ...]
    native_precisions: tuple[str, ...]
    memory_mb: int
    memory_bandwidth_gb_s: float | None
    ir_max: int
    opset_max: int
    onnxruntime_min: str
    onnxruntime_max: str | None
    allow_fallback: bool
    default_context_tokens: int
    accuracy_level: int
    gates: Gates
    session_config: dict[str, str] = field(default_factory=dict)
    reduce_range: bool = False

    def gate_bounds(self, task: str, precision: str) -> dict[str, float]:
        """The bounds for `task` at `precision`, by name (`kl_mean_max`, ...); empty if the profile has none."""
        return dict(self.gates.get(task, {}).get(precision, {}))


def load_profiles(path: Path | None = None) -> dict[str, DeviceProfile]:
    """All profiles of `path` (None: the packaged devices.yaml) by target name; DeviceError if it is invalid."""
    return dict(_read(path or DEVICES_FILE)[0])


def aliases(path: Path | None = None) -> dict[str, str]:
    """Every alias and the target name it stands for."""
    return dict(_read(path or DEVICES_FILE)[1])


def load_profile(name: str, path: Path | None = None) -> DeviceProfile:
    """The profile called `name` (a target or an alias); UnknownNameError if there is none."""
    profiles, others = _read(path or DEVICES_FILE)
    target = others.get(name, name)
    if target not in profiles:
        raise UnknownNameError("target", name, (*profiles, *others))
    return profiles[target]


def with_cpu_only(profile: DeviceProfile) -> DeviceProfile:
    """The same profile on the CPU provider alone: for numerics where the device is absent."""
    return dataclasses.replace(profile, providers=(ProviderSpec(CPU_PROVIDER),))


def _read(path: Path) -> tuple[dict[str, DeviceProfile], dict[str, str]]:
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise DeviceError(f"The targets file {path} cannot be read: {error.strerror}.") from error
    return _read_unchanged(path, changed)


@lru_cache(maxsize=8)
def _read_unchanged(path: Path, changed: int) -> tuple[dict[str, DeviceProfile], dict[str, str]]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DeviceError(f"The targets file {path} cannot be read as YAML: {error}.") from error
    table = _mapping(content, path.name, {"targets"}, {"gates"})
    shared = _gates(table.get("gates") or {}, f"{path.name}: gates")
    profiles: dict[str, DeviceProfile] = {}
    others: dict[str, str] = {}
    entries = _mapping(table["targets"], f"{path.name}: targets")
    for name, entry in entries.items():
        where = f"{path.name}: target {name!r}"
        if _is(_mapping(entry, where).get(_ABSTRACT, False), bool, f"{where}, {_ABSTRACT}"):
            continue
        profiles[name], names = _profile(name, _with_inherited(name, entries, path.name), shared, where)
        for alias in names:
            if alias in others:
                raise DeviceError(f"{path.name}: the alias {alias!r} stands for {others[alias]!r} and {name!r}.")
            others[alias] = name
    if both := sorted(set(profiles) & set(others)):
        raise DeviceError(f"{path.name}: {both[0]!r} is a target and an alias. Rename one.")
    if not profiles:
        raise DeviceError(f"{path.name} has no targets.")
    return profiles, others


def _with_inherited(name: str, entries: Mapping[str, Any], file: str, children: tuple[str, ...] = ()) -> dict[str, Any]:
    """The entry `name` with what it does not say itself taken from the entry that it `inherits`, key by key."""
    where = f"{file}: target {name!r}"
    entry = dict(_mapping(entries[name], where))
    if _INHERITS not in entry:
        return entry
    parent = _is(entry.pop(_INHERITS), str, f"{where}, {_INHERITS}")
    if parent not in entries:
        raise DeviceError(f"{where} inherits {parent!r}, which the file does not have. Name one of its entries.")
    if parent in (name, *children):
        raise DeviceError(f"{where} inherits {parent!r}, which inherits {name!r}. Take one of the two out.")
    inherited = _with_inherited(parent, entries, file, (name, *children))
    return {key: value for key, value in inherited.items() if key not in _OWN} | entry


def _profile(name: str, entry: Any, shared: Gates, where: str) -> tuple[DeviceProfile, tuple[str, ...]]:
    optional = {"gates", "session_config", "reduce_range"}
    keys = {spec.name for spec in dataclasses.fields(DeviceProfile)} - {"name", *optional}
    table = dict(_mapping(entry, where, keys, {"aliases", *optional}))
    names = tuple(_list(table.pop("aliases", []), str, f"{where}, aliases"))
    own = _gates(table.pop("gates", None) or {}, f"{where}, gates")
    profile = DeviceProfile(
        name=name,
        description=_is(table["description"], str, f"{where}, description"),
        providers=tuple(_provider(item, f"{where}, providers") for item in _filled(table, "providers", where)),
        native_precisions=tuple(_list(_filled(table, "native_precisions", where), str, f"{where}, native_precisions")),
        memory_mb=_positive(table["memory_mb"], f"{where}, memory_mb"),
        memory_bandwidth_gb_s=_number_or_none(table["memory_bandwidth_gb_s"], f"{where}, memory_bandwidth_gb_s"),
        ir_max=_positive(table["ir_max"], f"{where}, ir_max"),
        opset_max=_positive(table["opset_max"], f"{where}, opset_max"),
        onnxruntime_min=_version(table["onnxruntime_min"], f"{where}, onnxruntime_min"),
        onnxruntime_max=(
            None
            if table["onnxruntime_max"] is None
            else _version(table["onnxruntime_max"], f"{where}, onnxruntime_max")
        ),
        allow_fallback=_is(table["allow_fallback"], bool, f"{where}, allow_fallback"),
        default_context_tokens=_positive(table["default_context_tokens"], f"{where}, default_context_tokens"),
        accuracy_level=_is(table["accuracy_level"], int, f"{where}, accuracy_level"),
        gates=_merged(shared, own),
        session_config=_session_config(table.get("session_config") or {}, f"{where}, session_config"),
        reduce_range=_is(table.get("reduce_range", False), bool, f"{where}, reduce_range"),
    )
    if unknown := [item for item in profile.native_precisions if item not in PRECISIONS]:
        raise DeviceError(f"{where} has the unknown precision {unknown[0]!r}; known: {', '.join(PRECISIONS)}.")
    if profile.accuracy_level not in _ACCURACY_LEVELS:
        raise DeviceError(f"{where}, accuracy_level is {profile.accuracy_level}; known: {_ACCURACY_LEVELS}.")
    return profile, names


def _provider(value: Any, where: str) -> ProviderSpec:
    table = _mapping(value, where, {"name"}, {"options"})
    options = _mapping(table.get("options") or {}, f"{where}, options")
    for key, option in options.items():
        _is(option, str, f"{where}, option {key}")
    return ProviderSpec(_is(table["name"], str, f"{where}, name"), dict(options))


def _session_config(value: Any, where: str) -> dict[str, str]:
    entries = _mapping(value, where, set(), set(SESSION_ENTRIES))
    return {name: _is(entry, str, f"{where}, {name}") for name, entry in entries.items()}


def _gates(value: Any, where: str) -> Gates:
    gates: Gates = {}
    for task, by_precision in _mapping(value, where, set(), set(TASKS)).items():
        gates[task] = {}
        for precision, bounds in _mapping(by_precision, f"{where}, {task}", set(), set(REQUESTS)).items():
            place = f"{where}, {task}, {precision}"
            gates[task][precision] = {}
            for bound, number in _mapping(bounds, place).items():
                if not bound.endswith(("_min", "_max")):
                    raise DeviceError(
                        f"{place} has the bound {bound!r}; a bound is named <metric>_min or <metric>_max."
                    )
                gates[task][precision][bound] = _number(number, f"{place}, {bound}")
    return gates


def _merged(shared: Gates, own: Gates) -> Gates:
    """`shared` with single bounds replaced by `own`'s; no inner table is shared with either."""
    merged = {task: {precision: dict(bounds) for precision, bounds in table.items()} for task, table in shared.items()}
    for task, table in own.items():
        for precision, bounds in table.items():
            merged.setdefault(task, {}).setdefault(precision, {}).update(bounds)
    return merged


def _mapping(
    value: Any, where: str, required: set[str] | None = None, optional: set[str] | None = None
) -> Mapping[str, Any]:
    """`value` if it is a table of strings with every `required` key and no key beside the `optional` ones."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise DeviceError(f"{where} is {type(value).__name__}, and a table with text keys is expected.")
    if required is None and optional is None:
        return value
    needed, known = required or set(), (required or set()) | (optional or set())
    if unknown := sorted(set(value) - known):
        raise DeviceError(f"{where} has the unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}.")
    if missing := sorted(needed - set(value)):
        raise DeviceError(f"{where} has no {missing[0]!r}. Add it.")
    return value


def _is(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise DeviceError(f"{where} is {value!r}, and {kind.__name__} is expected.")
    return value


def _list(value: Any, kind: type, where: str) -> list[Any]:
    return [_is(item, kind, where) for item in _is(value, list, where)]


def _filled(table: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value: list[Any] = _is(table[key], list, f"{where}, {key}")
    if not value:
        raise DeviceError(f"{where} has an empty {key}. Name at least one.")
    return value


def _positive(value: Any, where: str) -> int:
    number: int = _is(value, int, where)
    if number < 1:
        raise DeviceError(f"{where} is {number}, and a number above 0 is expected.")
    return number


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or value < 0:
        raise DeviceError(f"{where} is {value!r}, and a number of 0 or more is expected.")
    return float(value)


def _number_or_none(value: Any, where: str) -> float | None:
    return None if value is None else _number(value, where)


def _version(value: Any, where: str) -> str:
    text: str = _is(value, str, where)
    if not _VERSION.fullmatch(text):
        raise DeviceError(f'{where} is {text!r}, and a version such as "1.20" is expected.')
    return text
