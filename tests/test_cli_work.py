"""The commands that do work, with the work itself replaced: arguments passed on, exit codes, clean stdout."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from edge_convert import cli
from edge_convert.runtime.bundle import Bundle, collect_files, write_manifest
from edge_convert.runtime.errors import ExportError, ProviderUnavailableError
from edge_convert.runtime.manifest import Manifest, SourceSpec
from edge_convert.validate.gates import Gate
from edge_convert.validate.report import Report
from edge_convert.wrappers.text import TextResult

PASSED = Gate("numerics", "kl", 0.1, 0.5, "max", "passed")
FAILED = Gate("numerics", "kl", 0.9, 0.5, "max", "failed", "too far")
NOT_RUN = Gate("latency", "ms", None, 5.0, "max", "not_run", "no such provider here")


def invoke(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli.main, list(arguments), input=stdin)


def report(*gates: Gate) -> Report:
    return Report(task="text-generation", target="cpu", precision="int8", gates=gates)


def bundle(folder: Path, task: str = "text-generation", **processing: Any) -> Path:
    folder.mkdir()
    (folder / "labels.txt").write_text("cat\n")
    write_manifest(
        folder,
        Manifest(
            task=task,
            target="cpu",
            precision="int8",
            source=SourceSpec("onnx", "toy", "0" * 64),
            graphs={},
            processing=processing,
            files=collect_files(folder),
            tools={},
            created="2026-01-01T00:00:00+00:00",
            warnings=("int8 is slow here",),
        ),
    )
    return folder


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`convert` replaced: `seen` are its arguments, `report` what it returns, `error` what it raises."""
    from edge_convert.convert import pipeline

    state = SimpleNamespace(seen={}, report=report(PASSED), error=None)
    made = bundle(tmp_path / "made")

    def convert(source: str, **options: Any) -> pipeline.Result:
        state.seen = {"source": source, **options}
        print("chatter on stdout")
        os.write(2, b"chatter on fd 2\n")
        options["progress"]("exporting the graph")
        if state.error:
            raise state.error
        return pipeline.Result(Bundle.open(made), state.report)

    monkeypatch.setattr(pipeline, "convert", convert)
    return state


def test_model_passes_everything_on_and_keeps_stdout_clean(converted: SimpleNamespace, tmp_path: Path) -> None:
    result = invoke(
        "model", "m", "--target", "jetson", "--precision", "int4", "--context", "512", "--force",
        "-o", str(tmp_path / "o"), "--calibration", str(tmp_path), "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert value["report"]["gates"][0]["outcome"] == "passed"
    assert value["warnings"] == ["int8 is slow here"]
    assert "chatter" not in result.output
    assert "Exporting the graph" in result.stderr
    seen = converted.seen
    assert (seen["source"], seen["target"], seen["precision"]) == ("m", "jetson", "int4")
    assert (seen["context_tokens"], seen["force"], seen["validate"]) == (512, True, True)
    assert (seen["output"], seen["calibration"]) == (tmp_path / "o", tmp_path)


def test_model_ends_with_a_verdict_and_the_next_command(converted: SimpleNamespace, tmp_path: Path) -> None:
    place = str(tmp_path / "my bundle")
    lines = invoke("model", "m", "--target", "cpu", "-o", place).stdout.splitlines()
    assert lines[-3].startswith("passed: 1 gate passed, 0 failed, 0 not run · ")
    assert lines[-2] == f"Bundle: {place}"
    assert lines[-1] == f"Next: edge-convert run '{place}' \"What is gravity?\""


def test_a_bundle_for_a_provider_that_is_not_here_says_where_to_go_on(tmp_path: Path) -> None:
    from edge_convert.runtime.device import load_profile

    opened = Bundle.open(bundle(tmp_path / "b", "image-classification"), profile=load_profile("jetson"))
    on_cpu = dataclasses.replace(report(PASSED), environment={"providers": ["CPUExecutionProvider"]})
    assert cli._next_commands(opened, Path("b"), on_cpu) == [
        "Next: edge-convert run b photo.jpg --on-cpu",
        "On the device: edge-convert selftest b",
    ]
    there = dataclasses.replace(report(PASSED), environment={"providers": ["CUDAExecutionProvider"]})
    assert cli._next_commands(opened, Path("b"), there) == ["Next: edge-convert run b photo.jpg"]


def test_model_default_output_and_auto_precision(converted: SimpleNamespace) -> None:
    result = invoke("model", "org/m", "--target", "jetson", "--precision", "auto")
    assert result.exit_code == 0
    assert converted.seen["output"] == Path("m-jetson-orin-nano-8gb-jp6")
    assert converted.seen["precision"] == "auto"
    assert invoke("model", "org/m", "--target", "jetson", "--output", "b").exit_code == 0
    assert converted.seen["precision"] == "auto"


@pytest.mark.parametrize(
    ("gates", "strict", "code"),
    [((PASSED,), True, 0), ((PASSED, FAILED), False, 3), ((PASSED, NOT_RUN), False, 0), ((PASSED, NOT_RUN), True, 3)],
)
def test_exit_code_is_the_reports(converted: SimpleNamespace, gates: tuple[Gate, ...], strict: bool, code: int) -> None:
    converted.report = report(*gates)
    result = invoke("model", "m", "--target", "cpu", *(["--strict"] if strict else []))
    assert result.exit_code == code, result.output
    assert "numerics" in result.stdout


def test_a_failed_conversion_names_the_log_and_keeps_it(converted: SimpleNamespace) -> None:
    converted.error = ExportError("The exporter stopped.")
    result = invoke("model", "m", "--target", "cpu")
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert lines[-1] == "error: The exporter stopped."
    log = Path(lines[-2].removeprefix("log of the libraries: "))
    assert "chatter on stdout" in log.read_text()
    assert "chatter on fd 2" in log.read_text()
    log.unlink()


def test_model_without_validation_says_so(converted: SimpleNamespace) -> None:
    converted.report = None
    result = invoke("model", "m", "--target", "cpu", "--no-validate")
    assert result.exit_code == 0
    assert converted.seen["validate"] is False
    assert "not validated" in result.stdout


def test_validate_writes_the_report_into_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bundle(tmp_path / "b")
    seen: dict[str, Any] = {}

    def validate_bundle(opened: Bundle, reference: object, **options: Any) -> Report:
        seen.update(options, reference=reference)
        return report(PASSED, FAILED)

    monkeypatch.setattr("edge_convert.validate.suites.validate_bundle", validate_bundle)
    result = invoke("validate", str(folder), "--json", "--no-latency")
    assert result.exit_code == 3, result.output
    assert seen["reference"] is None
    assert seen["measure_latency"] is False
    stored = Bundle.open(folder).file("report.json").read_text()
    assert json.loads(stored) == json.loads(result.stdout)


def test_validate_keeps_a_report_that_ran_more_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bundle(tmp_path / "b")
    stronger = report(PASSED, dataclasses.replace(PASSED, name="against the original"))
    Bundle.open(folder).update_file("report.json", stronger.to_json().encode())
    monkeypatch.setattr("edge_convert.validate.suites.validate_bundle", lambda *_, **__: report(PASSED))
    result = invoke("validate", str(folder), "--no-latency")
    assert result.exit_code == 0, result.output
    assert "report.json was left as it is" in result.stderr
    assert Bundle.open(folder).file("report.json").read_text() == stronger.to_json()
    monkeypatch.setattr("edge_convert.validate.suites.validate_bundle", lambda *_, **__: report(FAILED))
    assert invoke("validate", str(folder), "--no-latency").exit_code == 3
    assert json.loads(Bundle.open(folder).file("report.json").read_text())["gates"][0]["outcome"] == "failed"


def test_validate_refuses_images_for_a_task_without(tmp_path: Path) -> None:
    result = invoke("validate", str(bundle(tmp_path / "b")), "--calibration", str(tmp_path))
    assert result.exit_code == 2
    assert "image-classification" in result.stderr


NO_PROVIDER = Gate("provider", "other_provider", None, 0, "equal", "not_run", "CUDAExecutionProvider is not here")


@pytest.mark.parametrize(
    ("gates", "options", "code"),
    [
        ((FAILED,), (), 3),
        ((PASSED,), ("--strict",), 0),
        ((PASSED, NOT_RUN), (), 0),
        ((NO_PROVIDER, PASSED), (), 3),
        ((NO_PROVIDER, PASSED), ("--on-cpu",), 0),
        ((NO_PROVIDER, PASSED), ("--on-cpu", "--strict"), 3),
        ((NO_PROVIDER, FAILED), ("--on-cpu",), 3),
    ],
)
def test_selftest_exit_codes_and_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gates: tuple[Gate, ...], options: tuple[str, ...], code: int
) -> None:
    folder = bundle(tmp_path / "b")
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        "edge_convert.validate.selftest.run_selftest", lambda opened, **given: seen.update(given) or report(*gates)
    )
    result = invoke("selftest", str(folder), *options)
    assert result.exit_code == code, result.output
    assert seen["on_cpu"] is ("--on-cpu" in options)
    assert result.stdout.splitlines()[-1].startswith("Checked on the CPU only") is (NO_PROVIDER in gates)


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize(
    ("target", "ran", "missing"), [("cpu", "CPU", False), ("jetson", "CPU", True), ("jetson", "CUDA", False)]
)
def test_selftest_judges_the_provider_first_and_no_latency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, ran: str, missing: bool, on_cpu: bool
) -> None:
    from edge_convert.runtime.device import load_profile
    from edge_convert.validate import selftest

    seen: list[str] = []

    def validate_bundle(opened: Bundle, reference: object, **options: Any) -> Report:
        seen.append(opened.profile.providers[0].name)
        ran_on = "CPUExecutionProvider" if on_cpu else f"{ran}ExecutionProvider"
        return dataclasses.replace(report(PASSED, NOT_RUN), environment={"providers": [ran_on, "Other"]})

    monkeypatch.setattr(selftest, "validate_bundle", validate_bundle)
    opened = Bundle.open(bundle(tmp_path / "b"), profile=load_profile(target))
    found = selftest.run_selftest(opened, on_cpu=on_cpu)
    missing = missing or (on_cpu and target != "cpu")
    assert (seen[0] == "CPUExecutionProvider") is (on_cpu or target == "cpu")
    assert [gate.name for gate in found.gates] == ["provider", "numerics (on CPU)" if missing else "numerics"]
    assert found.gates[0].outcome == ("not_run" if missing else "passed")
    reason = selftest.missing_provider(found)
    assert (reason is not None and "CUDAExecutionProvider" in reason) is missing


def test_bench_and_run_name_on_cpu_where_the_provider_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(bundle(tmp_path / "b", "feature-extraction"))

    def load(*_arguments: object, **_options: object) -> None:
        raise ProviderUnavailableError("CUDAExecutionProvider", "jetson", ())

    monkeypatch.setattr("edge_convert.wrappers.embed.TextEmbedder.load", load)
    for arguments in (("run", folder, "a"), ("bench", folder)):
        result = invoke(*arguments)
        assert result.exit_code == 1
        assert "--on-cpu" in result.stderr.splitlines()[-1]


class FakeGenerator:
    """Says what it was asked."""

    def generate(self, prompt: str, config: Any) -> TextResult:
        return TextResult(f"raw:{prompt}", (1,), "stop", 1, 1.0, 1.0)

    def stream(self, prompt: str, config: Any) -> Iterator[str]:
        yield from ("raw:", prompt, f":{config.max_tokens}")

    def stream_chat(self, messages: list[dict[str, str]], config: Any) -> Iterator[str]:
        yield from ("chat:", "|".join(f"{item['role']}={item['content']}" for item in messages))


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "edge_convert.wrappers.text.TextGenerator.load", lambda opened, *, profile, threads: FakeGenerator()
    )


@pytest.mark.usefixtures("generator")
def test_run_chats_when_the_bundle_has_a_template(tmp_path: Path) -> None:
    folder = str(bundle(tmp_path / "b", chat_template="chat_template.jinja"))
    assert invoke("run", folder, "hello there").stdout == "chat:user=hello there\n"
    assert invoke("run", folder, "hello", "there").stdout == "chat:user=hello\n\nchat:user=there\n"
    assert invoke("run", folder, "-", "--system", "Brief.", stdin="hi\n").stdout == "chat:system=Brief.|user=hi\n"
    assert invoke("run", folder, "hello", "--raw", "--max-tokens", "7").stdout == "raw:hello:7\n"


@pytest.mark.usefixtures("generator")
def test_run_completes_without_a_template_and_refuses_system(tmp_path: Path) -> None:
    folder = str(bundle(tmp_path / "b", chat_template=None))
    assert invoke("run", folder, "hello").stdout == "raw:hello:256\n"
    result = invoke("run", folder, "hello", "--system", "Brief.")
    assert result.exit_code == 2
    assert "--raw" in result.stderr


@pytest.mark.usefixtures("generator")
@pytest.mark.parametrize("wrong", [("--temperature", "-1"), ("--top-p", "0"), ("--max-tokens", "0")])
def test_run_refuses_sampling_that_makes_no_sense(tmp_path: Path, wrong: tuple[str, str]) -> None:
    result = invoke("run", str(bundle(tmp_path / "b")), "hello", *wrong)
    assert result.exit_code in (1, 2)
    assert result.stderr.startswith("error: ")
    assert "unexpected" not in result.stderr


@pytest.mark.usefixtures("generator")
def test_run_answers_each_prompt_in_json(tmp_path: Path) -> None:
    folder = str(bundle(tmp_path / "b"))
    value = json.loads(invoke("run", folder, "one", "two", "--json").stdout)
    assert [(item["prompt"], item["text"]) for item in value] == [("one", "raw:one"), ("two", "raw:two")]


@pytest.mark.usefixtures("generator")
@pytest.mark.parametrize("inputs", [("",), ("hello", " \n"), ("-",), ("-", "-")])
def test_run_refuses_an_empty_prompt(tmp_path: Path, inputs: tuple[str, ...]) -> None:
    result = invoke("run", str(bundle(tmp_path / "b")), *inputs, stdin="\n")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("task", "option"),
    [
        ("feature-extraction", ("--max-tokens", "3")),
        ("feature-extraction", ("--raw",)),
        ("image-classification", ("--seed", "1")),
        ("feature-extraction", ("--show", "2")),
        ("text-generation", ("--show", "2")),
    ],
)
def test_run_refuses_options_of_another_task(tmp_path: Path, task: str, option: tuple[str, ...]) -> None:
    result = invoke("run", str(bundle(tmp_path / "b", task)), "hello", *option)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {option[0]} is for ")
    assert task in result.stderr
    assert result.stderr.count("\n") == 1


def test_run_embeds_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.array([[1, 0], [0.6, 0.8]], np.float32)
    fake = SimpleNamespace(embed=lambda texts: vectors)
    monkeypatch.setattr("edge_convert.wrappers.embed.TextEmbedder.load", lambda opened, *, profile, threads: fake)
    result = invoke("run", str(bundle(tmp_path / "b", "feature-extraction")), "a", "b", "--json")
    assert json.loads(result.stdout)["similarity"][0][1] == pytest.approx(0.6)


def test_run_names_a_missing_image(tmp_path: Path) -> None:
    result = invoke("run", str(bundle(tmp_path / "b", "image-classification")), "no-such.jpg")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: The image no-such.jpg does not exist.")
