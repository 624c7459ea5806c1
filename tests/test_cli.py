"""The command line: exit codes, one-line errors, JSON on stdout, progress on stderr."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from edge_convert import __version__, cli
from edge_convert.cli_paths import plain_name
from edge_convert.runtime.bundle import Bundle, collect_files, write_manifest
from edge_convert.runtime.errors import ExportError
from edge_convert.runtime.manifest import FileSpec, GraphSpec, Manifest, SourceSpec, TensorSpec
from edge_convert.validate import doctor
from edge_convert.validate.doctor import add_graph, check_provider, runtime_distributions

COMMANDS = ("model", "validate", "bench", "run", "inspect", "selftest", "targets", "doctor")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments))


@pytest.fixture
def toy_bundle(tmp_path: Path) -> Path:
    """A bundle whose one graph is doctor's `y = x + x`; its task is feature-extraction in name only."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "encoder.onnx").write_bytes(add_graph())
    tensor = {"dtype": "float32", "shape": (2,)}
    graph = GraphSpec(
        file="encoder.onnx",
        inputs=(TensorSpec("x", **tensor),),  # type: ignore[arg-type]
        outputs=(TensorSpec("y", **tensor),),  # type: ignore[arg-type]
        ir_version=8,
        opsets={"ai.onnx": 13},
        node_counts={"Add": 1},
        initializer_bytes={"float32": 2048},
    )
    manifest = Manifest(
        task="feature-extraction",
        target="cpu",
        precision="fp32",
        source=SourceSpec("onnx", "toy [v1]", "0" * 64),
        graphs={"encoder": graph},
        processing={"dimension": 2},
        files=collect_files(folder),
        tools={"onnx": "1.0"},
        created="2026-01-01T00:00:00+00:00",
    )
    write_manifest(folder, manifest)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_json_and_verbose(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    assert "--verbose" in result.stdout


def test_main_help_lists_every_command_and_version_is_the_packages() -> None:
    assert all(command in invoke("--help").stdout for command in COMMANDS)
    assert __version__ in invoke("--version").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("model",),
        ("model", "somewhere"),
        ("model", "somewhere", "--target", "cpu", "--context", "0"),
        ("no-such-command",),
        ("inspect", "--no-such-option", "x"),
        ("run", "somewhere"),
        ("bench", "no-such-folder"),
        ("inspect", "no-such-folder"),
        ("selftest", "no-such-folder"),
        ("validate", "no-such-folder"),
        ("run", "no-such-folder", "hello"),
        ("model", "x", "--target", "cpu", "--calibration", "no-such-folder"),
        ("model", "x", "--target", "cpu", "--strict", "--no-validate"),
    ],
)
def test_wrong_usage_exits_2_and_prints_nothing_on_stdout(arguments: tuple[str, ...]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "error" in result.stderr.lower()


@pytest.mark.parametrize(
    ("option", "known"),
    [(("--target", "toaster"), "cpu"), (("--task", "poetry"), "text-generation"), (("--precision", "fp99"), "int8")],
)
def test_unknown_names_exit_2_with_one_line_that_lists_the_known(option: tuple[str, str], known: str) -> None:
    target = () if option[0] == "--target" else ("--target", "cpu")
    result = invoke("model", "x", *target, *option)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert option[1] in result.stderr
    assert known in result.stderr


@pytest.mark.parametrize(("content", "code"), [(None, 2), (b"", 1), (b"not GGUF", 1)])
def test_a_source_that_is_missing_or_broken_is_one_line(tmp_path: Path, content: bytes | None, code: int) -> None:
    pytest.importorskip("torch", reason="pip install 'edge-convert[convert]'")
    source = tmp_path / "model.gguf"
    if content is not None:
        source.write_bytes(content)
    result = invoke("model", str(source), "--target", "cpu", "-o", str(tmp_path / "out"))
    assert result.exit_code == code, result.output
    assert len([line for line in result.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == ([] if content is None else [source])


def test_targets_json_has_each_target_with_its_aliases() -> None:
    result = invoke("targets", "--json")
    assert result.exit_code == 0
    value = json.loads(result.stdout)
    assert value["cpu"]["providers"][0]["name"] == "CPUExecutionProvider"
    assert "jetson" in value["jetson-orin-nano-8gb-jp6"]["aliases"]
    assert "jetson-orin-nano-8gb-jp6" in invoke("targets").stdout


def test_doctor_json_proves_the_cpu_provider() -> None:
    pytest.importorskip("onnxruntime", reason="pip install 'edge-convert[cpu]'")
    result = invoke("doctor", "--json")
    value = json.loads(result.stdout)
    assert result.exit_code == (1 if value["problems"] else 0)
    cpu = next(item for item in value["providers"] if item["name"] == "CPUExecutionProvider")
    assert cpu["works"] is True
    assert value["targets"]["cpu"] is True
    assert value["cpus"]["threads"] >= 1
    assert all(value["targets"][name] is (name not in value["needs"]) for name in value["targets"])
    assert "AzureExecutionProvider" not in result.stdout


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_doctor_does_not_believe_a_provider_that_falls_back() -> None:
    pytest.importorskip("onnxruntime", reason="pip install 'edge-convert[cpu]'")
    found = check_provider("NoSuchExecutionProvider")
    assert not found.works
    assert found.detail


def test_doctor_reports_two_distributions_of_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self, name: str) -> None:
            self.metadata, self.version = {"Name": name}, "1.0"

    names = ("onnxruntime", "onnxruntime_gpu", "onnxruntime-genai", "numpy")
    monkeypatch.setattr("edge_convert.validate.doctor.metadata.distributions", lambda: [Fake(name) for name in names])
    assert runtime_distributions() == ("onnxruntime 1.0", "onnxruntime-gpu 1.0")
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "overwrite each other" in result.stderr


def test_doctor_speaks_plainly_and_says_what_a_target_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    check = doctor.ProviderCheck("CPUExecutionProvider", True, "ran a graph")
    monkeypatch.setattr(doctor, "_providers", lambda: ("1.23.0", (check,)))
    text = invoke("doctor").stdout
    for words in ("CPU cores", "may use", "container limit", "needs CUDAExecutionProvider"):
        assert words in text
    assert "cgroup" not in text


def test_help_has_whole_summaries_choices_defaults_and_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "..." not in invoke("--help").stdout.partition("Commands:")[2]
    assert "  3    a gate failed" in invoke("--help").stdout
    text = " ".join(invoke("model", "--help").stdout.split())
    assert "--precision auto|fp32|fp16|int8|int4" in text
    assert "--task text-generation|feature-extraction|image-classification" in text
    assert "auto: the cheapest that passes the target's gates. [default: auto]" in text


@pytest.mark.parametrize("columns", ["20", "80", "120", ""])
def test_tables_fit_and_cut_nothing(toy_bundle: Path, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    targets = invoke("targets").stdout
    assert all(name in targets for name in ("jetson-orin-nano-8gb-jp6", "jetson-orin-nano,", "CUDAExecutionProvider"))
    files = invoke("inspect", str(toy_bundle)).stdout
    assert hashlib.sha256(add_graph()).hexdigest() in files
    assert "0" * 64 in files  # of the source
    for line in (*targets.splitlines(), *files.splitlines()):
        assert line == line.rstrip()
        assert str(toy_bundle) in line or len(line) <= max(80, int(columns or 120))


def test_inspect_shows_graphs_weights_files_and_provenance(toy_bundle: Path) -> None:
    value = json.loads(invoke("inspect", str(toy_bundle), "--json").stdout)
    assert value["graphs"]["encoder"]["node_counts"] == {"Add": 1}
    assert value["graphs"]["encoder"]["initializer_bytes"] == {"float32": 2048}
    assert value["files"]["encoder.onnx"]["size"] == len(add_graph())
    text = invoke("inspect", str(toy_bundle)).stdout
    for expected in ("encoder.onnx", "2 KiB", "toy [v1]", "x: float32 (2)"):
        assert expected in text


def test_inspect_names_the_nodes_that_stay_in_fp32(toy_bundle: Path) -> None:
    manifest = Bundle.open(toy_bundle).manifest
    graph = dataclasses.replace(
        manifest.graphs["encoder"], node_counts={"Conv": 50}, products={"int8": 48, "fp32": 2}, fp32_nodes=("a", "b")
    )
    write_manifest(toy_bundle, dataclasses.replace(manifest, graphs={"encoder": graph}))
    value = json.loads(invoke("inspect", str(toy_bundle), "--json").stdout)["graphs"]["encoder"]
    assert (value["products"], value["fp32_nodes"]) == ({"int8": 48, "fp32": 2}, ["a", "b"])
    text = " ".join(invoke("inspect", str(toy_bundle)).stdout.split())
    assert "products 48 in int8, 2 in fp32" in text
    assert "computed in fp32 in encoder 2 of 50 nodes (products: 48 in int8, 2 in fp32): a, b" in text


def test_inspect_refuses_changed_bytes(toy_bundle: Path) -> None:
    (toy_bundle / "encoder.onnx").write_bytes(b"changed")
    result = invoke("inspect", str(toy_bundle))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")


def test_no_cache_is_refused_where_there_is_no_cache(toy_bundle: Path) -> None:
    result = invoke("bench", str(toy_bundle), "--no-cache")
    assert result.exit_code == 2
    assert "feature-extraction" in result.stderr


def test_bench_refuses_options_of_another_task(toy_bundle: Path) -> None:
    result = invoke("bench", str(toy_bundle), "--tokens", "3")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --tokens is for text-generation")
    assert result.stderr.count("\n") == 1


def raiser(error: BaseException) -> Any:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    return fail


def test_interrupt_exits_130_with_one_line(toy_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bundle, "open", raiser(KeyboardInterrupt()))
    result = invoke("inspect", str(toy_bundle))
    assert result.exit_code == 130
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_real_signal_exits_130_with_one_line(number: signal.Signals) -> None:
    code = (
        # A parent may have started the tests with the signal ignored, as shells do for what runs in the background.
        "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nfrom edge_convert import cli\nfrom edge_convert.validate import doctor\n"
        "def slow():\n    print('\\nready', file=__import__('sys').__stderr__, flush=True)\n    time.sleep(30)\n"
        "doctor.examine = slow\ncli.main(['doctor'])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stderr is not None
    assert "Running a graph" in process.stderr.readline()
    time.sleep(0.3)
    process.send_signal(number)
    _, rest = process.communicate(timeout=20)
    assert process.returncode == 130
    assert rest == "error: interrupted; nothing half-written was kept.\n"


@pytest.mark.parametrize("place", ["before", "after"])
def test_verbose_shows_the_traceback_of_an_error(toy_bundle: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(Bundle, "open", raiser(ExportError("The graph broke.")))
    quiet = invoke("inspect", str(toy_bundle))
    arguments = ("--verbose", "inspect", str(toy_bundle)) if place == "before" else (
        "inspect", str(toy_bundle), "--verbose")  # fmt: skip
    loud = invoke(*arguments)
    assert quiet.exit_code == loud.exit_code == 1
    assert quiet.stderr == "error: The graph broke.\n"
    assert "Traceback" in loud.stderr
    assert loud.stderr.endswith("error: The graph broke.\n")


def test_an_unexpected_exception_is_one_line(toy_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bundle, "open", raiser(ZeroDivisionError("a\nb")))
    result = invoke("inspect", str(toy_bundle))
    assert result.exit_code == 1
    assert result.stderr == "error: unexpected ZeroDivisionError: a b (--verbose shows where)\n"


def test_a_missing_package_names_the_extra(toy_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bundle, "open", raiser(ModuleNotFoundError("No module", name="torch.nn")))
    result = invoke("inspect", str(toy_bundle))
    assert result.exit_code == 1
    assert "pip install '.[convert]'" in result.stderr


def test_a_reader_that_closes_early_is_not_an_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "edge_convert.cli", "targets", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=20) == 141


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys\nfrom edge_convert import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'onnxruntime', 'transformers', 'onnx', 'numpy', 'rich'} & set(sys.modules)\n"
        "sys.exit(str(sorted(heavy)) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/SmolLM2-135M", "SmolLM2-135M"),
        ("./a/b/model.q8_0.gguf", "model.q8_0"),
        ("checkpoints/mine/", "mine"),
        ("package.module:build", "module"),
        ("examples/lite0.py:build", "lite0"),
        ("..", "model"),
    ],
)
def test_default_output_name_comes_from_the_source(source: str, expected: str) -> None:
    assert plain_name(source) == expected


def test_file_spec_of_the_toy_is_checked(toy_bundle: Path) -> None:
    assert isinstance(Bundle.open(toy_bundle).manifest.files["encoder.onnx"], FileSpec)
