from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_convert.validate.gates import GateList
from edge_convert.validate.golden import read_golden, synthetic_image, write_golden
from edge_convert.validate.suites_embed import check_embedder, check_embedder_golden, check_embedder_invariants
from edge_convert.validate.suites_image import (
    NO_IMAGES,
    check_classifier,
    check_classifier_golden,
    check_classifier_invariants,
    crops,
)
from edge_convert.validate.suites_text import (
    DecoderSubject,
    check_decoder,
    check_decoder_golden,
    check_decoder_invariants,
)
from edge_convert.validate.texts import load_texts, long_texts

_spec = importlib.util.spec_from_file_location("validate_fakes", Path(__file__).with_name("fakes.py"))
fakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fakes)


def quiet(_):
    pass


def subject(fault="", **changes):
    values = {
        "decoder": fakes.FakeDecoder(fault),
        "chunked": lambda: fakes.FakeDecoder(fault, chunk_tokens=7),
        "encode": fakes.tokenize,
        "render": fakes.render,
        "context_length": 256,
        "precision": "fp32",
    }
    return DecoderSubject(**{**values, **changes})


def failed(gates):
    return {gate.name for gate in gates.gates if gate.outcome == "failed"}


def all_passed(gates):
    return bool(gates.gates) and all(gate.outcome == "passed" for gate in gates.gates)


def test_texts_are_many_and_different():
    texts = load_texts()
    assert len(texts) >= 120
    assert len(set(texts)) == len(texts)
    assert any("\n" in text for text in texts)
    assert any(text.isspace() for text in texts)
    assert min(map(len, long_texts(12))) > 200


def test_a_right_decoder_passes_everything():
    gates = GateList(fakes.BOUNDS)
    found = check_decoder(subject(), fakes.FakeReference(), gates, quiet)
    check_decoder_invariants(subject(), gates, quiet)
    assert all_passed(gates)
    assert found["prompts"] == 16
    assert found["greedy_first_difference"] is None


def test_nan_never_satisfies_an_invariant():
    gates = GateList(fakes.BOUNDS)
    check_decoder_invariants(subject("nan"), gates, quiet)
    assert all(gate.outcome == "failed" for gate in gates.gates)


def test_wrong_logits_fail():
    gates = GateList(fakes.BOUNDS)
    found = check_decoder(subject("logits"), fakes.FakeReference(), gates, quiet)
    assert "logits" in failed(gates)
    assert found["greedy_first_difference"] == 0


def test_nan_logits_give_failed_gates_and_a_report_without_nan():
    gates = GateList(fakes.BOUNDS)
    check_decoder(subject("nan"), fakes.FakeReference(), gates, quiet)
    assert [gate.outcome for gate in gates.gates if gate.name == "logits"] == ["failed"] * 3


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("step", "cached = uncached"),
        ("chunk", "chunked prefill = whole"),
        ("rewind", "rewind = fresh"),
        ("repeat", "repeated run"),
    ],
)
def test_each_decoder_invariant_can_fail(fault, name):
    gates = GateList(fakes.BOUNDS)
    check_decoder_invariants(subject(fault), gates, quiet)
    assert failed(gates) == {name} if fault != "step" else name in failed(gates)


def test_other_tokens_and_another_template_fail():
    gates = GateList(fakes.BOUNDS)
    wrong = subject(encode=lambda text: fakes.tokenize(text.strip()), render=lambda m: fakes.render(m) + " ")
    check_decoder(wrong, fakes.FakeReference(), gates, quiet)
    assert failed(gates) == {"tokenizer = original", "chat template = original"}


def test_a_template_that_the_original_does_not_have_fails():
    gates = GateList(fakes.BOUNDS)
    check_decoder(subject(), fakes.FakeReference(template=False), gates, quiet)
    assert failed(gates) == {"chat template = original"}


def test_a_short_context_is_respected():
    gates = GateList(fakes.BOUNDS)
    found = check_decoder(subject(context_length=16), fakes.FakeReference(), gates, quiet)
    assert found["tokens"] == 16 * 16
    assert not failed(gates)


def test_right_and_wrong_embedders():
    gates = GateList(fakes.BOUNDS)
    found = check_embedder(fakes.FakeEmbedder(), fakes.FakeEmbedder(), gates, quiet)
    check_embedder_invariants(fakes.FakeEmbedder(), "fp32", gates, quiet)
    assert all_passed(gates)
    assert found["texts"] >= 100


@pytest.mark.parametrize(
    ("fault", "name"),
    [("vectors", "embeddings"), ("dimension", "embeddings"), ("tokens", "tokenizer = original")],
)
def test_embedder_against_the_original_can_fail(fault, name):
    gates = GateList(fakes.BOUNDS)
    check_embedder(fakes.FakeEmbedder(fault), fakes.FakeEmbedder(), gates, quiet)
    assert failed(gates) == {name}


@pytest.mark.parametrize(
    ("fault", "name"),
    [("padding", "padded = unpadded"), ("batch", "batch = single"), ("repeat", "repeated run")],
)
def test_each_embedder_invariant_can_fail(fault, name):
    gates = GateList(fakes.BOUNDS)
    check_embedder_invariants(fakes.FakeEmbedder(fault), "fp32", gates, quiet)
    assert name in failed(gates)


@pytest.fixture
def photos(tmp_path):
    paths = []
    for index in range(2):
        path = tmp_path / f"{index}.png"
        Image.fromarray(np.roll(synthetic_image(), 60 * index, axis=1)).save(path)
        paths.append(path)
    return paths


def test_right_classifier_passes(photos):
    gates = GateList(fakes.BOUNDS)
    found = check_classifier(fakes.FakeClassifier(), fakes.FakeClassifier(), photos, gates, quiet)
    check_classifier_invariants(fakes.FakeClassifier(), "fp32", gates, quiet)
    assert all_passed(gates)
    assert found["frames"] == 22  # two photos, whole and as ten crops


@pytest.mark.parametrize(("fault", "name"), [("logits", "logits"), ("pixels", "preprocessing = original")])
def test_classifier_against_the_original_can_fail(photos, fault, name):
    gates = GateList(fakes.BOUNDS)
    check_classifier(fakes.FakeClassifier(fault), fakes.FakeClassifier(), photos, gates, quiet)
    assert failed(gates) == {name}


@pytest.mark.parametrize(("fault", "name"), [("batch", "batch = single"), ("repeat", "repeated run")])
def test_each_classifier_invariant_can_fail(fault, name):
    gates = GateList(fakes.BOUNDS)
    check_classifier_invariants(fakes.FakeClassifier(fault), "fp32", gates, quiet)
    assert failed(gates) == {name}


def test_without_images_accuracy_is_not_run():
    gates = GateList(fakes.BOUNDS)
    check_classifier(fakes.FakeClassifier("logits"), fakes.FakeClassifier(), [], gates, quiet)
    accuracy = [gate for gate in gates.gates if gate.name == "logits"]
    assert [(gate.outcome, gate.reason, gate.value) for gate in accuracy] == [("not_run", NO_IMAGES, None)] * 2


def test_crops_of_one_pixel():
    assert [crop.size for crop in crops(Image.new("RGB", (1, 1)))] == [(1, 1)] * 10


class GoldenBundle:
    def __init__(self, folder, task):
        self.folder = folder
        self.manifest = type("M", (), {"files": {"golden.npz": None}, "task": task})()

    def file(self, name):
        return self.folder / name


def golden_of(tmp_path, task, reference, images=()):
    write_golden(tmp_path, task, reference, images=images)
    return read_golden(GoldenBundle(tmp_path, task))


@pytest.mark.parametrize(("fault", "expected"), [("", set()), ("logits", {"golden logits"})])
def test_golden_decoder(tmp_path, fault, expected):
    golden = golden_of(tmp_path, "text-generation", fakes.FakeReference())
    gates = GateList(fakes.BOUNDS)
    check_decoder_golden(subject(fault), golden, gates)
    assert failed(gates) == expected


@pytest.mark.parametrize(("fault", "expected"), [("", set()), ("vectors", {"golden embeddings"})])
def test_golden_embedder(tmp_path, fault, expected):
    golden = golden_of(tmp_path, "feature-extraction", fakes.FakeEmbedder())
    gates = GateList(fakes.BOUNDS)
    check_embedder_golden(fakes.FakeEmbedder(fault), golden, gates)
    assert failed(gates) == expected


@pytest.mark.parametrize(
    ("fault", "expected"), [("", set()), ("logits", {"golden logits"}), ("pixels", {"preprocessing = original"})]
)
def test_golden_classifier(tmp_path, photos, fault, expected):
    golden = golden_of(tmp_path, "image-classification", fakes.FakeClassifier(), photos)
    gates = GateList(fakes.BOUNDS)
    check_classifier_golden(fakes.FakeClassifier(fault), golden, gates)
    assert failed(gates) == expected


def test_golden_without_photos_is_not_run(tmp_path):
    golden = golden_of(tmp_path, "image-classification", fakes.FakeClassifier())
    gates = GateList(fakes.BOUNDS)
    check_classifier_golden(fakes.FakeClassifier(), golden, gates)
    assert [gate.outcome for gate in gates.gates] == ["passed", "not_run", "not_run"]


def _write_toy_encoder(folder, target, precision="fp32"):
    """A bundle whose encoder sums the token ids into 4 numbers; returns the opened bundle."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from onnx import TensorProto, helper, numpy_helper
    from tokenizers import Tokenizer, models, pre_tokenizers

    from edge_convert.runtime.bundle import Bundle, collect_files, write_manifest
    from edge_convert.runtime.manifest import GraphSpec, Manifest, SourceSpec, TensorSpec

    table = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["weights"]),
        helper.make_node("Mul", ["rows", "weights"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "one"], ["sums"], keepdims=0),
        helper.make_node("LpNormalization", ["sums"], ["embedding"], axis=-1, p=2),
    ]
    inputs = [
        helper.make_tensor_value_info(n, TensorProto.INT64, ["batch", "sequence"])
        for n in ("input_ids", "attention_mask")
    ]
    output = helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["batch", 4])
    constants = [
        numpy_helper.from_array(table, "table"),
        numpy_helper.from_array(np.array([-1], np.int64), "last"),
        numpy_helper.from_array(np.array([1], np.int64), "one"),
    ]
    graph = helper.make_graph(nodes, "toy", inputs, [output], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    folder.mkdir()
    onnx.save(model, str(folder / "encoder.onnx"))
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 1, "the": 2, "a": 3, "is": 4, ".": 5}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    spec = GraphSpec(
        file="encoder.onnx",
        inputs=tuple(TensorSpec(n, "int64", ("batch", "sequence")) for n in ("input_ids", "attention_mask")),
        outputs=(TensorSpec("embedding", "float32", ("batch", 4)),),
        ir_version=9,
        opsets={"ai.onnx": 18},
        node_counts={},
        initializer_bytes={},
    )
    processing = {
        "tokenizer": "tokenizer.json",
        "max_length": 32,
        "pad_token_id": 0,
        "pad_token_type_id": 0,
        "dimension": 4,
        "inputs": ["input_ids", "attention_mask"],
        "output": "embedding",
    }

    def write():
        manifest = Manifest(
            task="feature-extraction",
            target=target,
            precision=precision,
            source=SourceSpec("module", "toy", "0" * 64),
            graphs={"encoder": spec},
            processing=processing,
            files=collect_files(folder),
            tools={},
            created="2026-01-01T00:00:00+00:00",
        )
        write_manifest(folder, manifest)
        return Bundle.open(folder)

    return write


class ToyReference:
    """The toy encoder's own answers, or their opposite."""

    name = "toy"
    pad_token_id = 0

    def __init__(self, bundle, sign=1):
        from edge_convert.runtime.device import with_cpu_only
        from edge_convert.wrappers.embed import TextEmbedder

        self.embedder = TextEmbedder.load(bundle, profile=with_cpu_only(bundle.profile))
        self.sign = sign

    def embed(self, texts):
        return self.sign * self.embedder.embed(texts, batch_size=1)

    def tokenize(self, text):
        return self.embedder.encode_ids(text)


def test_validate_bundle_end_to_end(tmp_path):
    from edge_convert.validate.report import Report, exit_code
    from edge_convert.validate.selftest import run_selftest
    from edge_convert.validate.suites import validate_bundle

    folder = tmp_path / "toy"
    write = _write_toy_encoder(folder, "cpu")
    bundle = write()
    report = validate_bundle(bundle, ToyReference(bundle), progress=quiet)
    assert report.outcome == "passed", report.gates
    assert report.measurements["latency"]["call_ms"]["p50"] > 0
    assert report.measurements["latency"]["peak_memory_mb"] > 1
    assert Report.from_json(report.to_json()) == report

    wrong = validate_bundle(bundle, ToyReference(bundle, sign=-1), measure_latency=False, progress=quiet)
    assert exit_code(wrong) == 3

    assert run_selftest(bundle).outcome == "not_run"  # no golden data
    write_golden(folder, "feature-extraction", ToyReference(bundle))
    assert run_selftest(write()).outcome == "passed"
    write_golden(folder, "feature-extraction", ToyReference(bundle, sign=-1))
    assert run_selftest(write()).failed


def test_a_provider_that_is_not_here_is_labelled_and_not_timed(tmp_path):
    import onnxruntime

    from edge_convert.validate.report import exit_code
    from edge_convert.validate.suites import validate_bundle

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA; run with the CPU build: pip install onnxruntime")
    bundle = _write_toy_encoder(tmp_path / "toy", "jetson-orin-nano-8gb-jp6")()
    report = validate_bundle(bundle, ToyReference(bundle), progress=quiet)
    timing = [gate for gate in report.gates if gate.name == "latency"]
    assert [(gate.outcome, gate.reason) for gate in timing] == [
        ("not_run", "CUDAExecutionProvider is not available here")
    ]
    assert all(gate.name.endswith("(on CPU)") for gate in report.gates if gate.name != "latency")
    assert "latency" not in report.measurements
    assert report.environment["providers"] == ["CPUExecutionProvider"]
    assert (exit_code(report), exit_code(report, strict=True)) == (0, 3)
