from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_convert.runtime import session as session_module
from edge_convert.runtime.bundle import Bundle, collect_files, write_manifest
from edge_convert.runtime.device import ProviderSpec, load_profile, with_cpu_only
from edge_convert.runtime.errors import (
    BundleError,
    DeviceError,
    FeedError,
    MissingExtraError,
    ProviderUnavailableError,
)
from edge_convert.runtime.int8 import EXACT_INT8
from edge_convert.runtime.manifest import GraphSpec, Manifest, SourceSpec, TensorSpec
from edge_convert.runtime.session import Session
from edge_convert.runtime.threads import available_cpus

ort = pytest.importorskip("onnxruntime")
CPU = load_profile("cpu")
NO_CUDA = "CUDAExecutionProvider" not in ort.get_available_providers()
SPEC = GraphSpec(
    file="encoder.onnx",
    inputs=(TensorSpec("x", "float32", ("batch", 4)), TensorSpec("y", "float32", ("batch", 4))),
    outputs=(TensorSpec("sum", "float32", ("batch", 4)), TensorSpec("scaled", "float32", ("batch", 4))),
    ir_version=10,
    opsets={"": 21},
    node_counts={"Add": 1, "Mul": 1},
    initializer_bytes={"float32": 4096},
)


def write_graph(folder: Path) -> Path:
    """sum = x + y; scaled = x * w, with w in an external data file."""
    onnx = pytest.importorskip("onnx")
    helper, proto = onnx.helper, onnx.TensorProto
    weights = onnx.numpy_helper.from_array(np.arange(4, dtype=np.float32), "w")
    values = {name: helper.make_tensor_value_info(name, proto.FLOAT, ["batch", 4]) for name in "xy"}
    outputs = [helper.make_tensor_value_info(name, proto.FLOAT, ["batch", 4]) for name in ("sum", "scaled")]
    nodes = [helper.make_node("Add", ["x", "y"], ["sum"]), helper.make_node("Mul", ["x", "w"], ["scaled"])]
    graph = helper.make_graph(nodes, "g", list(values.values()), outputs, [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path = folder / "encoder.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location="encoder.onnx.data", size_threshold=0)
    return path


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_graph(tmp_path_factory.mktemp("graph"))


def feed(rows: int) -> dict[str, np.ndarray[Any, Any]]:
    x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    return {"x": x, "y": x + 1}


@pytest.mark.parametrize("rows", [1, 3])
def test_named_arrays_in_and_out(graph: Path, rows: int) -> None:
    outputs = Session(graph, SPEC, CPU).run(feed(rows))
    assert list(outputs) == ["sum", "scaled"]
    np.testing.assert_array_equal(outputs["sum"], feed(rows)["x"] * 2 + 1)
    np.testing.assert_array_equal(outputs["scaled"], feed(rows)["x"] * np.arange(4, dtype=np.float32))


def test_external_data_is_found_from_any_working_directory(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Session(graph, SPEC, CPU).run(feed(1))["scaled"][0, 3] == 9.0


def test_defaults(graph: Path) -> None:
    session = Session(graph, SPEC, CPU)
    options = session.ort.get_session_options()
    assert session.threads == options.intra_op_num_threads == available_cpus()
    assert options.inter_op_num_threads == 1
    assert options.log_severity_level == 3
    assert session.providers == ("CPUExecutionProvider",)
    assert session.device_type == "cpu"
    assert session.spec is SPEC


def test_entries_of_the_profile_reach_onnx_runtime(graph: Path) -> None:
    profile = dataclasses.replace(CPU, session_config={"session.set_denormal_as_zero": "1"})
    options = Session(graph, SPEC, profile).ort.get_session_options()
    assert options.get_session_config_entry("session.set_denormal_as_zero") == "1"


@pytest.mark.parametrize(("saturating", "reduce_range"), [(True, False), (True, True), (False, False)])
def test_exact_int8_is_asked_for_where_it_is_needed(
    graph: Path, monkeypatch: pytest.MonkeyPatch, saturating: bool, reduce_range: bool
) -> None:
    """Not where the CPU is exact, nor for weights of 7 bits: it can be slower."""
    monkeypatch.setattr("edge_convert.runtime.int8.saturates", lambda: saturating)
    profile = dataclasses.replace(CPU, reduce_range=reduce_range)
    options = Session(graph, SPEC, profile).ort.get_session_options()
    if saturating and not reduce_range:
        assert options.get_session_config_entry(EXACT_INT8) == "1"
    else:
        with pytest.raises(RuntimeError, match=EXACT_INT8):
            options.get_session_config_entry(EXACT_INT8)


def test_threads_are_what_was_asked_for(graph: Path) -> None:
    assert Session(graph, SPEC, CPU, threads=1).ort.get_session_options().intra_op_num_threads == 1


@pytest.mark.parametrize("threads", [0, -1, 10**6, 10**30, "2", 1.5, True])
def test_a_number_of_threads_that_no_system_starts_is_refused(graph: Path, threads: Any) -> None:
    with pytest.raises(DeviceError, match=r"threads is .*Use 1 to"):
        Session(graph, SPEC, CPU, threads=threads)


@pytest.mark.parametrize("target", ["cuda", "jetson"])
@pytest.mark.skipif(not NO_CUDA, reason="this machine's ONNX Runtime has CUDA")
def test_an_absent_provider_raises(graph: Path, target: str) -> None:
    with pytest.raises(ProviderUnavailableError, match=r"CUDAExecutionProvider.*CPUExecutionProvider") as caught:
        Session(graph, SPEC, load_profile(target))
    assert caught.value.provider == "CUDAExecutionProvider"


@pytest.mark.skipif(not NO_CUDA, reason="this machine's ONNX Runtime has CUDA")
def test_fallback_only_where_the_profile_allows_it(graph: Path) -> None:
    profile = dataclasses.replace(load_profile("cuda"), allow_fallback=True)
    assert Session(graph, SPEC, profile).providers == ("CPUExecutionProvider",)
    assert Session(graph, SPEC, with_cpu_only(load_profile("jetson"))).providers == ("CPUExecutionProvider",)


def test_a_provider_that_is_listed_and_does_not_start_raises(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(ort, "preload_dlls", lambda: None, raising=False)
    real = ort.InferenceSession
    monkeypatch.setattr(
        ort, "InferenceSession", lambda path, options, providers: real(path, options, ["CPUExecutionProvider"])
    )
    with pytest.raises(ProviderUnavailableError, match="could not start"):
        Session(graph, SPEC, load_profile("cuda"))


def test_a_wrong_feed_is_refused_before_running(graph: Path) -> None:
    session = Session(graph, SPEC, CPU)
    with pytest.raises(FeedError, match="float64"):
        session.run({**feed(1), "x": np.zeros((1, 4))})
    with pytest.raises(FeedError, match="'batch'"):
        session.run({**feed(2), "x": np.zeros((1, 4), np.float32)})
    with pytest.raises(FeedError, match="missing"):
        session.run({"x": feed(1)["x"]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": (*SPEC.inputs, TensorSpec("z", "float32", (1,)))}, "input 'z' is absent in the graph"),
        ({"inputs": SPEC.inputs[:1]}, "input 'y'.*absent in the manifest"),
        ({"outputs": (TensorSpec("sum", "float16", ("batch", 4)), SPEC.outputs[1])}, "output 'sum' is tensor"),
    ],
)
def test_a_graph_that_is_not_the_manifests_is_refused(graph: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        Session(graph, dataclasses.replace(SPEC, **changes), CPU)


def test_a_broken_or_missing_graph_is_one_sentence(graph: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="missing"):
        Session(tmp_path / "encoder.onnx", SPEC, CPU)
    (tmp_path / "encoder.onnx").write_bytes(graph.read_bytes()[:40])
    with pytest.raises(BundleError, match="cannot open"):
        Session(tmp_path / "encoder.onnx", SPEC, CPU)
    (tmp_path / "encoder.onnx").write_bytes(graph.read_bytes())
    with pytest.raises(BundleError, match="cannot open"):  # its data file is not beside it
        Session(tmp_path / "encoder.onnx", SPEC, CPU)


def test_an_old_onnxruntime_is_refused(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "__version__", "1.19.2")
    with pytest.raises(DeviceError, match=r"1\.19\.2 is older than 1\.20"):
        Session(graph, SPEC, CPU)
    monkeypatch.setattr(ort, "__version__", "1.20.0")
    Session(graph, SPEC, CPU)
    newer = dataclasses.replace(SPEC, onnxruntime_min="1.23")
    with pytest.raises(DeviceError, match=r"1\.20\.0 is older than 1\.23, which the operators of encoder.onnx need"):
        Session(graph, newer, CPU)
    monkeypatch.setattr(ort, "__version__", "1.23.2")
    Session(graph, newer, CPU)
    monkeypatch.setattr(ort, "__version__", "2.0.0+cu12")
    Session(graph, newer, CPU)


def test_without_onnxruntime_the_extra_is_named(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"extra \[cpu\]"):
        Session(graph, SPEC, CPU)


def test_options_reach_the_provider(graph: Path) -> None:
    spec = ProviderSpec("CPUExecutionProvider", {"use_arena": "0"})
    chosen = session_module._available(ort, dataclasses.replace(CPU, providers=(spec,)))
    assert chosen == [("CPUExecutionProvider", {"use_arena": "0"})]


def test_a_bundle_opens_its_graph(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    write_graph(folder)
    manifest = Manifest(
        task="feature-extraction",
        target="cpu",
        precision="fp32",
        source=SourceSpec("onnx", "example", "0" * 64),
        graphs={"encoder": SPEC},
        processing={},
        files=collect_files(folder),
        tools={},
        created="2026-01-01T00:00:00Z",
    )
    assert set(manifest.files) == {"encoder.onnx", "encoder.onnx.data"}
    write_manifest(folder, manifest)
    session = Bundle.open(folder).session("encoder", threads=1)
    assert session.threads == 1
    assert session.run(feed(2))["sum"].shape == (2, 4)
    write_manifest(folder, dataclasses.replace(manifest, target="cuda"))
    if NO_CUDA:
        with pytest.raises(ProviderUnavailableError):
            Bundle.open(folder).session("encoder")
    assert Bundle.open(folder).session("encoder", profile=CPU).device_type == "cpu"


def importing_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    import sys

    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "onnxruntime":
                raise error

    monkeypatch.delitem(sys.modules, "onnxruntime")
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])


def test_an_interrupted_import_is_an_interruption(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ImportError("initialization failed")
    error.__context__ = SystemError("unreported exception")
    error.__context__.__cause__ = KeyboardInterrupt()
    importing_raises(monkeypatch, error)
    with pytest.raises(KeyboardInterrupt):
        Session(graph, SPEC, CPU)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libstdc++.so.6: GLIBCXX_3.4.32 not found"),
        ModuleNotFoundError("No module named 'flatbuffers'", name="flatbuffers"),
        SystemError("GLIBCXX_3.4.32 or flatbuffers is odd"),
    ],
)
def test_an_import_that_fails_for_another_reason_says_which(
    graph: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    importing_raises(monkeypatch, error)
    with pytest.raises(DeviceError, match=r"is installed and cannot be imported .*(GLIBCXX_3.4.32|flatbuffers)"):
        Session(graph, SPEC, CPU)


def test_a_missing_part_of_onnxruntime_names_the_extra(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    importing_raises(monkeypatch, ModuleNotFoundError("No module named x", name="onnxruntime.capi"))
    with pytest.raises(MissingExtraError):
        Session(graph, SPEC, CPU)


@pytest.mark.parametrize("given", [None, [1], 5, {1: np.zeros(1), "z": np.zeros(1)}])
def test_a_feed_that_is_no_dict_of_inputs_is_refused(graph: Path, given: Any) -> None:
    with pytest.raises(FeedError):
        Session(graph, SPEC, CPU, threads=1).run(given)
