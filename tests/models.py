"""Tiny graphs built in memory, with the inputs and outputs of the real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_convert.runtime.manifest import CacheSpec, GraphSpec, TensorSpec

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def toy_decoder(
    folder: Path,
    vocab: int = 96,
    *,
    max_length: int = 64,
    layers: int = 2,
    seed: int = 0,
    logits_positions: bool = True,
    position_ids: bool = False,
    logits_dtype: str = "float32",
) -> tuple[Path, GraphSpec]:
    """Write a random decoder with GroupQueryAttention and the decoder contract's names.

    Args:
        folder: Where `decoder.onnx` is written.
        vocab: Number of token ids.
        max_length: Positions of the cache and of the rotary tables.
        layers: Number of attention layers.
        seed: Of the random weights.
        logits_positions: Whether the graph takes the positions whose logits are wanted, or computes all.
        position_ids: Whether it takes positions (and adds an embedding of them).
        logits_dtype: "float32" or "float16".

    Returns:
        The graph's path and its specification (float32 cache shared by past and present).
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(seed)
    hidden, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    weights: list[onnx.TensorProto] = []
    nodes: list[onnx.NodeProto] = []

    def constant(name: str, value: np.ndarray) -> str:
        weights.append(numpy_helper.from_array(value, name))
        return name

    def random(name: str, rows: int, columns: int, gain: float = 1.0) -> str:
        return constant(name, (rng.standard_normal((rows, columns)) * gain / np.sqrt(rows)).astype(np.float32))

    def node(kind: str, inputs: list[str], output: str, **attributes: object) -> str:
        nodes.append(helper.make_node(kind, inputs, [output], name=f"{kind}.{output}", **attributes))
        return output

    angles = np.arange(max_length)[:, None] / 10000 ** (np.arange(HEAD_DIM // 2)[None] / (HEAD_DIM // 2))
    cos, sin = constant("cos", np.cos(angles).astype(np.float32)), constant("sin", np.sin(angles).astype(np.float32))
    embedding = constant("embedding", rng.standard_normal((vocab, hidden)).astype(np.float32))
    x = node("Gather", [embedding, "input_ids"], "x.0", axis=0)
    if position_ids:
        table = constant("position_table", rng.standard_normal((max_length, hidden)).astype(np.float32))
        x = node("Add", [x, node("Gather", [table, "position_ids"], "position", axis=0)], "x.positioned")
    for layer in range(layers):
        q, k, v = (
            node("MatMul", [x, random(f"{name}.weight.{layer}", hidden, width, 2.0)], f"{name}.{layer}")
            for name, width in (("q", hidden), ("k", kv), ("v", kv))
        )
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        present = [f"present.{layer}.{kind}" for kind in ("key", "value")]
        nodes.append(
            helper.make_node(
                "GroupQueryAttention", [q, k, v, *past, "seqlens_k", "total_sequence_length", cos, sin], [f"attention.{layer}", *present],
                name=f"attention.{layer}", domain="com.microsoft", num_heads=HEADS, kv_num_heads=KV_HEADS, do_rotary=1,
            )
        )  # fmt: skip
        projected = node("MatMul", [f"attention.{layer}", random(f"o.weight.{layer}", hidden, hidden)], f"o.{layer}")
        x = node("Add", [x, projected], f"x.{layer + 1}")
    kept = node("Gather", [x, "logits_positions"], "kept_hidden", axis=1) if logits_positions else x
    logits = node("MatMul", [kept, random("head", hidden, vocab)], "logits.float")
    kinds = {
        "int32": TensorProto.INT32,
        "int64": TensorProto.INT64,
        "float32": TensorProto.FLOAT,
        "float16": TensorProto.FLOAT16,
    }
    node("Cast", [logits], "logits", to=kinds[logits_dtype])

    cache_shape = ("batch", KV_HEADS, "past_sequence", HEAD_DIM)
    pasts = tuple(f"past_key_values.{i}.{kind}" for i in range(layers) for kind in ("key", "value"))
    presents = tuple(f"present.{i}.{kind}" for i in range(layers) for kind in ("key", "value"))
    inputs = (
        TensorSpec("input_ids", "int64", ("batch", "sequence")),
        TensorSpec("seqlens_k", "int32", ("batch",)),
        TensorSpec("total_sequence_length", "int32", ()),
        *((TensorSpec("position_ids", "int64", ("batch", "sequence")),) if position_ids else ()),
        *((TensorSpec("logits_positions", "int64", ("kept",)),) if logits_positions else ()),
        *(TensorSpec(name, "float32", cache_shape) for name in pasts),
    )
    outputs = (
        TensorSpec("logits", logits_dtype, ("batch", "kept" if logits_positions else "sequence", vocab)),
        *(TensorSpec(name, "float32", cache_shape) for name in presents),
    )
    graph = helper.make_graph(
        nodes,
        "toy",
        [helper.make_tensor_value_info(spec.name, kinds[spec.dtype], spec.shape) for spec in inputs],
        [helper.make_tensor_value_info(spec.name, kinds[spec.dtype], spec.shape) for spec in outputs],
        weights,
    )
    opsets = {"": 21, "com.microsoft": 1}
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(name, n) for name, n in opsets.items()])
    model.ir_version = 10
    path = folder / "decoder.onnx"
    onnx.save(model, path)
    cache = CacheSpec(pasts, presents, KV_HEADS, HEAD_DIM, max_length)
    return path, GraphSpec(path.name, inputs, outputs, 10, opsets, {}, {}, cache)
