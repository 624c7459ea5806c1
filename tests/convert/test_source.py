"""Opening sources: what is accepted, and one clear sentence for each kind of broken input."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from gguf_files import write_gguf

from edge_convert.convert.source import detect_task, open_source
from edge_convert.runtime.errors import SourceError, UnsupportedModelError


def write_safetensors(path: Path, *, cut: int = 0) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(16)
    path.write_bytes(content[: len(content) - cut])


def write_folder(folder: Path, architecture: str = "LlamaForCausalLM", *, cut: int = 0) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "llama"}))
    write_safetensors(folder / "model.safetensors", cut=cut)
    return folder


def test_folder_is_opened_and_hashed(tmp_path: Path) -> None:
    source = open_source(str(write_folder(tmp_path / "tiny")))
    assert (source.kind, source.name, detect_task(source)) == ("huggingface", "tiny", "text-generation")
    other = open_source(str(write_folder(tmp_path / "other", "Qwen3ForCausalLM")))
    assert source.sha256 != other.sha256


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="does not exist"):
        open_source(str(tmp_path / "nowhere"))


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is empty"):
        open_source(str(tmp_path))


def test_config_without_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    with pytest.raises(SourceError, match=r"no .*safetensors weights"):
        open_source(str(folder))


@pytest.mark.parametrize("cut", [1, 16, 40, 200], ids=["last byte", "all data", "in header", "everything"])
def test_truncated_safetensors(tmp_path: Path, cut: int) -> None:
    with pytest.raises(SourceError, match=r"truncated|not a whole"):
        open_source(str(write_folder(tmp_path / "tiny", cut=cut)))


def test_config_that_is_not_json(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    (folder / "config.json").write_text("{")
    with pytest.raises(SourceError, match="not JSON"):
        open_source(str(folder))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\x01" * 64, b"nope" * 10])
def test_broken_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(SourceError):
        open_source(str(path))


def test_truncated_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    assert open_source(str(path)).config["model_type"] == "llama"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(SourceError, match="truncated"):
        open_source(str(path))


def test_unknown_architecture_lists_what_was_found(tmp_path: Path) -> None:
    source = open_source(str(write_folder(tmp_path / "odd", "FrobnicatorForTelepathy")))
    with pytest.raises(UnsupportedModelError, match=r"FrobnicatorForTelepathy.*text-generation"):
        detect_task(source)


def test_hub_id_without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=r"could not be fetched from the hub.*network"):
        open_source("some-org/some-model")


def write_onnx(path: Path, location: str, **entries: int | str) -> Path:
    """y = x + w with w, 16 bytes, in the file `location`."""
    from onnx import TensorProto, helper

    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        weight.external_data.add(key=key, value=str(value))
    node = helper.make_node("Add", ["x", "w"], ["y"])
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y")]
    graph = helper.make_graph([node], "g", value[:1], value[1:], [weight])
    path.write_bytes(helper.make_model(graph).SerializeToString())
    return path


@pytest.fixture
def onnx_place(tmp_path: Path) -> Path:
    """A folder with 16 bytes as a file, behind a link, in a linked folder and as a hard link; 40 elsewhere."""
    folder, elsewhere = tmp_path / "in", tmp_path / "elsewhere"
    for place in (folder, elsewhere):
        place.mkdir()
        (place / "w.bin").write_bytes(bytes(16))
    (elsewhere / "hard.bin").write_bytes(bytes(16))
    (folder / "inner").mkdir()
    (folder / "inner/w.bin").write_bytes(bytes(16))
    (folder / "link.bin").symlink_to(elsewhere / "w.bin")
    (folder / "near").symlink_to(folder / "inner")
    (folder / "far").symlink_to(elsewhere)
    (folder / "hard.bin").hardlink_to(elsewhere / "hard.bin")
    return folder


@pytest.mark.parametrize("location", ["w.bin", "inner/w.bin"])
def test_onnx_with_external_data_beside_it(onnx_place: Path, location: str) -> None:
    path = write_onnx(onnx_place / "model.onnx", location, offset=0, length=16)
    first = open_source(str(path)).sha256
    (onnx_place / location).write_bytes(bytes(15) + b"x")
    assert open_source(str(path)).sha256 != first


@pytest.mark.parametrize(
    ("location", "entries", "message"),
    [
        ("../elsewhere/w.bin", {}, "outside its folder"),
        ("", {}, "outside its folder"),
        ("link.bin", {}, "behind a link"),
        ("near/w.bin", {}, "behind a link"),
        ("far/w.bin", {}, "behind a link"),
        ("hard.bin", {}, "hard link"),
        ("model.onnx", {}, "in itself"),
        ("none.bin", {}, "missing"),
        ("inner", {}, "missing"),
        ("w\0.bin", {}, "name cannot be used"),
        ("a" * 300, {}, "name cannot be used"),
        ("w.bin", {"offset": 4}, "16 bytes at 4 of 'w.bin'.*the file has 16"),
        ("w.bin", {"offset": -1}, "at -1"),
        ("w.bin", {"offset": 10**12}, "the file has 16"),
        ("w.bin", {"length": 10**12}, "the file has 16"),
        ("w.bin", {"length": 8}, "takes 8 bytes .* for the 16"),
        ("w.bin", {"offset": "x"}, "an offset, length or type that is none"),
    ],
)
def test_onnx_with_external_data_that_is_refused(
    onnx_place: Path, location: str, entries: dict[str, int | str], message: str
) -> None:
    path = write_onnx(onnx_place / "model.onnx", location, **entries)
    with pytest.raises(SourceError, match=message):
        open_source(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"architectures": 5}', "architectures 5"),
        ('{"architectures": true}', "architectures True"),
        ('{"architectures": [5]}', r"architectures \[5\]"),
        ('{"architectures": "LlamaForCausalLM"}', "a list of names"),
        ('{"model_type": ["llama"]}', "model_type"),
        ("[" * 200_000, "nested too deeply"),
        ("[]", "not a JSON object"),
        ('{"num_hidden_layers": 2147483648}', "2147483648 layers, and the weights have 1 tensors"),
        ('{"text_config": {"num_hidden_layers": 9}}', "9 layers"),
    ],
)
def test_config_with_other_types(tmp_path: Path, content: str, message: str) -> None:
    folder = write_folder(tmp_path / "tiny")
    (folder / "config.json").write_text(content)
    with pytest.raises(SourceError, match=message):
        open_source(str(folder))


def test_safetensors_header_that_is_nested_too_deeply(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    header = b"[" * 200_000
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(SourceError, match="not a whole"):
        open_source(str(folder))


def test_onnx_that_is_not_a_model(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"not protobuf at all")
    with pytest.raises(SourceError, match="not an ONNX model"):
        open_source(str(path))


def test_file_of_unknown_kind(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    with pytest.raises(SourceError, match="no known kind"):
        open_source(str(path))


@pytest.mark.parametrize("text", ["no_such_module_x:build", "json:no_such_factory", "missing.py:build"])
def test_factory_that_does_not_exist(text: str) -> None:
    with pytest.raises(SourceError):
        open_source(text)
