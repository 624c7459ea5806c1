from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from edge_convert.runtime.errors import ManifestError
from edge_convert.runtime.manifest import (
    CacheSpec,
    FileSpec,
    GraphSpec,
    Manifest,
    SourceSpec,
    TensorSpec,
    check_file_name,
)


def example() -> Manifest:
    cache = CacheSpec(("past.0",), ("present.0",), kv_heads=3, head_dim=64, max_length=2048)
    graph = GraphSpec(
        file="decoder.onnx",
        inputs=(TensorSpec("input_ids", "int64", ("batch", "sequence")),),
        outputs=(TensorSpec("logits", "float32", ("batch", 1, 7)),),
        ir_version=10,
        opsets={"": 21, "com.microsoft": 1},
        node_counts={"MatMul": 2},
        initializer_bytes={"float32": 16},
        cache=cache,
        products={"int8": 1, "fp32": 1},
        fp32_nodes=("/head/MatMul",),
        onnxruntime_min="1.23",
    )
    return Manifest(
        task="text-generation",
        target="cpu",
        precision="fp32",
        source=SourceSpec("huggingface", "someone/model", "ab" * 32),
        graphs={"decoder": graph},
        processing={"tokenizer": "tokenizer.json", "eos_token_ids": [1, 2], "bos_token": None},
        files={"decoder.onnx": FileSpec(3, "0" * 64), "data/tokenizer.json": FileSpec(0, "f" * 64)},
        tools={"onnx": "1.23"},
        created="2026-01-01T00:00:00Z",
    )


def changed(where: list[str | int], value: Any) -> str:
    content = json.loads(example().to_json())
    place = content
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    return json.dumps(content)


def test_round_trip_is_equal() -> None:
    assert Manifest.from_json(example().to_json()) == example()


def test_text_beyond_ascii_survives() -> None:
    text = changed(["source", "name"], "模型 é")
    again = Manifest.from_json(text)
    assert again.source.name == "模型 é"
    assert "模型" in again.to_json()


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (["colour"], "red", "unknown key 'colour'"),
        (["graphs", "decoder", "colour"], "red", "unknown key 'colour'"),
        (["graphs", "decoder", "cache", "colour"], 1, "unknown key 'colour'"),
        (["source", "path"], "/home", "unknown key 'path'"),
        (["task"], "chess", "unknown task 'chess'"),
        (["precision"], "fp8", "unknown precision 'fp8'"),
        (["schema_version"], 1, "schema version 1"),
        (["target"], 5, "manifest.target"),
        (["warnings"], "text", "manifest.warnings"),
        (["warnings"], [1], r"warnings\[0\]"),
        (["graphs", "decoder", "ir_version"], "10", "ir_version"),
        (["graphs", "decoder", "ir_version"], True, "ir_version"),
        (["graphs", "decoder", "inputs", 0, "dtype"], "float33", "'float33'"),
        (["graphs", "decoder", "inputs", 0, "shape"], [1.5], "shape"),
        (["graphs", "decoder", "file"], "other.onnx", "not among the files"),
        (["graphs", "decoder", "cache", "past"], [], "as many past"),
        (["graphs", "decoder", "cache", "head_dim"], 0, "positive"),
        (["graphs", "decoder", "products"], {"fp8": 1}, "unknown type 'fp8'"),
        (["graphs", "decoder", "products"], {"int8": 0}, "products in int8"),
        (["graphs", "decoder", "fp32_nodes"], ["a", "a"], "twice"),
        (["graphs", "decoder", "onnxruntime_min"], "new", "'new', not a release"),
        (["graphs", "decoder", "fp32_nodes"], [1], r"fp32_nodes\[0\]"),
        (["files", "decoder.onnx", "size"], -1, "size"),
        (["files", "decoder.onnx", "sha256"], "F" * 64, "SHA-256"),
        (["files", "../evil"], {"size": 1, "sha256": "0" * 64}, "'../evil'"),
        (["files"], None, "manifest.files"),
        (["files", "decoder.onnx", "size"], 1 << 60, "size"),
        (["graphs", "decoder", "cache", "head_dim"], 10**6, "head_dim"),
        (["graphs", "decoder", "cache", "kv_heads"], 10**30, "kv_heads"),
        (["graphs", "decoder", "cache", "max_length"], 10**9, "max_length"),
        (["graphs", "decoder", "cache", "past"], ["present.0"], "twice"),
        (["graphs", "decoder", "inputs", 0, "shape"], [-1], "dimension of tensor 'input_ids'"),
        (["graphs", "decoder", "inputs", 0, "shape"], [10**30], "dimension of tensor 'input_ids'"),
        (["source", "name"], "a\ud800", "surrogate"),
        (["processing", "\udfff"], 1, "surrogate"),
        (["extra"], {"x": ["\ud800"]}, "surrogate"),
        (["extra"], {"x": float("nan")}, "NaN"),
        (["extra"], {"x": float("-inf")}, "-Infinity"),
    ],
)
def test_what_the_schema_does_not_have_is_refused(where: list[str | int], value: Any, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        Manifest.from_json(changed(where, value))


@pytest.mark.parametrize("key", ["formats", "products", "fp32_nodes", "onnxruntime_min"])
def test_a_graph_without_what_was_added_later_is_read(key: str) -> None:
    content = json.loads(example().to_json())
    del content["graphs"]["decoder"][key]
    assert not getattr(Manifest.from_json(json.dumps(content)).graphs["decoder"], key)


@pytest.mark.parametrize("key", ["task", "target", "files", "graphs", "schema_version", "source"])
def test_a_missing_key_is_named(key: str) -> None:
    content = json.loads(example().to_json())
    del content[key]
    with pytest.raises(ManifestError, match=key):
        Manifest.from_json(json.dumps(content))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "[" * 100_000, '"text"'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_json(text)


@pytest.mark.parametrize("name", ["a", "a.onnx", "sub/a.json", ".hidden", "a b.txt", "é.txt", "..a"])
def test_plain_file_names(name: str) -> None:
    assert check_file_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "../a", "a/../b", "/a", "a//b", "a/", "./a", "a\\b", "C:a", "a\0b", "manifest.json", " a",
        "a ", "sub/ a", "a\n", "a\x1b[0m",
    ],
)  # fmt: skip
def test_other_file_names_are_refused(name: str) -> None:
    with pytest.raises(ManifestError):
        check_file_name(name)


def test_a_cache_that_no_machine_holds_is_refused() -> None:
    with pytest.raises(ManifestError, match="number of values"):
        CacheSpec(("a",), ("b",), kv_heads=1 << 16, head_dim=1 << 16, max_length=1 << 20)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 5000])
def test_numbers_that_python_cannot_hold_are_refused(number: str) -> None:
    text = example().to_json().replace('"extra": {}', f'"extra": {{"x": {number}}}')
    if number.isdigit():
        text = text.replace('"ir_version": 10', f'"ir_version": {number}.5')
    with pytest.raises(ManifestError):
        Manifest.from_json(text)


@pytest.mark.parametrize("value", [float("nan"), "\ud800", {1, 2}])
def test_what_cannot_be_read_back_is_not_written(value: Any) -> None:
    with pytest.raises(ManifestError, match="cannot be written"):
        dataclasses.replace(example(), extra={"x": value}).to_json()


@pytest.mark.parametrize(
    "where",
    [
        ["task"], ["precision"], ["x" * 10**5], ["files", "/" + "x" * 10**5], ["graphs", "x" * 10**5],
        ["graphs", "decoder", "file"], ["graphs", "decoder", "inputs", 0, "dtype"], ["tools", "x\n" * 10**5],
    ],
)  # fmt: skip
def test_messages_stay_short_and_on_one_line(where: list[str | int]) -> None:
    value: Any = 1.5 if where[0] in ("tools", "graphs") and len(where) == 2 else "y" * 10**5
    with pytest.raises(ManifestError) as caught:
        Manifest.from_json(changed(where, value))
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_a_newer_manifest_says_so_before_its_keys() -> None:
    content = json.loads(example().to_json()) | {"schema_version": 3, "invented_later": 1}
    with pytest.raises(ManifestError, match="schema version 3"):
        Manifest.from_json(json.dumps(content))
