"""int8 products of a saturating pair of weights: on CPUs without VNNI they are wrong unless something is done."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_convert.convert.graph_tools import cpu_session
from edge_convert.convert.quantize import quantise_dynamic, quantise_static
from edge_convert.convert.saturation import check_saturation
from edge_convert.runtime.device import load_profile
from edge_convert.runtime.errors import ExportError

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 64
QEMU = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
# Runs graphs on the CPU it is started on: {name: [path, on exact kernels]} in, {name: first value} out.
RUNNER = """
import json, sys
import numpy as np, onnxruntime as ort
from edge_convert.runtime.int8 import exact_int8
found = {}
for name, (path, exact) in json.loads(sys.argv[1]).items():
    options = ort.SessionOptions()
    for entry, value in (exact_int8() if exact else {}).items():
        options.add_session_config_entry(entry, value)
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    shape = [size if isinstance(size, int) else 1 for size in session.get_inputs()[0].shape]
    found[name] = float(session.run(None, {"x": np.ones(shape, np.float32)})[0].ravel()[0])
print(json.dumps(found))
"""


def graph_of(kind: str, path: Path) -> Path:
    """Sums 64 inputs: a product or a convolution, all of whose weights are 1 (127 in int8), so each pair saturates."""
    nodes, constants = [helper.make_node(kind, ["x", "w"], ["y"], "product")], {}
    if kind == "Conv":  # the last convolution stays fp32, as its output does
        nodes = [
            helper.make_node("Conv", ["x", "w"], ["sum"], "product"),
            helper.make_node("Conv", ["sum", "same"], ["y"], "last"),
        ]
        constants = {"same": np.eye(2, dtype=np.float32).reshape(2, 2, 1, 1)}
        shape, out, weights = [1, WIDTH, 1, 1], [1, 2, 1, 1], np.ones((2, WIDTH, 1, 1), np.float32)
    else:
        shape, out, weights = ["n", WIDTH], ["n", 2], np.ones((WIDTH, 2), np.float32)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, out)],
        [numpy_helper.from_array(value, name) for name, value in {"w": weights, **constants}.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def quantised(folder: Path, *, reduce_range: bool) -> dict[str, Path]:
    """The dynamic and the static int8 graph, for inputs between 0 and 1."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.uniform(0, 1, (1, WIDTH)).astype(np.float32)} for _ in range(7)] + [
        {"x": np.ones((1, WIDTH), np.float32)}
    ]
    quantise_dynamic(
        graph_of("MatMul", folder / "m.onnx"), folder / "dynamic.onnx", feeds=[], reduce_range=reduce_range
    )
    graphs = {"dynamic": folder / "dynamic.onnx"}
    for kind in ("Gemm", "Conv"):
        source, graphs[kind] = graph_of(kind, folder / f"{kind}-fp32.onnx"), folder / f"{kind}.onnx"
        shaped = [{"x": feed["x"].reshape(1, WIDTH, 1, 1) if kind == "Conv" else feed["x"]} for feed in feeds]
        quantise_static(source, graphs[kind], shaped, fp32_convolutions=0, reduce_range=reduce_range)
    return graphs


def int8_weights(path: Path) -> np.ndarray:
    """The only int8 matrix of the graph, of the sums of one output: (inputs,)."""
    found = [
        numpy_helper.to_array(tensor)
        for tensor in onnx.load(path).graph.initializer
        if tensor.data_type == TensorProto.INT8 and np.prod(tensor.dims) == 2 * WIDTH
    ]
    (weights,) = found
    return weights.reshape(2, WIDTH)[0] if weights.ndim == 4 else weights[:, 0]


def vpmaddubsw(activations: np.ndarray, weights: np.ndarray) -> int:
    """The sum of products of uint8 and int8 as AVX2 computes it: neighbours are added in saturating int16."""
    pairs = (activations.astype(np.int32) * weights.astype(np.int32)).reshape(-1, 2).sum(1)
    return int(pairs.clip(-(1 << 15), (1 << 15) - 1).sum())


def test_reduced_weights_do_not_saturate_and_full_ones_do(tmp_path: Path) -> None:
    inputs = np.full(WIDTH, 255, np.uint8)
    for reduce_range, limit in ((False, 127), (True, 64)):
        for kind, path in quantised(tmp_path / str(reduce_range), reduce_range=reduce_range).items():
            weights = int8_weights(path)
            assert np.abs(weights).max() == limit, kind
            exact = int((inputs.astype(int) * weights.astype(int)).sum())
            assert (vpmaddubsw(inputs, weights) == exact) is reduce_range, kind
            feed = np.ones((1, WIDTH, 1, 1) if kind == "Conv" else (1, WIDTH), np.float32)
            found = cpu_session(path).run(None, {"x": feed})[0].ravel()[0]
            assert found == pytest.approx(WIDTH, rel=0.02), kind  # half a step of 64, and of the activations


def test_a_saturating_pair_is_found_and_its_node_named(tmp_path: Path) -> None:
    for kind, path in quantised(tmp_path / "full", reduce_range=False).items():
        with pytest.raises(ExportError, match=r"product\w* in .* reach 127.*target cpu"):
            check_saturation(path)
        assert kind
    for path in quantised(tmp_path / "reduced", reduce_range=True).values():
        check_saturation(path)
        model = onnx.load(path)
        for tensor in model.graph.initializer:
            if tensor.data_type == TensorProto.INT8 and np.prod(tensor.dims) == 2 * WIDTH:
                planted = numpy_helper.to_array(tensor).copy()
                planted.flat[5] = -65
                tensor.CopyFrom(numpy_helper.from_array(planted, tensor.name))
        onnx.save(model, path)
        with pytest.raises(ExportError, match=r"product\w* in .* reach 65"):
            check_saturation(path)


def test_looked_up_tables_and_fp32_nodes_may_use_all_bits(tmp_path: Path) -> None:
    full = np.full((4, 4), 127, np.int8)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["row"]),
        helper.make_node("Cast", ["row"], ["x"], to=TensorProto.FLOAT),
        helper.make_node("DequantizeLinear", ["weights", "scale"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["y"], "weights only"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [
            numpy_helper.from_array(full, "table"),
            numpy_helper.from_array(full, "weights"),
            numpy_helper.from_array(np.float32(0.1), "scale"),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "in.onnx")
    check_saturation(tmp_path / "in.onnx")


@pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 is not installed (apt-get install qemu-user)")
def test_on_an_emulated_cpu_without_vnni(tmp_path: Path) -> None:
    """Haswell: full weights on the fast kernels are wrong; both targets' answers are right."""
    assert QEMU is not None
    cases = {}
    reduced = {name: load_profile(name).reduce_range for name in ("cpu", "cpu-avx2")}
    assert reduced == {"cpu": False, "cpu-avx2": True}
    for name, reduce_range, exact in (("fast", False, False), ("cpu", False, True), ("cpu-avx2", True, False)):
        for kind, path in quantised(tmp_path / name, reduce_range=reduce_range).items():
            cases[f"{name} {kind}"] = [str(path), exact]
    (tmp_path / "edge_convert").symlink_to(ROOT)
    script = tmp_path / "runner.py"
    script.write_text(RUNNER, encoding="ascii")
    done = subprocess.run(
        [QEMU, "-cpu", "Haswell", str(Path(sys.executable).resolve()), str(script), json.dumps(cases)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join([str(tmp_path), *(path for path in sys.path if path)])},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 9
    for case, value in found.items():
        if case.startswith("fast"):
            assert value < 0.6 * WIDTH, case
        else:
            assert value == pytest.approx(WIDTH, rel=0.02), case
