"""The commands that do work, with the work itself replaced: arguments passed on, exit codes, clean stdout."""

from __future__ import annotations

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
from edge_convert.runtime.errors import ExportError
from edge_convert.runtime.manifest import Manifest, SourceSpec
from edge_convert.validate.gates import Gate
from edge_convert.validate.report import Report

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
        "model", "m.gguf", "--target", "jetson", "--precision", "int4", "--context", "512", "--force",
        "-o", str(tmp_path / "o"), "--calibration", str(tmp_path), "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert value["report"]["gates"][0]["outcome"] == "passed"
    assert value["warnings"] == ["int8 is slow here"]
    assert "chatter" not in result.output
    assert "exporting the graph" in result.stderr
    seen = converted.seen
    assert (seen["source"], seen["target"], seen["precision"]) == ("m.gguf", "jetson", "int4")
    assert (seen["context_tokens"], seen["force"], seen["validate"]) == (512, True, True)
    assert (seen["output"], seen["calibration"]) == (tmp_path / "o", tmp_path)


def test_model_default_output_and_auto_precision(converted: SimpleNamespace) -> None:
    result = invoke("model", "org/m", "--target", "jetson", "--precision", "auto")
    assert result.exit_code == 0
    assert converted.seen["output"] == Path("m-jetson-orin-nano-8gb-jp6")
    assert converted.seen["precision"] is None


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


def test_selftest_exits_with_the_reports_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bundle(tmp_path / "b")
    monkeypatch.setattr("edge_convert.validate.selftest.run_selftest", lambda opened: report(FAILED))
    assert invoke("selftest", str(folder)).exit_code == 3
    monkeypatch.setattr("edge_convert.validate.selftest.run_selftest", lambda opened: report(PASSED))
    assert invoke("selftest", str(folder), "--strict").exit_code == 0


class FakeGenerator:
    """Says what it was asked."""

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
    assert invoke("run", folder, "hello", "there").stdout == "chat:user=hello there\n"
    assert invoke("run", folder, "-", "--system", "Brief.", stdin="hi").stdout == "chat:system=Brief.|user=hi\n"
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


def test_run_embeds_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.array([[1, 0], [0.6, 0.8]], np.float32)
    fake = SimpleNamespace(embed=lambda texts: vectors)
    monkeypatch.setattr("edge_convert.wrappers.embed.TextEmbedder.load", lambda opened, *, profile, threads: fake)
    result = invoke("run", str(bundle(tmp_path / "b", "feature-extraction")), "a", "b", "--json")
    assert json.loads(result.stdout)["similarity"][0][1] == pytest.approx(0.6)


def test_run_names_a_missing_image(tmp_path: Path) -> None:
    result = invoke("run", str(bundle(tmp_path / "b", "image-classification")), "no-such.jpg")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: The image no-such.jpg does not exist.")
