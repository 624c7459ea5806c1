"""A real Ctrl-C in the middle of `--precision auto`: nothing half-written, and the next run goes on where it stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import yaml
from decoders import SIZES, save_model
from transformers import LlamaConfig

from edge_convert.runtime.bundle import Bundle
from edge_convert.runtime.device import DEVICES_FILE

# A parent may have started the tests with the signal ignored, as shells do for what runs in the background.
PROGRAM = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nfrom edge_convert import cli\ncli.main()\n"


def start(tmp_path: Path) -> subprocess.Popen[str]:
    """The conversion of `tmp_path`/model for a target whose bounds nothing meets, so that all candidates are tried."""
    command = [sys.executable, "-c", PROGRAM, "model", str(tmp_path / "model"), "--target", "cpu", "--json"]
    command += ["-o", str(tmp_path / "place" / "out"), "--targets-file", str(tmp_path / "devices.yaml")]
    places = {"EDGE_CONVERT_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp")}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **places}
    )


def measured(journal: Path) -> list[str]:
    return [json.loads(line)[0] for line in journal.read_text().splitlines()]


def test_an_interrupted_search_leaves_nothing_and_goes_on(tmp_path: Path) -> None:
    save_model(tmp_path / "model", LlamaConfig(**SIZES, tie_word_embeddings=True))
    targets = yaml.safe_load(DEVICES_FILE.read_text("utf-8"))
    targets["gates"]["text-generation"]["auto"] = {"kl_mean_max": 1e-30}
    (tmp_path / "devices.yaml").write_text(yaml.safe_dump(targets), "utf-8")
    for name in ("place", "tmp"):
        (tmp_path / name).mkdir()

    first = start(tmp_path)
    assert first.stderr is not None
    for line in first.stderr:
        if "easured int4" in line:  # the first of many
            break
    first.send_signal(signal.SIGINT)
    stdout, rest = first.communicate(timeout=60)
    assert first.returncode == 130, rest
    assert rest.splitlines()[-1] == "error: interrupted; nothing half-written was kept."
    assert stdout == ""
    assert list((tmp_path / "place").iterdir()) == []
    (journal,) = (tmp_path / "cache" / "searches").iterdir()
    before = measured(journal)
    assert "trial int4" in before

    second = start(tmp_path)
    stdout, progress = second.communicate(timeout=300)
    assert second.returncode == 3, progress  # nothing is within the bounds
    after = measured(journal)
    assert after[: len(before)] == before
    assert len(set(after)) == len(after) > len(before)
    tried = set(re.findall(r"[Tt]rying (.+)", progress))
    assert tried
    assert not {f"trial {name}" for name in tried} & set(before)
    assert "taken from the cache" in progress

    bundle = Bundle.open(tmp_path / "place" / "out")
    record = bundle.manifest.quantisation
    assert [f"trial {trial['name']}" for trial in record["tried"]] == [name for name in after if "trial" in name]
    assert all(trial["refused"] for trial in record["tried"])
    assert record["chosen"] == "fp32"  # misses the bounds least, is kept and named
    gates = json.loads(stdout)["report"]["gates"]
    assert "failed" in [gate["outcome"] for gate in gates if gate["metric"] == "kl_mean"]
