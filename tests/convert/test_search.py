"""`--precision auto`: the search itself, and what it decides for decoders with planted faults."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from decoders import SIZES, request_for, save_model
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from edge_convert.convert.calibration_texts import calibration_texts
from edge_convert.convert.pipeline import convert
from edge_convert.convert.recipe import Exported, Found, Request
from edge_convert.convert.recipes.text_generation import RECIPE
from edge_convert.convert.search import Graphs, Journal, Search, drawn_in, excess, limit, refusal
from edge_convert.convert.stamp import read_back
from edge_convert.runtime.bundle import Bundle
from edge_convert.runtime.errors import ConversionError, SourceError
from edge_convert.validate.quantisation_view import tables
from edge_convert.validate.texts import load_texts

BOUNDS = {"kl_mean_max": 0.05, "top1_agreement_min": 0.9}


class Candidates:
    """Builds files of a given size and measures a given divergence, and counts how often each was built."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.built: list[str] = []

    def attempt(self, name: str, size: int, kl: float) -> bool:
        def build(folder: Path) -> Graphs:
            self.built.append(name)
            (folder / "g.onnx").write_bytes(bytes(size))
            return {"decoder": Exported(folder / "g.onnx")}

        return not self.search.attempt(name, build, lambda _: {"kl_mean": kl}).refused


def a_search(tmp_path: Path, journal: Journal | None = None) -> Candidates:
    return Candidates(Search(BOUNDS, tmp_path / "work", journal or Journal(None), lambda _: None))


def test_bounds_are_drawn_in_towards_a_perfect_value() -> None:
    assert drawn_in("kl_mean_max", 0.05) == pytest.approx(0.04)
    assert drawn_in("perplexity_ratio_max", 1.05) == pytest.approx(1.04)
    assert drawn_in("top1_agreement_min", 0.9) == pytest.approx(0.92)
    assert refusal({"kl_mean": 0.039}, BOUNDS) == ""
    assert refusal({"kl_mean": 0.041}, BOUNDS) == "kl_mean 0.041, at most 0.04 is needed"
    assert refusal({"kl_mean": float("nan")}, BOUNDS)
    assert excess({"kl_mean": 0.1, "top1_agreement": 0.95}, BOUNDS) == pytest.approx(2)


def test_a_share_of_few_inputs_is_refused_only_beyond_chance() -> None:
    """96 % of 99 inputs: 1.645 sqrt(0.96 0.04 / 99) = 0.0324, so 92 of them (0.9293) may well be 96 % of all."""
    bounds, few = {"top1_agreement_min": 0.95}, {"top1_agreement": 99}
    assert limit("top1_agreement_min", 0.95, few) == pytest.approx(0.96 - 0.0324, abs=1e-4)
    assert limit("top1_agreement_min", 1.0, few) == 1.0
    assert limit("kl_mean_max", 0.05, few) == pytest.approx(0.04)
    assert refusal({"top1_agreement": 92 / 99}, bounds, few) == ""
    assert refusal({"top1_agreement": 91 / 99}, bounds, few).startswith("top1_agreement 0.9192, at least 0.9276")
    assert refusal({"top1_agreement": 0.95}, bounds, {"top1_agreement": 10_000})


def test_the_smallest_within_the_bounds_is_found(tmp_path: Path) -> None:
    candidates = a_search(tmp_path)
    assert not candidates.attempt("int4", 10, 0.3)
    assert candidates.attempt("int8", 20, 0.001)
    assert candidates.attempt("mixed", 15, 0.03)
    found = candidates.search.found()
    assert found.record["chosen"] == "mixed"
    assert found.graphs["decoder"].path.stat().st_size == 15
    assert [trial["name"] for trial in found.record["tried"]] == ["int4", "int8", "mixed"]
    assert "0.04 is needed" in found.record["tried"][0]["refused"]
    assert candidates.built == ["int4", "int8", "mixed"]  # the last one built is not built again


def test_the_least_bad_is_kept_where_nothing_passes(tmp_path: Path) -> None:
    candidates = a_search(tmp_path)
    candidates.attempt("int4", 10, 0.3)
    candidates.attempt("int8", 20, 0.07)
    candidates.attempt("fp32", 80, 0.2)
    found = candidates.search.found()
    assert found.record["chosen"] == "int8"
    assert candidates.built == ["int4", "int8", "fp32", "int8"]


def test_a_search_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "searches" / "one.jsonl"
    first = a_search(tmp_path, Journal(path))
    first.attempt("int4", 10, 0.3)
    with path.open("a") as file:
        file.write('["trial int8", {"na')  # what an interrupt leaves
    again = a_search(tmp_path, Journal(path))
    assert not again.attempt("int4", 10, 0.3)
    assert again.attempt("int8", 20, 0.001)
    assert again.built == ["int8"]
    assert again.search.tried[0].bytes == 10


PLANTED = "/model/layers.1/mlp/down_proj/MatMul"


def save_llama(folder: Path, *, outlier: float = 1.0) -> Path:
    """A random model; one input channel in each block of the second layer's `down_proj` is `outlier` times the others.

    Its input is made as much smaller, so the layer computes what it would without; it weighs more than the others.
    """
    sizes = {**SIZES, "num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 512}
    save_model(folder, LlamaConfig(**sizes, tie_word_embeddings=True), scale=0.05)
    path = next(folder.glob("*.safetensors"))
    weights = load_file(path)
    weights["model.layers.1.mlp.down_proj.weight"][:, 3::32] *= outlier
    weights["model.layers.1.mlp.up_proj.weight"][3::32] /= outlier
    weights["model.layers.1.mlp.down_proj.weight"] *= 8
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def decide(folder: Path, tmp_path: Path, **bounds: float) -> tuple[Found, dict[str, str]]:
    """What auto decides for the model in `folder`, and the formats that were really written."""
    request: Request = request_for(folder, "auto")
    gates = {"text-generation": {"auto": bounds}}
    request = dataclasses.replace(request, profile=dataclasses.replace(request.profile, gates=gates))
    export = tmp_path / "export"
    export.mkdir()
    graphs = RECIPE.export(request, export)
    found = RECIPE.search(request, graphs, RECIPE.reference(request), tmp_path / "work")
    graph = found.graphs["decoder"]
    return found, read_back(graph.path, graph.cache).formats


def layers(formats: dict[str, str], kind: str) -> set[str]:
    return {
        name.removesuffix("/MatMul") for name, form in formats.items() if form.startswith(kind) and "/layers" in name
    }


def test_all_int4_is_taken_where_it_passes(tmp_path: Path) -> None:
    found, formats = decide(save_llama(tmp_path / "m"), tmp_path, kl_mean_max=1.0)
    assert found.record["chosen"] == "int4"
    assert len(layers(formats, "int4")) == 12
    assert not layers(formats, "int8")


def test_a_layer_that_int4_ruins_goes_back_to_int8(tmp_path: Path) -> None:
    found, formats = decide(save_llama(tmp_path / "m", outlier=60), tmp_path, kl_mean_max=0.0125)
    assert [trial["name"] for trial in found.record["tried"]][:3] == ["int4", "int4, finer blocks", "int8"]
    assert found.record["tried"][1]["refused"]
    assert max(found.record["costs"], key=found.record["costs"].get) == PLANTED
    wide = layers(formats, "int8")
    assert PLANTED.removesuffix("/MatMul") in wide, (found.record, formats)
    assert len(wide) <= 2, found.record


@pytest.mark.parametrize("outlier", [1000, 3000])
def test_a_layer_that_int8_ruins_stays_in_fp32(tmp_path: Path, outlier: float) -> None:
    found, formats = decide(save_llama(tmp_path / "m", outlier=outlier), tmp_path, kl_mean_max=0.01)
    assert found.record["chosen"] == "int8, 1 of 12 layers in fp32", found.record
    assert layers(formats, "fp32") == {PLANTED.removesuffix("/MatMul")}
    assert len(layers(formats, "int8")) == 11


@pytest.mark.parametrize("kind", ["Q4_1", "F32"])
def test_the_report_has_the_divergence_of_both_ways_from_a_grid(tmp_path: Path, kind: str) -> None:
    source = write_gguf(tmp_path / "model.gguf", kind=kind)
    result = convert(str(source), target="cpu", output=tmp_path / "out")
    tried = {trial["name"]: trial for trial in result.bundle.manifest.quantisation["tried"]}
    assert result.report is not None
    told = [note for note in result.report.notes if "grid" in note]
    if kind == "F32":
        assert "int4, rounded to nearest again" not in tried
        assert not told
        return
    kept, again = tried["int4"], tried["int4, rounded to nearest again"]
    assert kept["metrics"]["kl_mean"] < again["metrics"]["kl_mean"] / 10
    assert told == [
        f"8 of 9 layers of the source lie on a 4-bit grid. KL divergence on calibration texts: "
        f"{kept['metrics']['kl_mean']:.4g} with that grid kept ({kept['bytes'] / 1e6:.1f} MB), "
        f"{again['metrics']['kl_mean']:.4g} rounded to nearest again ({again['bytes'] / 1e6:.1f} MB)."
    ]


def test_a_grid_is_kept_though_rounding_again_is_smaller_and_passes(tmp_path: Path) -> None:
    found, _ = decide(write_gguf(tmp_path / "model.gguf", kind="Q4_1"), tmp_path, kl_mean_max=1.0)
    kept, again = found.record["tried"]
    assert found.record["chosen"] == kept["name"] == "int4"
    assert kept["bytes"] > again["bytes"]
    assert again["refused"] == "the source's own grid is kept, which is exact"
    assert len(found.notes) == 1


def test_nothing_passes_and_the_best_is_named(tmp_path: Path) -> None:
    found, _ = decide(save_llama(tmp_path / "m"), tmp_path, kl_mean_max=1e-30)
    assert found.record["chosen"] == "fp32"
    assert all(trial["refused"] for trial in found.record["tried"])


def test_the_bundle_says_what_was_decided(tmp_path: Path) -> None:
    result = convert(str(save_llama(tmp_path / "m")), target="cpu", output=tmp_path / "out")
    manifest = Bundle.open(tmp_path / "out").manifest
    assert manifest.precision == "auto"
    assert manifest.quantisation["chosen"] == result.bundle.manifest.quantisation["chosen"]
    assert manifest.quantisation["tried"]
    assert layers(manifest.graphs["decoder"].formats, "int")
    assert len(tables(manifest)) == 2


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "m", outlier=float("nan"))
    with pytest.raises(SourceError, match=r"has \d+ values that are not finite numbers"):
        convert(str(folder), target="cpu", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_calibration_texts_are_not_those_that_judge(tmp_path: Path) -> None:
    texts = calibration_texts(None)
    assert len(texts) >= 16
    assert not set(texts) & set(load_texts())
    assert len({len(text) for text in texts}) > 8


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has 0 different texts"),
        ({"a.txt": b"one text that is long enough\n"}, "has 1 different texts"),
        ({"a.txt": b"\xff\xfe broken \x80\x81"}, "a.txt cannot be read"),
    ],
)
def test_bad_calibration_texts_are_named(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(ConversionError, match=message):
        calibration_texts(folder)
    with pytest.raises(ConversionError, match="does not exist"):
        calibration_texts(tmp_path / "gone")


def test_missing_calibration_texts_stop_before_the_export(tmp_path: Path) -> None:
    stages: list[str] = []
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConversionError, match="has 0 different texts"):
        convert(
            str(save_llama(tmp_path / "m")),
            target="cpu",
            output=tmp_path / "out",
            calibration=tmp_path / "empty",
            progress=stages.append,
        )
    assert stages == ["checking the source"]
    assert not (tmp_path / "out").exists()


def test_the_users_texts_are_read_line_by_line(tmp_path: Path) -> None:
    lines = [f"This is text number {index} of the user.\\nIt has two lines." for index in range(9)]
    (tmp_path / "a.txt").write_text("\n".join(lines), "utf-8")
    found = calibration_texts(tmp_path)
    assert len(found) == 9
    assert found[0].count("\n") == 1
    assert np.all([text.startswith("This is") for text in found])


def test_texts_of_an_npz_file(tmp_path: Path) -> None:
    lines = [f"This is text number {index} of the user." for index in range(9)]
    path = tmp_path / "texts.npz"
    np.savez(path, texts=np.array([*lines, lines[0], "short"]), input_ids=np.zeros((2, 3)))
    assert calibration_texts(path) == lines
    np.savez(path, texts=np.array(lines[:3]))
    with pytest.raises(ConversionError, match="has 3 different texts"):
        calibration_texts(path)
    np.savez(path, input_ids=np.zeros((9, 4), np.int64))
    with pytest.raises(ConversionError, match=r"int64 \(9, 4\).*not of token ids"):
        calibration_texts(path)
