"""How many CPUs this process may really use: its CPU set and its cgroup's quota, not the machine's cores."""

from __future__ import annotations

import operator
import os
from pathlib import Path

from edge_convert.runtime.errors import DeviceError, shown

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC_CGROUP = Path("/proc/self/cgroup")


def available_cpus(*, cgroup_root: Path = CGROUP_ROOT, proc_cgroup: Path = PROC_CGROUP) -> int:
    """CPUs for a thread pool, at least 1.

    The smaller of the CPU set (`sched_getaffinity`) and the cgroup quota (v1 or v2) rounded down: one
    thread more than the quota pays for would be stopped in the middle of every matrix product.
    """
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    else:
        cpus = os.cpu_count() or 1
    quota = cpu_quota(cgroup_root=cgroup_root, proc_cgroup=proc_cgroup)
    return max(1, cpus if quota is None else min(cpus, int(quota)))


def max_threads() -> int:
    """Most threads that a session takes: far beyond use, and far below what the system no longer starts."""
    return max(64, 4 * (os.cpu_count() or 1))


def check_threads(threads: int) -> int:
    """`threads` as an int if a session can have that many; raises DeviceError otherwise."""
    most = max_threads()
    try:
        number = 0 if isinstance(threads, bool) else operator.index(threads)
    except TypeError:
        number = 0
    if not 1 <= number <= most:
        raise DeviceError(f"threads is {shown(threads)}. Use 1 to {most}, or leave it out.")
    return number


def cpu_quota(*, cgroup_root: Path = CGROUP_ROOT, proc_cgroup: Path = PROC_CGROUP) -> float | None:
    """The tightest cgroup quota on this process's group or any group above it, in CPUs; None without one."""
    quotas: list[float] = []
    for controllers, group in _groups(proc_cgroup):
        if not controllers:
            mounts = [cgroup_root, cgroup_root / "unified"]
        elif "cpu" in controllers.split(","):
            mounts = [cgroup_root / "cpu", cgroup_root / controllers, cgroup_root / "cpu,cpuacct"]
        else:
            continue
        for mount in mounts:
            for folder in _upwards(mount, group):
                quota = _v2_quota(folder) if not controllers else _v1_quota(folder)
                if quota is not None:
                    quotas.append(quota)
    return min(quotas, default=None)


def _groups(proc_cgroup: Path) -> list[tuple[str, str]]:
    """(controllers, group) of every line of /proc/self/cgroup; v2 has no controllers."""
    lines = (_text(proc_cgroup) or "").splitlines()
    parts = [line.split(":", 2) for line in lines]
    return [(part[1], part[2]) for part in parts if len(part) == 3]


def _upwards(mount: Path, group: str) -> list[Path]:
    """The group's folder and those above it, up to the mount (which inside a container is the group itself)."""
    names = [name for name in group.split("/") if name not in ("", ".", "..")]
    return [mount.joinpath(*names[:length]) for length in range(len(names), -1, -1)]


def _v2_quota(folder: Path) -> float | None:
    fields = (_text(folder / "cpu.max") or "").split()
    return _ratio(fields[0], fields[1]) if len(fields) == 2 else None


def _v1_quota(folder: Path) -> float | None:
    quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    return None if quota is None or period is None else _ratio(quota.strip(), period.strip())


def _ratio(quota: str, period: str) -> float | None:
    """quota / period; None for "max", -1 or anything that is not two positive integers."""
    if not (quota.isdecimal() and period.isdecimal()) or int(quota) == 0 or int(period) == 0:
        return None
    return int(quota) / int(period)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
