"""`--precision auto` of encoders and classifiers: nodes go to fp32 by measurement before everything does."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from edge_convert.convert.graph_tools import cpu_session
from edge_convert.convert.recipe import Exported, Found, Request
from edge_convert.convert.recipes.feature_extraction import quantise
from edge_convert.convert.recipes.ladder import search_classifier, search_encoder, text_batch
from edge_convert.convert.source import Source
from edge_convert.convert.stamp import read_back
from edge_convert.runtime.device import load_profile

WORDS, WIDTH = 300, 96


def save(path: Path, nodes: list[Any], given: Any, name: str, tensors: dict[str, np.ndarray]) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        [given],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", None])],
        [numpy_helper.from_array(value, key) for key, value in tensors.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return path


def encoder(path: Path, outlier: float) -> Path:
    """Three products; the channels of the first one's input reach up to `outlier` times the others, its weights undo it."""
    random = np.random.default_rng(1)
    size = np.ones(WIDTH, np.float32)
    size[::4] = outlier
    steps = [("words", "w1", "a", "ruined"), ("a", "w2", "b", "second"), ("b", "w3", "c", "third")]
    return save(
        path,
        [
            helper.make_node("Gather", ["table", "input_ids"], ["words"], "embedding"),
            *(helper.make_node("MatMul", [left, right], [out], name) for left, right, out, name in steps),
            helper.make_node("ReduceMean", ["c"], ["sentence"], "mean", axes=[1], keepdims=0),
        ],
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["n", "s"]),
        "sentence",
        {
            "table": (random.uniform(-1, 1, (WORDS, WIDTH)) * size).astype(np.float32),
            "w1": (random.normal(size=(WIDTH, WIDTH)) / size[:, None]).astype(np.float32),
            "w2": random.normal(size=(WIDTH, WIDTH)).astype(np.float32),
            "w3": random.normal(size=(WIDTH, WIDTH)).astype(np.float32),
        },
    )


class Embedder:
    """The fp32 graph, one text at a time; a character is a token."""

    name = "original"
    pad_token_id = 0

    def __init__(self, path: Path) -> None:
        self.session = cpu_session(path)

    def tokenize(self, text: str) -> list[int]:
        return [ord(character) % WORDS for character in text[:40]]

    def embed(self, texts: list[str]) -> np.ndarray:
        return np.concatenate([self.session.run(None, {"input_ids": [self.tokenize(text)]})[0] for text in texts])


def asked(calibration: Path, task: str, **bounds: float) -> Request:
    """A module as the source keeps no journal."""
    source = Source("module", "toy:build", None, {}, "", "toy")
    cpu = load_profile("cpu")
    profile = dataclasses.replace(cpu, gates={task: {"auto": bounds}}, native_precisions=("int8",))
    return Request(source, profile, "auto", 0, calibration, lambda _: None)


def decide(tmp_path: Path, outlier: float) -> Found:
    """Texts of 40 tokens each, so that a batch has no padding (the toy encoder has no mask)."""
    path = encoder(tmp_path / "encoder.onnx", outlier)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "t.txt").write_text("\n".join(f"{at} " * 20 + "turn left at the end" for at in range(9)))
    request = asked(tmp_path / "texts", "feature-extraction", cosine_mean_min=0.999)
    return search_encoder(request, {"encoder": Exported(path)}, Embedder(path), tmp_path / "work", quantise=quantise)


def test_the_product_that_int8_ruins_stays_in_fp32(tmp_path: Path) -> None:
    found = decide(tmp_path, 1000)
    assert [trial["name"] for trial in found.record["tried"]] == ["int8", "int8, 1 node in fp32"]
    assert found.record["chosen"] == "int8, 1 node in fp32"
    assert max(found.record["costs"], key=found.record["costs"].__getitem__) == "ruined"
    assert set(found.record["costs"]) == {"ruined", "second", "third"}
    assert read_back(found.graphs["encoder"].path).fp32_nodes == ("ruined",)


def test_nothing_is_measured_alone_where_all_int8_passes(tmp_path: Path) -> None:
    found = decide(tmp_path, 1)
    assert found.record["chosen"] == "int8"
    assert "costs" not in found.record


def test_a_batch_is_padded_on_the_right_and_masked() -> None:
    batch = text_batch([[5, 6, 7], [8]], pad_token_id=1)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 1, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["token_type_ids"].tolist() == [[0] * 3] * 2
    assert {values.dtype for values in batch.values()} == {np.dtype(np.int64)}


class Classifier:
    """The sums of the frame's colours are the logits."""

    name = "original"

    def preprocess(self, image: Image.Image) -> np.ndarray:
        return np.asarray(image.convert("RGB").resize((8, 8)), np.uint8)

    def logits(self, frames: np.ndarray) -> np.ndarray:
        return frames.astype(np.float32).sum((1, 2))


@pytest.mark.parametrize(
    ("right_from", "tried"),
    [
        (0, ["int8"]),
        (8, ["int8", "int8, 8 nodes in fp32"]),
        (16, ["int8", "int8, 8 nodes in fp32", "int8, 16 nodes in fp32"]),
        (99, ["int8", "int8, 8 nodes in fp32", "int8, 16 nodes in fp32", "fp32"]),
    ],
)
def test_a_classifier_gets_more_nodes_in_fp32_until_it_agrees(
    tmp_path: Path, right_from: int, tried: list[str]
) -> None:
    """The toy's int8 has its logits upside down with fewer than `right_from` nodes in fp32; 32 convolutions do nothing."""

    def graph(name: str, sign: float) -> Path:
        blank = [
            helper.make_node("Conv", ["x" if at == 0 else f"v{at - 1}", "one"], [f"v{at}"], f"c{at}", group=3)
            for at in range(32)
        ]
        ends = {"axes": np.array([1, 2]), "sign": np.float32(sign), "one": np.ones((3, 1, 1, 1), np.float32)}
        nodes = [
            helper.make_node("Cast", ["frames"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("Transpose", ["f"], ["x"], perm=[0, 3, 1, 2]),
            *blank,
            helper.make_node("Transpose", ["v31"], ["y"], perm=[0, 2, 3, 1]),
            helper.make_node("ReduceSum", ["y", "axes"], ["sums"], keepdims=0),
            helper.make_node("Mul", ["sums", "sign"], ["logits"]),
        ]
        given = helper.make_tensor_value_info("frames", TensorProto.UINT8, ["n", 8, 8, 3])
        return save(tmp_path / name, nodes, given, "logits", ends)

    right, wrong = graph("right.onnx", 1), graph("wrong.onnx", -1)
    (tmp_path / "photos").mkdir()
    for at in range(12):
        pixels = np.random.default_rng(at).integers(0, 256, (20, 20, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{at:02}.png")

    def build(
        request: Request, graphs: dict[str, Exported], place: Path, *, fp32_nodes: int = 0
    ) -> dict[str, Exported]:
        if request.precision == "fp32":
            return graphs
        shutil.copyfile(right if fp32_nodes >= right_from else wrong, place / "g.onnx")
        return {"classifier": Exported(place / "g.onnx")}

    request = asked(tmp_path / "photos", "image-classification", top1_agreement_min=0.9)
    graphs = {"classifier": Exported(right)}
    found = search_classifier(request, graphs, Classifier(), tmp_path / "work", quantise=build)
    assert [trial["name"] for trial in found.record["tried"]] == tried
    assert not found.record["tried"][-1]["refused"]
