"""An export is made once for the same source, and never taken from a damaged or foreign entry."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from edge_convert.convert import export_cache
from edge_convert.convert.export_cache import cached_export, export_key
from edge_convert.convert.recipe import Exported, Recipe, Request
from edge_convert.convert.source import Source
from edge_convert.runtime.device import load_profile
from edge_convert.runtime.manifest import CacheSpec

SPEC = CacheSpec(("past.0",), ("present.0",), kv_heads=1, head_dim=8, max_length=4)


class Counting:
    """A recipe's export that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, request: Request, folder: Path) -> dict[str, Exported]:
        self.calls += 1
        (folder / "decoder.onnx").write_bytes(b"graph")
        (folder / "decoder.onnx.data").write_bytes(b"weights" * 10)
        return {"decoder": Exported(folder / "decoder.onnx", SPEC)}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(export_cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_request(precision: str = "int8", *, kind: str = "huggingface", sha256: str = "a" * 64) -> Request:
    source = Source(kind, "x", Path("x"), {}, sha256, "x")
    return Request(source, load_profile("cpu"), precision, None, None, lambda _: None)


def export(export_step: Counting, request: Request, folder: Path) -> dict[str, Exported]:
    unused: Any = None
    recipe = Recipe("text-generation", ("int8", "int4"), export_step, unused, unused, unused, unused)
    folder.mkdir(parents=True)
    return cached_export(request, recipe, folder)


def test_a_second_precision_does_not_export_again(place: Path, tmp_path: Path) -> None:
    step = Counting()
    first = export(step, make_request("int8"), tmp_path / "1")
    second = export(step, make_request("int4"), tmp_path / "2")
    assert step.calls == 1
    assert second["decoder"].cache == first["decoder"].cache == SPEC
    assert second["decoder"].path.parent == tmp_path / "2"
    assert (tmp_path / "2" / "decoder.onnx.data").read_bytes() == b"weights" * 10


@pytest.mark.parametrize(
    "other",
    [make_request(sha256="b" * 64), make_request("fp16"), dataclasses.replace(make_request(), context_tokens=7)],
    ids=["source", "fp16", "context"],
)
def test_what_an_export_depends_on_is_in_its_key(other: Request) -> None:
    assert export_key(make_request(), "text-generation") != export_key(other, "text-generation")
    assert export_key(other, "text-generation") != export_key(other, "feature-extraction")


@pytest.mark.parametrize("damage", ["decoder.onnx.data", "index.json"])
def test_a_damaged_entry_is_exported_again(place: Path, tmp_path: Path, damage: str) -> None:
    step = Counting()
    export(step, make_request(), tmp_path / "1")
    entry = next(path for path in place.iterdir())
    (entry / damage).write_bytes(b"{}")
    export(step, make_request(), tmp_path / "2")
    assert step.calls == 2
    assert (tmp_path / "2" / "decoder.onnx.data").read_bytes() == b"weights" * 10
    export(step, make_request(), tmp_path / "3")
    assert step.calls == 2


def test_a_factory_is_always_exported(place: Path, tmp_path: Path) -> None:
    step = Counting()
    for name in ("1", "2"):
        export(step, make_request(kind="module"), tmp_path / name)
    assert step.calls == 2
    assert not place.exists()


def test_an_empty_variable_turns_the_cache_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(export_cache.VARIABLE, "")
    step = Counting()
    for name in ("1", "2"):
        export(step, make_request(), tmp_path / name)
    assert step.calls == 2


def test_a_cache_that_cannot_be_written_is_no_failure(place: Path, tmp_path: Path) -> None:
    place.write_text("a file where the folder should be")
    step = Counting()
    assert export(step, make_request(), tmp_path / "1")["decoder"].path.is_file()


def test_the_oldest_entries_go_first(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Counting()
    export(step, make_request(sha256="1" * 64), tmp_path / "1")
    monkeypatch.setattr(export_cache, "MAX_BYTES", 500)
    export(step, make_request(sha256="2" * 64), tmp_path / "2")
    export(step, make_request(sha256="2" * 64), tmp_path / "3")
    assert step.calls == 2
    assert len(list(place.iterdir())) == 1
