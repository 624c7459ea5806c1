from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge_convert.runtime import staging
from edge_convert.runtime.bundle import Bundle, collect_files, hash_file, staged, write_manifest
from edge_convert.runtime.errors import (
    BundleError,
    ChecksumError,
    ManifestError,
    OutputError,
    UnknownNameError,
    UsageError,
)
from edge_convert.runtime.manifest import GraphSpec, Manifest, SourceSpec, TensorSpec


def make(folder: Path) -> Path:
    """A bundle with a graph that is no ONNX, its external data and a file in a sub-folder."""
    (folder / "text").mkdir(parents=True)
    (folder / "encoder.onnx").write_bytes(b"graph")
    (folder / "encoder.onnx.data").write_bytes(b"weights" * 1000)
    (folder / "text" / "tokenizer.json").write_text("{}", encoding="utf-8")
    spec = (TensorSpec("x", "float32", ("batch",)),)
    manifest = Manifest(
        task="feature-extraction",
        target="cpu",
        precision="fp32",
        source=SourceSpec("onnx", "example", "0" * 64),
        graphs={"encoder": GraphSpec("encoder.onnx", spec, spec, 10, {"": 21}, {}, {})},
        processing={},
        files=collect_files(folder),
        tools={},
        created="2026-01-01T00:00:00Z",
    )
    write_manifest(folder, manifest)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "bundle")


def rewrite(folder: Path, change: object) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    assert callable(change)
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_open_reads_back_what_was_written(folder: Path) -> None:
    bundle = Bundle.open(folder)
    assert set(bundle.manifest.files) == {"encoder.onnx", "encoder.onnx.data", "text/tokenizer.json"}
    assert bundle.file("text/tokenizer.json").read_text(encoding="utf-8") == "{}"
    assert bundle.profile.name == "cpu"


def test_open_takes_text_relative_paths_and_a_link_to_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Bundle.open("bundle").path == folder.resolve()
    (tmp_path / "current").symlink_to(folder)
    assert Bundle.open(tmp_path / "current").path == folder.resolve()


def test_hash_file_is_sha256_of_all_bytes(tmp_path: Path) -> None:
    data = os.urandom((1 << 20) + 17)
    (tmp_path / "big").write_bytes(data)
    spec = hash_file(tmp_path / "big")
    assert (spec.size, spec.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_a_changed_byte_is_found(folder: Path) -> None:
    path = folder / "encoder.onnx.data"
    data = bytearray(path.read_bytes())
    data[3000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError, match=r"encoder\.onnx\.data"):
        Bundle.open(folder)
    Bundle.open(folder, verify=False)


@pytest.mark.parametrize("verify", [True, False])
def test_a_changed_size_is_found(folder: Path, verify: bool) -> None:
    (folder / "encoder.onnx").write_bytes(b"grap")
    with pytest.raises(ChecksumError, match="4 bytes"):
        Bundle.open(folder, verify=verify)


@pytest.mark.parametrize("verify", [True, False])
def test_a_missing_file_is_named(folder: Path, verify: bool) -> None:
    (folder / "text" / "tokenizer.json").unlink()
    with pytest.raises(BundleError, match=r"lacks the file 'text/tokenizer.json'"):
        Bundle.open(folder, verify=verify)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", ["extra.bin", "text/extra.bin", ".hidden", "text/manifest.json"])
def test_an_extra_file_is_named(folder: Path, name: str, verify: bool) -> None:
    (folder / name).write_bytes(b"")
    with pytest.raises(BundleError, match=f"'{name}', which its manifest does not list"):
        Bundle.open(folder, verify=verify)


def test_external_data_must_be_listed(folder: Path) -> None:
    rewrite(folder, lambda content: content["files"].pop("encoder.onnx.data"))
    with pytest.raises(BundleError, match=r"encoder\.onnx\.data.*does not list"):
        Bundle.open(folder)


def test_an_extra_key_in_the_manifest_is_refused(folder: Path) -> None:
    rewrite(folder, lambda content: content.update(run_as_root=True))
    with pytest.raises(ManifestError, match="run_as_root"):
        Bundle.open(folder)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "text/../../outside"])
def test_a_name_that_leaves_the_bundle_is_refused(folder: Path, name: str) -> None:
    (folder.parent / "outside").write_bytes(b"")
    rewrite(folder, lambda content: content["files"].update({name: {"size": 0, "sha256": "0" * 64}}))
    with pytest.raises(ManifestError, match="refused"):
        Bundle.open(folder)


@pytest.mark.parametrize("verify", [True, False])
def test_a_linked_file_is_refused(folder: Path, verify: bool) -> None:
    (folder / "encoder.onnx").rename(folder.parent / "elsewhere")
    (folder / "encoder.onnx").symlink_to(folder.parent / "elsewhere")
    with pytest.raises(BundleError, match=r"'encoder\.onnx' is a link"):
        Bundle.open(folder, verify=verify)


def test_a_linked_folder_and_a_dangling_link_are_refused(folder: Path) -> None:
    (folder / "text").rename(folder.parent / "elsewhere")
    (folder / "text").symlink_to(folder.parent / "elsewhere")
    with pytest.raises(BundleError, match="'text' is a link"):
        Bundle.open(folder)
    (folder / "text").unlink()
    (folder / "text").symlink_to(folder / "nowhere")
    with pytest.raises(BundleError, match="'text' is a link"):
        Bundle.open(folder)
    with pytest.raises(BundleError, match="'text' is a link"):
        collect_files(folder)


def test_a_linked_manifest_is_refused(folder: Path) -> None:
    (folder / "manifest.json").rename(folder.parent / "m.json")
    (folder / "manifest.json").symlink_to(folder.parent / "m.json")
    with pytest.raises(BundleError, match="not a plain file"):
        Bundle.open(folder)


def test_a_named_pipe_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(BundleError, match="special file"):
        Bundle.open(folder)


def test_what_is_no_bundle_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="There is no bundle"):
        Bundle.open(tmp_path / "absent")
    with pytest.raises(BundleError, match="is a file"):
        Bundle.open(folder / "encoder.onnx")
    with pytest.raises(BundleError, match=r"no manifest\.json"):
        Bundle.open(folder / "text")
    (folder / "manifest.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ManifestError, match="UTF-8"):
        Bundle.open(folder)


def test_unknown_file_and_unknown_role(folder: Path) -> None:
    bundle = Bundle.open(folder)
    for name in ("manifest.json", "../bundle/encoder.onnx", "absent"):
        with pytest.raises(BundleError, match="has no file"):
            bundle.file(name)
    with pytest.raises(UnknownNameError, match="encoder"):
        bundle.session("decoder")


def test_update_file_adds_and_replaces(folder: Path) -> None:
    bundle = Bundle.open(folder)
    bundle.update_file("report.json", b"first")
    bundle.update_file("notes/a.txt", b"a")
    bundle.update_file("report.json", b"second")
    again = Bundle.open(folder)
    assert again.manifest == bundle.manifest
    assert again.file("report.json").read_bytes() == b"second"
    assert again.file("notes/a.txt").read_bytes() == b"a"
    assert len(again.manifest.files) == 5


@pytest.mark.parametrize("name", ["../x", "manifest.json", "/x", ""])
def test_update_file_refuses_other_names(folder: Path, name: str) -> None:
    with pytest.raises(ManifestError):
        Bundle.open(folder).update_file(name, b"")
    assert names(folder.parent) == {"bundle"}


def test_update_file_does_not_write_through_a_linked_folder(folder: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(folder)
    (tmp_path / "outside").mkdir()
    (folder / "linked").symlink_to(tmp_path / "outside")
    with pytest.raises(BundleError, match="outside"):
        bundle.update_file("linked/x", b"")
    assert names(tmp_path / "outside") == set()


def test_a_failed_update_leaves_the_bundle_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(folder)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BundleError, match="No space left"):
        bundle.update_file("report.json", b"x")
    monkeypatch.undo()
    assert Bundle.open(folder).manifest == bundle.manifest


def test_staged_moves_the_whole_folder_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    with staged(tmp_path / "a" / "b" / "out", force=False) as folder:
        assert folder.parent == tmp_path / "a" / "b"
        assert not (tmp_path / "a" / "b" / "out").exists()
        make(folder)
    Bundle.open(tmp_path / "a" / "b" / "out")
    assert names(tmp_path / "a" / "b") == {"out"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with staged(tmp_path / "a" / "out", force=False) as folder:
            make(folder)
            raise error

    with pytest.raises(error):
        fail()
    assert names(tmp_path) == set()


def test_an_exception_keeps_the_old_bundle(tmp_path: Path) -> None:
    old = make(tmp_path / "out")

    def fail() -> None:
        with staged(old, force=True):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    Bundle.open(old)
    assert names(tmp_path) == {"out"}


def enter(destination: Path, *, force: bool) -> None:
    with staged(destination, force=force) as folder:
        (folder / "new").write_bytes(b"")


def test_an_existing_output_needs_force(tmp_path: Path) -> None:
    make(tmp_path / "out")
    with pytest.raises(OutputError, match=r"exists.*--force"):
        enter(tmp_path / "out", force=False)
    Bundle.open(tmp_path / "out")


@pytest.mark.parametrize("atomic", [True, False])
def test_force_replaces_a_bundle(tmp_path: Path, atomic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "out")
    if not atomic:
        monkeypatch.setattr(staging, "_exchange", lambda _first, _second: False)
    enter(tmp_path / "out", force=True)
    assert names(tmp_path) == {"out"}
    assert names(tmp_path / "out") == {"new"}


def test_a_failed_replacement_keeps_the_old_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "out")
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(13, "Permission denied")
        return real(self, target)

    monkeypatch.setattr(staging, "_exchange", lambda _first, _second: False)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OutputError, match="cannot be moved"):
        enter(tmp_path / "out", force=True)
    monkeypatch.undo()
    Bundle.open(tmp_path / "out")
    assert names(tmp_path) == {"out"}


def test_force_replaces_a_bundle_of_an_older_schema_version(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    make(folder)
    rewrite(folder, lambda content: content.update(schema_version=1, of_that_version=True))
    (folder / "mine.txt").write_text("not listed")
    with pytest.raises(OutputError, match=r"holds 'mine\.txt'"):
        enter(folder, force=True)
    (folder / "mine.txt").unlink()
    enter(folder, force=True)
    assert names(folder) == {"new"}


def test_force_never_replaces_what_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_bytes(b"")
    with pytest.raises(OutputError, match="not replaced"):
        enter(tmp_path / "home", force=True)
    assert names(tmp_path / "home") == {"thesis.tex"}
    (tmp_path / "empty").mkdir()
    enter(tmp_path / "empty", force=True)
    assert names(tmp_path / "empty") == {"new"}


@pytest.mark.parametrize("force", [True, False])
def test_a_file_or_a_link_as_output_is_refused(tmp_path: Path, force: bool) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(OutputError, match="is a file"):
        enter(tmp_path / "file", force=force)
    with pytest.raises(OutputError, match="cannot be written"):
        enter(tmp_path / "file" / "below", force=force)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match="is a link"):
        enter(tmp_path / "link", force=force)
    assert (tmp_path / "file").read_bytes() == b"kept"
    assert names(tmp_path) == {"file", "link"}


def test_an_unwritable_parent_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_args: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)  # the tests may run as root, whom no mode bits stop
    with pytest.raises(OutputError, match="Permission denied"):
        enter(tmp_path / "out", force=False)


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    def fail() -> None:
        with staged(tmp_path / "out", force=False):
            raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match="disk is full"):
        fail()
    assert names(tmp_path) == set()


def test_an_output_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    def race() -> None:
        with staged(tmp_path / "out", force=False):
            make(tmp_path / "out")

    with pytest.raises(OutputError, match="exists"):
        race()
    Bundle.open(tmp_path / "out")


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    def fail() -> None:
        with staged(tmp_path / "out", force=False):
            raise FileNotFoundError(2, "weights are missing")

    with pytest.raises(FileNotFoundError, match="weights"):
        fail()


def test_importing_the_runtime_is_cheap() -> None:
    code = (
        "import sys, edge_convert.runtime as r; assert 'Bundle' in dir(r); "
        "assert not {'onnxruntime', 'numpy', 'yaml', 'torch', 'onnx'} & set(sys.modules)\n"
        "r.Bundle; r.Session; r.Manifest; r.load_profile('jetson'); r.available_cpus()\n"
        "assert not {'onnxruntime', 'torch', 'onnx', 'transformers'} & set(sys.modules)\n"
        "try:\n    r.nothing\nexcept AttributeError:\n    pass\nelse:\n    raise SystemExit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_public_name_of_the_runtime_exists() -> None:
    import edge_convert.runtime as runtime

    for name in runtime.__all__:
        assert getattr(runtime, name).__name__ == name


def refused(destination: Path, message: str) -> None:
    before = {path: path.read_bytes() for path in destination.rglob("*") if path.is_file()}
    with pytest.raises(OutputError, match=message) as caught:
        enter(destination, force=True)
    assert "not replaced" in str(caught.value)
    assert {path: path.read_bytes() for path in destination.rglob("*") if path.is_file()} == before
    assert names(destination.parent) == {destination.name}


@pytest.mark.parametrize(
    "manifest", ['{"manifest_version": 3, "name": "extension", "version": "1"}', "{}", "[]", "no json", "\ud7ff{"]
)
def test_force_never_replaces_a_folder_with_another_manifest(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "extension").mkdir()
    (tmp_path / "extension" / "manifest.json").write_text(manifest, encoding="utf-8")
    (tmp_path / "extension" / "background.js").write_bytes(b"precious")
    refused(tmp_path / "extension", "is not that of a bundle")


@pytest.mark.parametrize("name", ["notes.txt", "text/notes.txt", ".git/HEAD"])
def test_force_never_replaces_a_bundle_with_files_of_somebody_else(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"precious")
    refused(folder, f"holds '{name}', which its manifest.json does not list")


def test_force_never_replaces_a_bundle_of_a_newer_version(folder: Path) -> None:
    rewrite(folder, lambda content: content.update(schema_version=3, invented_later=True))
    refused(folder, "schema version 3.*Install the matching version")


def test_force_never_replaces_a_folder_with_links(folder: Path, tmp_path: Path) -> None:
    (folder / "text" / "tokenizer.json").unlink()
    (folder / "text" / "tokenizer.json").symlink_to("/etc/hostname")
    refused(folder, "is a link")


def test_force_replaces_a_damaged_bundle(folder: Path, tmp_path: Path) -> None:
    (folder / "encoder.onnx").write_bytes(b"edited by hand")
    (folder / "text" / "tokenizer.json").unlink()
    enter(folder, force=True)
    assert names(tmp_path) == {"bundle"}
    assert names(folder) == {"new"}


def test_an_output_name_as_long_as_the_system_takes_works(tmp_path: Path) -> None:
    make(tmp_path / ("x" * 250))
    enter(tmp_path / ("x" * 250), force=True)
    assert names(tmp_path / ("x" * 250)) == {"new"}


def test_a_long_file_name_is_written(folder: Path) -> None:
    Bundle.open(folder).update_file("x" * 250, b"1")
    assert Bundle.open(folder).file("x" * 250).read_bytes() == b"1"


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + "/out", "\0", "/".join(["x" * 200] * 30)])
def test_an_impossible_output_name_is_one_short_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError) as caught:
        enter(tmp_path / name, force=False)
    assert "too long" in str(caught.value) or "no path" in str(caught.value)
    assert names(tmp_path) == set()


def test_text_of_a_file_must_be_utf8(folder: Path) -> None:
    bundle = Bundle.open(folder)
    assert bundle.read_text("text/tokenizer.json") == "{}"
    bundle.update_file("labels.txt", b"caf\xe9")
    with pytest.raises(BundleError, match="UTF-8"):
        bundle.read_text("labels.txt")


@pytest.mark.parametrize("path", [None, 3, b"x"])
def test_open_takes_paths_only(path: object) -> None:
    with pytest.raises(UsageError, match="Pass a path"):
        Bundle.open(path)  # type: ignore[arg-type]
