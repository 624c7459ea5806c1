from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_convert.runtime.threads import available_cpus, cpu_quota


def machine(tmp_path: Path, lines: str, files: dict[str, str]) -> dict[str, Path]:
    (tmp_path / "cgroup").write_text(lines, encoding="ascii")
    root = tmp_path / "fs"
    root.mkdir()
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return {"cgroup_root": root, "proc_cgroup": tmp_path / "cgroup"}


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)


def test_v2_quota(tmp_path: Path) -> None:
    paths = machine(tmp_path, "0::/app\n", {"app/cpu.max": "300000 100000\n"})
    assert cpu_quota(**paths) == 3.0
    assert available_cpus(**paths) == 3


def test_v2_takes_the_tightest_group_above(tmp_path: Path) -> None:
    files = {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n", "cpu.max": "500000 100000\n"}
    assert available_cpus(**machine(tmp_path, "0::/a/b\n", files)) == 2


def test_v2_inside_a_container_reads_the_mount(tmp_path: Path) -> None:
    paths = machine(tmp_path, "0::/docker/abc\n", {"cpu.max": "400000 100000\n"})
    assert available_cpus(**paths) == 4


def test_v2_without_a_quota(tmp_path: Path) -> None:
    paths = machine(tmp_path, "0::/\n", {"cpu.max": "max 100000\n"})
    assert cpu_quota(**paths) is None
    assert available_cpus(**paths) == 8


@pytest.mark.parametrize(("controllers", "folder"), [("cpu", "cpu"), ("cpu,cpuacct", "cpu,cpuacct")])
def test_v1_quota(tmp_path: Path, controllers: str, folder: str) -> None:
    files = {f"{folder}/job/cpu.cfs_quota_us": "250000\n", f"{folder}/job/cpu.cfs_period_us": "50000\n"}
    assert available_cpus(**machine(tmp_path, f"3:cpuset:/x\n2:{controllers}:/job\n", files)) == 5


def test_v1_without_a_quota(tmp_path: Path) -> None:
    files = {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}
    assert available_cpus(**machine(tmp_path, "2:cpu:/\n", files)) == 8


def test_v1_ignores_groups_of_other_controllers(tmp_path: Path) -> None:
    files = {"cpu/small/cpu.cfs_quota_us": "100000\n", "cpu/small/cpu.cfs_period_us": "100000\n"}
    assert available_cpus(**machine(tmp_path, "4:memory:/small\n2:cpu:/\n", files)) == 8


def test_half_a_cpu_is_one_thread_and_parts_are_rounded_down(tmp_path: Path) -> None:
    paths = machine(tmp_path, "0::/\n", {"cpu.max": "50000 100000\n"})
    assert available_cpus(**paths) == 1
    (paths["cgroup_root"] / "cpu.max").write_text("270000 100000\n", encoding="ascii")
    assert available_cpus(**paths) == 2


def test_a_quota_above_the_cpu_set_changes_nothing(tmp_path: Path) -> None:
    assert available_cpus(**machine(tmp_path, "0::/\n", {"cpu.max": "6400000 100000\n"})) == 8


@pytest.mark.parametrize("text", ["", "nonsense", "1 2 3", "100000 0", "-5 100000", "0 100000", "\xe9"])
def test_an_odd_file_is_no_quota(tmp_path: Path, text: str) -> None:
    paths = machine(tmp_path, "0::/\nodd line\n", {})
    (paths["cgroup_root"] / "cpu.max").write_text(text, encoding="utf-8")
    assert available_cpus(**paths) == 8


def test_no_cgroup_at_all(tmp_path: Path) -> None:
    assert available_cpus(cgroup_root=tmp_path / "no", proc_cgroup=tmp_path / "none") == 8


def test_a_group_name_never_leaves_the_mount(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n", encoding="ascii")
    assert available_cpus(**machine(tmp_path, "0::/../..\n", {})) == 8


def test_without_sched_getaffinity_the_core_count_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert available_cpus(cgroup_root=tmp_path, proc_cgroup=tmp_path / "none") == 6
