"""What really works on this machine: providers proven by running a graph, versions, processors, memory.

Runs on the device side: needs neither torch nor onnx.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_convert.runtime.device import CPU_PROVIDER
from edge_convert.runtime.errors import NOT_FOR_DEVICES
from edge_convert.runtime.one_node import FLOAT, one_node_graph
from edge_convert.validate import figures

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

_PACKAGES = (
    "numpy", "tokenizers", "jinja2", "pillow", "pyyaml", "click", "rich",
    "torch", "transformers", "optimum", "onnx", "onnxscript", "onnxruntime-genai", "gguf",
)  # fmt: skip
_CPU_WORDS = {
    "cores": "CPU cores",
    "may_use": "may use",
    "container_limit": "container limit",
    "threads": "threads by default",
    "machine": "architecture",
}
_INT8_WORDS = {
    False: "exact",
    True: "the fast kernels saturate (no VNNI); slower exact ones are used, or convert with --target cpu-avx2",
}
_RUNTIMES = ("onnxruntime", "ort-nightly")
_NOT_RUNTIMES = ("onnxruntime-genai", "onnxruntime-extensions", "onnxruntime-tools")


def add_graph() -> bytes:
    """An ONNX model `y = x + x`, x and y float32 (2,)."""
    return one_node_graph("Add", ("x", "x"), {"x": (FLOAT, (2,))}, (FLOAT, (2,)))


@dataclass(frozen=True, slots=True)
class ProviderCheck:
    """Whether one execution provider ran a graph here, and what was seen."""

    name: str
    works: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Findings:
    """All that `doctor` found; memory in MB (2**20 bytes). `int8_saturates` is None if no CPU provider works."""

    edge_convert: str
    python: str
    platform: str
    packages: dict[str, str]
    onnxruntime: str | None
    onnxruntime_distributions: tuple[str, ...]
    cpus: dict[str, Any]
    memory_mb: dict[str, int]
    jetson: str | None
    providers: tuple[ProviderCheck, ...]
    int8_saturates: bool | None
    targets: dict[str, bool]
    needs: dict[str, str]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """A plain dict for JSON."""
        return dataclasses.asdict(self)


def examine() -> Findings:
    """Look at this machine; runs one tiny graph per compiled-in execution provider."""
    import edge_convert

    runtimes = runtime_distributions()
    version, checks = _providers()
    needs = _needs(checks)
    problems = []
    if version is None:
        problems.append(
            "onnxruntime cannot be imported. Install edge-convert with its extra [cpu] or [gpu], never both."
        )
    elif not any(check.works for check in checks):
        problems.append("No execution provider could run a graph. Reinstall onnxruntime.")
    if len(runtimes) > 1:
        problems.append(
            f"{' and '.join(runtimes)} are installed together and overwrite each other's files. "
            "Uninstall all of them, then install exactly one."
        )
    if sys.maxsize < 2**32:
        problems.append("This Python is 32-bit; onnxruntime needs a 64-bit one.")
    return Findings(
        edge_convert=edge_convert.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: found for name in _PACKAGES if (found := _version(name))},
        onnxruntime=version,
        onnxruntime_distributions=runtimes,
        cpus=_cpus(),
        memory_mb=_memory(),
        jetson=_first_line(Path("/etc/nv_tegra_release")),
        providers=checks,
        int8_saturates=_int8_saturates(checks),
        targets={name: not reason for name, reason in needs.items()},
        needs={name: reason for name, reason in needs.items() if reason},
        problems=tuple(problems),
    )


def runtime_distributions() -> tuple[str, ...]:
    """Installed distributions that bring the import package `onnxruntime`, as `name version`."""
    found = set()
    for item in metadata.distributions():
        name = str(item.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith(_RUNTIMES) and not name.startswith(_NOT_RUNTIMES):
            found.add(f"{name} {item.version}")
    return tuple(sorted(found))


def check_provider(name: str) -> ProviderCheck:
    """Run one node on the provider `name` with fallback to the CPU switched off."""
    import numpy as np
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if name != CPU_PROVIDER:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        session = ort.InferenceSession(add_graph(), options, providers=[name])
        if name not in session.get_providers():
            return ProviderCheck(name, False, f"fell back to {', '.join(session.get_providers())}")
        result = session.run(None, {"x": np.array([1.5, -2.0], np.float32)})[0]
    except Exception as error:  # noqa: BLE001 - a provider may fail in any way; that is the finding
        lines = str(error).strip().splitlines() or [type(error).__name__]
        idle = "fallback to CPU EP has been explicitly disabled" in str(error)
        return ProviderCheck(name, False, "runs no node; all would fall back to the CPU" if idle else lines[0][:200])
    if not np.array_equal(result, np.array([3.0, -4.0], np.float32)):
        return ProviderCheck(name, False, f"computed {result.tolist()} instead of [3.0, -4.0]")
    return ProviderCheck(name, True, "ran a graph")


def tables(findings: Findings) -> list[Group]:
    """What a terminal shows of the findings."""
    from rich.text import Text

    cpus = {_CPU_WORDS[name]: "none" if value is None else str(value) for name, value in findings.cpus.items()}
    rows = {"edge-convert": findings.edge_convert, "Python": findings.python, "system": findings.platform}
    rows |= {"Jetson": findings.jetson} if findings.jetson else {}
    rows |= cpus | {f"memory, {name}": figures.size(value * 2**20) for name, value in findings.memory_mb.items()}
    rows["ONNX Runtime"] = findings.onnxruntime or "not installed"
    rows["installed as"] = ", ".join(findings.onnxruntime_distributions) or "nothing"
    rows["packages"] = ", ".join(f"{name} {version}" for name, version in findings.packages.items()) or "none"
    providers = figures.table("provider", "works", "what was seen")
    for check in findings.providers:
        providers.add_row(check.name, _yes(check.works), Text(check.detail))
    if findings.int8_saturates is not None:
        rows["int8 products"] = _INT8_WORDS[findings.int8_saturates]
    targets = figures.table("target", "can run here", "reason")
    for name, usable in findings.targets.items():
        targets.add_row(Text(name), _yes(usable), Text(findings.needs.get(name, "")))
    return [
        figures.titled("Machine", figures.pairs(rows)),
        figures.titled("Execution providers", providers),
        figures.titled("Targets", targets),
    ]


def _yes(value: bool) -> Text:
    from rich.text import Text

    return Text("yes", style="green") if value else Text("no", style="yellow")


def _providers() -> tuple[str | None, tuple[ProviderCheck, ...]]:
    try:
        import onnxruntime as ort
    except ImportError:
        return None, ()
    names = [name for name in ort.get_available_providers() if name not in NOT_FOR_DEVICES]
    return str(ort.__version__), tuple(check_provider(name) for name in names)


def _int8_saturates(checks: tuple[ProviderCheck, ...]) -> bool | None:
    """Whether this CPU's int8 kernels are wrong; None where the CPU provider does not work."""
    from edge_convert.runtime.int8 import saturates

    return saturates() if any(check.works and check.name == CPU_PROVIDER for check in checks) else None


def _needs(checks: tuple[ProviderCheck, ...]) -> dict[str, str]:
    """Every target, and why it cannot run here: empty if it can."""
    from edge_convert.runtime.device import load_profiles

    found = {check.name: check for check in checks}
    needs = {}
    for name, profile in load_profiles().items():
        wanted = profile.providers[0].name
        if wanted not in found:
            needs[name] = f"needs {wanted}"
        else:
            needs[name] = "" if found[wanted].works else f"needs {wanted}, which does not work here"
    return needs


def _cpus() -> dict[str, Any]:
    from edge_convert.runtime.threads import available_cpus, cpu_quota

    return {
        "cores": os.cpu_count(),
        "may_use": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "container_limit": cpu_quota(),
        "threads": available_cpus(),
        "machine": platform.machine(),
    }


def _memory() -> dict[str, int]:
    found: dict[str, int] = {}
    names = {"MemTotal:": "total", "MemAvailable:": "free"}
    path = Path("/proc/meminfo")
    for line in path.read_text(encoding="ascii").splitlines() if path.is_file() else ():
        parts = line.split()
        if parts and parts[0] in names:
            found[names[parts[0]]] = int(parts[1]) // 1024
    limit = _first_line(Path("/sys/fs/cgroup/memory.max"))
    if limit and limit.isdigit():
        found["container limit"] = int(limit) // 2**20
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _first_line(path: Path) -> str | None:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return lines[0].strip() if lines else None
