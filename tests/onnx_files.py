"""Tiny ONNX encoders and classifiers, as users bring them."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCAB, WIDTH, SIZE, CLASSES = 320, 64, 32, 10
IMAGENET = {
    "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 36}, "crop_size": {"height": SIZE, "width": SIZE}, "resample": 3,
}  # fmt: skip


def save(path, nodes, inputs, outputs, weights, *, opset=17, **options):
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(*item) for item in inputs],
        [helper.make_tensor_value_info(*item) for item in outputs],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = min(model.ir_version, 10)
    onnx.checker.check_model(model)
    onnx.save(model, path, **options)
    return path


def encoder(folder, *, sentence=False, types=True, kind=TensorProto.INT64, opset=17, output=None, **options):
    """A per-token network over an embedding table; with `sentence` the plain sum over the real tokens."""
    rng = np.random.default_rng(0)
    weights = {
        "table": rng.standard_normal((VOCAB, WIDTH)).astype(np.float32),
        "up": (rng.standard_normal((WIDTH, 2 * WIDTH)) / 8).astype(np.float32),
        "down": (rng.standard_normal((2 * WIDTH, WIDTH)) / 11).astype(np.float32),
        "kinds": rng.standard_normal((2, WIDTH)).astype(np.float32),
    }
    node = helper.make_node
    nodes = [node("Gather", ["table", "input_ids"], ["x"])]
    names = ["input_ids", "attention_mask"]
    if types:
        names.append("token_type_ids")
        nodes += [node("Gather", ["kinds", "token_type_ids"], ["kind"]), node("Add", ["x", "kind"], ["y"])]
    nodes += [
        node("MatMul", ["y" if types else "x", "up"], ["wide"]),
        node("Tanh", ["wide"], ["bent"]),
        node("MatMul", ["bent", "down"], ["hidden"]),
    ]
    name, shape = output or "last_hidden_state", ("b", "s", WIDTH)
    if sentence:
        weights["axis"], weights["last"] = np.array([1], np.int64), np.array([2], np.int64)
        nodes += [
            node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
            node("Unsqueeze", ["mask", "last"], ["kept"]),
            node("Mul", ["hidden", "kept"], ["masked"]),
            node("ReduceSum", ["masked", "axis"], [name], keepdims=0),
        ]
        shape = ("b", WIDTH)
    else:
        nodes.append(node("Identity", ["hidden"], [name]))
    inputs = [(item, kind, ("b", "s")) for item in names]
    return save(
        folder / "model.onnx", nodes, inputs, [(name, TensorProto.FLOAT, shape)], weights, opset=opset, **options
    )


def classifier(folder, *, planar=True, batch="n", softmax=False, opset=17, size=SIZE, **options):
    rng = np.random.default_rng(1)
    weights = {
        "first": (rng.standard_normal((8, 3, 3, 3)) / 4).astype(np.float32),
        "second": (rng.standard_normal((16, 8, 3, 3)) / 6).astype(np.float32),
        "head": rng.standard_normal((16, CLASSES)).astype(np.float32),
        "bias": rng.standard_normal(CLASSES).astype(np.float32),
    }
    node = helper.make_node
    nodes = []
    if not planar:
        weights |= {"middle": np.array(127, np.float32), "spread": np.array(128, np.float32)}
        nodes = [
            node("Cast", ["image"], ["float"], to=TensorProto.FLOAT),
            node("Sub", ["float", "middle"], ["centred"]),
            node("Div", ["centred", "spread"], ["scaled"]),
            node("Transpose", ["scaled"], ["planes"], perm=[0, 3, 1, 2]),
        ]
    nodes += [
        node("Conv", ["image" if planar else "planes", "first"], ["c1"], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Relu", ["c1"], ["r1"]),
        node("Conv", ["r1", "second"], ["c2"], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Relu", ["c2"], ["r2"]),
        node("GlobalAveragePool", ["r2"], ["pool"]),
        node("Flatten", ["pool"], ["flat"]),
        node("Gemm", ["flat", "head", "bias"], ["scores"]),
        node("Softmax", ["scores"], ["out"], axis=1) if softmax else node("Identity", ["scores"], ["out"]),
    ]
    shape = (batch, 3, size, size) if planar else (batch, size, size, 3)
    kind = TensorProto.FLOAT if planar else TensorProto.UINT8
    outputs = [("out", TensorProto.FLOAT, (batch, CLASSES))]
    return save(folder / "net.onnx", nodes, [("image", kind, shape)], outputs, weights, opset=opset, **options)
