from __future__ import annotations

import dataclasses
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from edge_convert.runtime.device import (
    DEVICES_FILE,
    DeviceProfile,
    aliases,
    load_profile,
    load_profiles,
    with_cpu_only,
)
from edge_convert.runtime.errors import DeviceError, UnknownNameError
from edge_convert.runtime.manifest import PRECISIONS, TASKS

KNOWN_PROVIDERS = {"CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"}


def packaged() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(DEVICES_FILE.read_text(encoding="utf-8"))
    return content


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "targets.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", sorted(load_profiles()))
def test_every_packaged_target_is_whole(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.description
    assert {provider.name for provider in profile.providers} <= KNOWN_PROVIDERS
    assert set(profile.native_precisions) <= set(PRECISIONS)
    assert profile.ir_max <= 10
    assert profile.opset_max <= 21
    for task in TASKS:
        for precision in profile.native_precisions:
            if (task, precision) in (("feature-extraction", "int4"), ("image-classification", "int4")):
                continue
            assert profile.gate_bounds(task, precision), (task, precision)


def test_every_alias_leads_to_its_target() -> None:
    assert aliases()
    for alias, target in aliases().items():
        assert load_profile(alias) == load_profile(target)
        assert alias not in load_profiles()


def test_jetson_is_what_its_data_sheet_says() -> None:
    profile = load_profile("jetson")
    assert profile.name == "jetson-orin-nano-8gb-jp6"
    assert profile.memory_mb == 8192
    assert profile.memory_bandwidth_gb_s == 102.0
    assert [provider.name for provider in profile.providers] == ["CUDAExecutionProvider"]
    assert (profile.onnxruntime_min, profile.onnxruntime_max) == ("1.20", "1.23")
    assert not profile.allow_fallback


def test_boards_of_one_module_differ_by_their_software_alone() -> None:
    boards = [name for name in load_profiles() if name.startswith("jetson") and name.endswith("-jp6")]
    assert len(boards) == 3
    for name in boards:
        old, new = load_profile(name), load_profile(name.replace("-jp6", "-jp7"))
        software = {"name", "description", "onnxruntime_min", "onnxruntime_max"}
        changed = {spec.name for spec in dataclasses.fields(old) if getattr(old, spec.name) != getattr(new, spec.name)}
        assert changed == software


def test_looser_precisions_never_have_tighter_bounds() -> None:
    for profile in load_profiles().values():
        for task, table in profile.gates.items():
            order = [precision for precision in PRECISIONS if precision in table]
            for tight, loose in pairwise(order):
                for bound, value in table[tight].items():
                    other = table[loose][bound]
                    assert other >= value if bound.endswith("_max") else other <= value, (task, tight, loose, bound)


def test_unknown_target_names_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"target 'toaster'.*cuda.*jetson") as caught:
        load_profile("toaster")
    assert caught.value.exit_code == 2


def test_gate_bounds_are_a_copy_and_empty_when_there_are_none() -> None:
    profile = load_profile("cpu")
    profile.gate_bounds("text-generation", "int8")["kl_mean_max"] = 99.0
    assert profile.gate_bounds("text-generation", "int8")["kl_mean_max"] == 0.01
    assert profile.gate_bounds("feature-extraction", "int4") == {}


def test_with_cpu_only_changes_the_providers_alone() -> None:
    cuda = load_profile("cuda")
    cpu = with_cpu_only(cuda)
    assert [(provider.name, provider.options) for provider in cpu.providers] == [("CPUExecutionProvider", {})]
    assert dataclasses.replace(cpu, providers=cuda.providers) == cuda


def test_profile_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_profile("cpu").memory_mb = 1  # type: ignore[misc]


def test_own_gates_replace_single_shared_bounds(tmp_path: Path) -> None:
    content = packaged()
    content["targets"]["cpu"]["gates"] = {"text-generation": {"int8": {"kl_mean_max": 0.5}}}
    path = written(tmp_path, content)
    assert load_profile("cpu", path).gate_bounds("text-generation", "int8") == {
        "kl_mean_max": 0.5,
        "top1_agreement_min": 0.94,
        "perplexity_ratio_max": 1.03,
    }
    assert load_profile("cuda", path).gate_bounds("text-generation", "int8")["kl_mean_max"] == 0.01


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    content = packaged()
    path = written(tmp_path, content)
    assert load_profile("cpu", path).memory_mb == 8192
    content["targets"]["cpu"]["memory_mb"] = 512
    written(tmp_path, content)
    os.utime(path, ns=(1, 1))
    assert load_profile("cpu", path).memory_mb == 512


def test_an_entry_has_what_it_does_not_say_from_the_one_it_inherits(tmp_path: Path) -> None:
    content = packaged()
    cpu = content["targets"]["cpu"]
    content["targets"]["half"] = {"abstract": True, "inherits": "cpu", "memory_mb": 4096}
    content["targets"]["board"] = {"inherits": "half", "description": "A board", "opset_max": 17}
    path = written(tmp_path, content)
    board = load_profile("board", path)
    assert (board.memory_mb, board.opset_max, board.description) == (4096, 17, "A board")
    expected = dataclasses.replace(
        load_profile("cpu", path), name="board", description="A board", memory_mb=4096, opset_max=17
    )
    assert board == expected
    assert "half" not in load_profiles(path)
    assert aliases(path)[cpu["aliases"][0]] == "cpu"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"board": {"inherits": "ghost", "description": "x"}}, "inherits 'ghost', which the file does not have"),
        ({"board": {"inherits": "board", "description": "x"}}, "inherits 'board'"),
        ({"a": {"inherits": "b"}, "b": {"inherits": "a"}}, "Take one of the two out"),
        ({"board": {"inherits": ["cpu"], "description": "x"}}, "str is expected"),
        ({"board": {"inherits": "cpu"}}, "has no 'description'"),
        ({"board": {"inherits": "cpu", "description": "x", "abstract": "yes"}}, "bool is expected"),
        ({"board": {"inherits": "cpu", "description": "x", "memory": 1}}, "unknown key 'memory'"),
    ],
)
def test_a_wrong_inheritance_is_refused(tmp_path: Path, entries: dict[str, Any], message: str) -> None:
    content = packaged()
    content["targets"].update(entries)
    with pytest.raises(DeviceError, match=message):
        load_profiles(written(tmp_path, content))


OPTIONAL = {"gates", "session_config", "reduce_range"}
REQUIRED = sorted({spec.name for spec in dataclasses.fields(DeviceProfile)} - {"name", *OPTIONAL})


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    content = packaged()
    del content["targets"]["cpu"][key]
    with pytest.raises(DeviceError, match=rf"'cpu' has no '{key}'"):
        load_profiles(written(tmp_path, content))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_gb": 8}, "unknown key 'memory_gb'"),
        ({"memory_mb": "8192"}, "memory_mb is '8192'"),
        ({"memory_mb": 0}, "above 0"),
        ({"memory_mb": True}, "int is expected"),
        ({"memory_bandwidth_gb_s": float("nan")}, "memory_bandwidth_gb_s"),
        ({"providers": []}, "empty providers"),
        ({"providers": [{"name": "CPUExecutionProvider", "option": {}}]}, "unknown key 'option'"),
        ({"providers": [{"name": "CPUExecutionProvider", "options": {"x": 1}}]}, "option x is 1"),
        ({"native_precisions": ["fp8"]}, "unknown precision 'fp8'"),
        ({"onnxruntime_min": 1.2}, "onnxruntime_min is 1.2"),
        ({"onnxruntime_min": "new"}, "a version"),
        ({"allow_fallback": "no"}, "bool is expected"),
        ({"accuracy_level": 9}, "accuracy_level is 9"),
        ({"reduce_range": 1}, "reduce_range is 1"),
        ({"session_config": ["x"]}, "session_config is list"),
        ({"session_config": {"session.set_denormal_as_zero": 1}}, "set_denormal_as_zero is 1"),
        ({"session_config": {"session.set_denormals": "1"}}, "unknown key 'session.set_denormals'"),
        ({"gates": {"chess": {}}}, "unknown key 'chess'"),
        ({"gates": {"text-generation": {"int8": {"kl_mean": 1.0}}}}, "bound 'kl_mean'"),
        ({"gates": {"text-generation": {"int8": {"kl_mean_max": "low"}}}}, "'low'"),
        ({"aliases": ["cuda"]}, "'cuda' is a target and an alias"),
        ({"aliases": ["jetson"]}, "alias 'jetson' stands for"),
    ],
)
def test_a_wrong_entry_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    content = packaged()
    content["targets"]["cpu"].update(changes)
    with pytest.raises(DeviceError, match=message):
        load_profiles(written(tmp_path, content))


@pytest.mark.parametrize("text", ["", "- 1", "targets: {}", "targets: [", "targets: {1: {}}", "other: {}"])
def test_a_file_without_targets_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "targets.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DeviceError):
        load_profiles(path)


def test_an_absent_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="cannot be read"):
        load_profiles(tmp_path / "absent.yaml")
