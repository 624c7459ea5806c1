"""Peak memory of converting a large language model, in a child process, under a memory limit if asked.

    python benchmarks/large_model.py [--limit-gb 8] [--precision int4] [--work DIR] [--json]

Writes a random bf16 checkpoint in the shape of Qwen2.5-1.5B (1.54 G parameters in one file of 3.1 GB) and runs
`edge-convert model` on it, validation included. Random weights mean nothing, so gates of accuracy may fail: exit code
3 is as good as 0 here. With `--limit-gb` the child runs in a control group with that limit, where the kernel ends it if
it needs more; where this process may not make one, that is said and the peak is measured only. DIR needs 25 GB free;
everything is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table

SHAPE: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32_768,
    "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CGROUPS = Path("/sys/fs/cgroup")
INTERVAL_S = 0.1
LARGE_FILE = 2**31
EXPECTED = (0, 3)


@dataclass(slots=True)
class Peaks:
    """The largest that was seen of the child: bytes of its memory, and of each file by name."""

    anonymous: int = 0
    resident: int = 0
    files: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """A control group for memory of version 1 or 2, by its folder."""

    folder: Path
    version: int

    def figures(self) -> dict[str, int]:
        """What the kernel counted: the peak with the page cache, and how often it had to end a process."""
        events = "memory.oom_control" if self.version == 1 else "memory.events"
        peak = self.folder / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")
        lines = (self.folder / events).read_text().splitlines()
        killed = next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
        return {"peak_with_page_cache_bytes": int(peak.read_text()) if peak.is_file() else 0, "ended_by_limit": killed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="int4")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="fewer for a quick look")
    parser.add_argument("--limit-gb", type=float, help="end the child if it needs more than this many GiB")
    parser.add_argument("--work", type=Path, help="where the files are for as long as it runs")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edge-convert-large-", dir=options.work) as folder:
        row = measure(Path(folder), options.precision, options.layers, options.limit_gb)
    if options.json:
        print(json.dumps(row, indent=2))
    else:
        show(row)
    sys.exit(0 if row["exit_code"] in EXPECTED else 1)


def measure(work: Path, precision: str, layers: int, limit_gb: float | None) -> dict[str, Any]:
    """Write the checkpoint, convert it in a child and say what that took."""
    checkpoint, bundle, answer, errors = (work / name for name in ("qwen2", "bundle", "stdout", "stderr"))
    parameters = write_checkpoint(checkpoint, layers)
    command = [sys.executable, "-m", "edge_convert", "model", str(checkpoint), "--target", "cpu", "--json"]
    command += ["--precision", precision, "-o", str(bundle)]
    (work / "tmp").mkdir()
    places = {"TMPDIR": str(work / "tmp"), "EDGE_CONVERT_CACHE": str(work / "cache")}
    with limited(limit_gb) as group, answer.open("wb") as stdout, errors.open("wb") as stderr:
        if group is not None:  # the shell enters the group and becomes the program
            command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group.folder / "cgroup.procs"), *command]
        start = time.perf_counter()
        child = subprocess.Popen(command, stdout=stdout, stderr=stderr, env={**os.environ, **places})
        peaks = watch(child, work)
        wall = time.perf_counter() - start
        kernel = {} if group is None else group.figures()
    if child.returncode not in EXPECTED:
        print(errors.read_text(errors="replace")[-4000:], file=sys.stderr)
    return {
        "model": f"Qwen2.5-1.5B in shape ({layers} layers), random weights",
        "parameters": parameters,
        "checkpoint_bytes": (checkpoint / "model.safetensors").stat().st_size,
        "precision": precision,
        "exit_code": child.returncode,
        "wall_s": round(wall),
        "limit_bytes": None if group is None else round(limit_gb * 2**30) if limit_gb else None,
        "peak_anonymous_bytes": peaks.anonymous,
        "peak_resident_bytes": peaks.resident,
        **kernel,
        "bundle_bytes": sum(file.stat().st_size for file in bundle.rglob("*")) if bundle.is_dir() else None,
        "files_past_2_gib": {name: size for name, size in sorted(peaks.files.items()) if size > LARGE_FILE},
        "gates": gates_of(answer),
    }


def write_checkpoint(folder: Path, layers: int) -> int:
    """A random bf16 checkpoint and its tokenizer in `folder`; returns the parameters. Memory: its largest tensor."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    config = Qwen2Config(**{**SHAPE, "num_hidden_layers": layers}, dtype="bfloat16", architectures=["Qwen2ForCausalLM"])
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}  # a tied head is not named
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    torch.manual_seed(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            mean = 1.0 if "norm" in name else 0.0
            weight = torch.empty(shape, dtype=torch.bfloat16).normal_(mean, 0.02)
            file.write(memoryview(weight.view(torch.int16).numpy()).cast("B"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=words, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    return sum(map(math.prod, shapes.values()))


def watch(child: subprocess.Popen[bytes], work: Path) -> Peaks:
    """The peaks of `child` and of the files under `work`, looked at until it ends."""
    peaks = Peaks()
    ticks = 0
    while child.poll() is None:
        status = status_of(child.pid)
        peaks.anonymous = max(peaks.anonymous, status.get("RssAnon", 0))
        peaks.resident = max(peaks.resident, status.get("VmHWM", 0))
        if ticks % 10 == 0:
            for name, size in sizes_in(work):
                peaks.files[name] = max(peaks.files.get(name, 0), size)
        ticks += 1
        time.sleep(INTERVAL_S)
    return peaks


def status_of(pid: int) -> dict[str, int]:
    """The sizes in a process's status, in bytes; empty once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = [line.split() for line in lines if line.endswith(" kB")]
    return {name.rstrip(":"): int(value) * 1024 for name, value, _ in fields}


def sizes_in(folder: Path) -> Iterator[tuple[str, int]]:
    """Name and size of every file below `folder`; files that go away meanwhile are left out."""
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                yield name, os.stat(os.path.join(place, name)).st_size
            except OSError:
                continue


@contextmanager
def limited(limit_gb: float | None) -> Iterator[Group | None]:
    """A control group with that limit for the child; None if none was asked for or none can be made here."""
    group = None
    if limit_gb is not None:
        try:
            group = new_group(round(limit_gb * 2**30))
        except OSError as error:
            print(f"No memory limit can be set here ({error}); the peak is measured only.", file=sys.stderr)
    try:
        yield group
    finally:
        if group is not None:
            group.folder.rmdir()


def new_group(limit: int) -> Group:
    """A new group below this process's own, limited to `limit` bytes; OSError if that is not allowed here."""
    entries = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    places = {names: path.lstrip("/") for _, names, path in entries}
    version = 1 if "memory" in places else 2
    root = CGROUPS / "memory" if version == 1 else CGROUPS
    folder = root / places["memory" if version == 1 else ""] / f"edge-convert-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(str(limit))
    except OSError:
        folder.rmdir()
        raise
    return Group(folder, version)


def gates_of(answer: Path) -> dict[str, Any]:
    """Outcome and value of every gate in the program's JSON; empty if there is none."""
    try:
        gates = json.loads(answer.read_text())["report"]["gates"]
    except (ValueError, KeyError, TypeError):
        return {}
    return {f"{gate['name']}, {gate['metric']}": f"{gate['outcome']} ({gate['value']})" for gate in gates}


def show(row: dict[str, Any]) -> None:
    table = Table(title=row["model"], box=rich.box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in row.items():
        if name.endswith("_bytes") and value is not None:
            table.add_row(name.removesuffix("_bytes").replace("_", " "), f"{value / 1e9:.2f} GB")
        elif isinstance(value, dict):
            table.add_row(name.replace("_", " "), "\n".join(f"{key}: {item}" for key, item in value.items()) or "none")
        elif name != "model":
            table.add_row(name.replace("_", " "), str(value))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
