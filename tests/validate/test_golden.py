from __future__ import annotations

import io
import json
import zipfile

import numpy as np
import pytest

from edge_convert.runtime.bundle import Bundle, collect_files, write_manifest
from edge_convert.runtime.errors import BundleError
from edge_convert.runtime.manifest import GraphSpec, Manifest, SourceSpec, TensorSpec
from edge_convert.validate import golden
from edge_convert.validate.golden import read_golden, write_golden
from tests.validate import fakes

REFERENCES = {
    "text-generation": fakes.FakeReference,
    "feature-extraction": fakes.FakeEmbedder,
    "image-classification": fakes.FakeClassifier,
}
GRAPHS = {
    "text-generation": ("decoder", "logits"),
    "feature-extraction": ("encoder", "embedding"),
    "image-classification": ("classifier", "logits"),
}
TASKS = tuple(REFERENCES)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Golden arrays of every task, as written."""
    folder = tmp_path_factory.mktemp("golden")
    found = {}
    for task, reference in REFERENCES.items():
        with np.load(write_golden(folder, task, reference())) as archive:
            found[task] = dict(archive)
    return found


def read(folder, task, data, width=None):
    """Read `data` (bytes or arrays) as the golden data of a bundle whose graph gives rows of `width`."""
    if isinstance(data, dict):
        stream = io.BytesIO()
        np.savez(stream, **data)
        data = stream.getvalue()
    (folder / "golden.npz").write_bytes(data)
    (folder / "graph.onnx").write_bytes(b"")
    role, output = GRAPHS[task]
    spec = TensorSpec(output, "float32", ("batch", "classes" if width is None else width))
    write_manifest(
        folder,
        Manifest(
            task=task,
            target="cpu",
            precision="fp32",
            source=SourceSpec("module", "toy", "0" * 64),
            graphs={role: GraphSpec("graph.onnx", (), (spec,), 9, {}, {}, {})},
            processing={},
            files=collect_files(folder),
            tools={},
            created="2026-01-01T00:00:00+00:00",
        ),
    )
    return read_golden(Bundle.open(folder))


def packed(value):
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


@pytest.mark.parametrize("task", TASKS)
def test_what_was_written_is_read(tmp_path, written, task):
    found = read(tmp_path, task, written[task])
    assert set(found) == set(written[task])


@pytest.mark.parametrize("data", [b"", b"abc" * 100, b"PK\3\4" + b"0" * 100])
def test_what_is_no_archive_is_refused(tmp_path, data):
    with pytest.raises(BundleError, match=r"golden\.npz cannot be read"):
        read(tmp_path, "text-generation", data)


def test_an_array_that_is_not_in_an_archive_is_refused(tmp_path):
    stream = io.BytesIO()
    np.save(stream, np.zeros(3))
    with pytest.raises(BundleError, match="cannot be read"):
        read(tmp_path, "text-generation", stream.getvalue())


def test_what_unpacks_to_too_much_is_not_unpacked(tmp_path, written, monkeypatch):
    monkeypatch.setattr(golden, "MAX_BYTES", 1000)
    with pytest.raises(BundleError, match="unpacks to"):
        read(tmp_path, "text-generation", written["text-generation"])


def test_a_header_that_claims_a_huge_array_is_refused(tmp_path):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 50,)})
        archive.writestr("version.npy", header.getvalue())
    with pytest.raises(BundleError, match="cannot be read"):
        read(tmp_path, "text-generation", stream.getvalue())


@pytest.mark.parametrize("task", TASKS)
def test_every_array_must_be_there_and_be_of_its_kind(tmp_path, written, task):
    arrays = written[task]
    for name in arrays:
        wrong = {
            "absent": None,
            "text": np.array(["x"]),
            "empty": np.zeros(0, np.float32),
            "objects": np.array([{}], object),
            "complex": np.zeros(arrays[name].shape, complex),
        }
        for label, value in wrong.items():
            changed = {key: item for key, item in arrays.items() if key != name}
            if value is not None:
                changed[name] = value
            with pytest.raises(BundleError) as caught:
                read(tmp_path, task, changed)
            assert len(str(caught.value)) < 400, (name, label)


def test_ids_outside_the_vocabulary_are_refused(tmp_path, written):
    arrays = written["text-generation"]
    read(tmp_path, "text-generation", arrays, fakes.VOCAB)
    with pytest.raises(BundleError, match=r"'(top_)?ids' leave"):
        read(tmp_path, "text-generation", arrays, fakes.VOCAB - 40)
    for name in ("ids", "top_ids"):
        changed = arrays[name].copy()
        changed.flat[5] = -1
        with pytest.raises(BundleError, match=f"'{name}' leave"):
            read(tmp_path, "text-generation", arrays | {name: changed}, fakes.VOCAB)


@pytest.mark.parametrize("task", ["feature-extraction", "image-classification"])
def test_another_width_than_the_graphs_is_refused(tmp_path, written, task):
    with pytest.raises(BundleError, match="another shape"):
        read(tmp_path, task, written[task], 5000)


@pytest.mark.parametrize(
    ("task", "name", "change", "message"),
    [
        ("text-generation", "lengths", lambda a: a + 1, "add up"),
        ("text-generation", "lengths", lambda a: a * 0, "impossible"),
        ("text-generation", "lengths", lambda a: a + (1 << 60), "impossible"),
        ("text-generation", "top_ids", lambda a: a[:-1], "differ"),
        ("text-generation", "top_ids", lambda a: a * 0, "twice"),
        ("text-generation", "top_log_probabilities", lambda a: a * np.float32(np.nan), "logarithms"),
        ("text-generation", "top_log_probabilities", lambda a: a * 0, "more than 1"),
        ("text-generation", "top_log_probabilities", lambda a: a - a.min() + 1, "logarithms"),
        ("text-generation", "texts", lambda _: np.frombuffer(b"{", np.uint8), "not JSON"),
        ("text-generation", "texts", lambda _: np.frombuffer(b"\xff\xfe", np.uint8), "not JSON"),
        ("text-generation", "texts", lambda _: np.frombuffer(b"[" * 10**5, np.uint8), "not JSON"),
        ("text-generation", "texts", lambda _: packed(["a\ud800"]), "surrogate"),
        ("text-generation", "texts", lambda _: packed({"a": 1}), "no list"),
        ("text-generation", "texts", lambda _: packed([1]), "no texts"),
        ("text-generation", "texts", lambda _: packed([]), "no texts"),
        ("text-generation", "tokens", lambda _: packed([[1]]), "for each text"),
        ("feature-extraction", "tokens", lambda a: packed([["a"]] * len(json.loads(a.tobytes()))), "no token id"),
        ("feature-extraction", "tokens", lambda a: packed([[-1]] * len(json.loads(a.tobytes()))), "no token id"),
        ("text-generation", "chats", lambda _: packed([[{"role": "user"}]]), "no chats"),
        ("text-generation", "chats", lambda _: packed([5]), "no chats"),
        ("text-generation", "rendered", lambda _: packed([5]), "for each chat"),
        ("feature-extraction", "embeddings", lambda a: a[:-1], "another shape"),
        ("feature-extraction", "embeddings", lambda a: a * np.float32(np.inf), "not all numbers"),
        ("image-classification", "pixels", lambda a: a[:, :, :1], "no picture"),
        ("image-classification", "frames", lambda a: a[:, :0], "no pictures"),
        ("image-classification", "logits", lambda a: a[:0], "another shape"),
        ("image-classification", "logits", lambda a: a * np.float32(np.nan), "not all numbers"),
        ("image-classification", "photos", lambda a: a + 1, "number of frames"),
        ("image-classification", "photos", lambda a: a - 1, "number of frames"),
        ("image-classification", "version", lambda a: a + 1, "version and task"),
        ("image-classification", "task", lambda _: np.asarray("x" * 10**5), "version and task"),
    ],
)
def test_content_that_was_never_written_is_refused(tmp_path, written, task, name, change, message):
    arrays = written[task] | {name: change(written[task][name])}
    with np.errstate(invalid="ignore"), pytest.raises(BundleError, match=message) as caught:
        read(tmp_path, task, arrays)
    assert len(str(caught.value)) < 400
