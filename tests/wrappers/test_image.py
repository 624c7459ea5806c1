from __future__ import annotations

import warnings

import numpy as np
import pytest
from PIL import Image

from edge_convert.runtime.bundle import Bundle, collect_files, write_manifest
from edge_convert.runtime.errors import BundleError, FeedError, InputError, ManifestError, UsageError
from edge_convert.runtime.manifest import GraphSpec, Manifest, SourceSpec, TensorSpec
from edge_convert.wrappers.image import ImageClassifier, ImageSettings, load_image, preprocess

SETTINGS = ImageSettings(height=224, width=224, resize_short_px=256)


class FakeSession:
    """Three classes: the mean of each colour."""

    def run(self, feed):
        return {"logits": feed["frames"].mean((1, 2)).astype(np.float32) / 16}


def make_classifier(labels=("red", "green", "blue")) -> ImageClassifier:
    return ImageClassifier(FakeSession(), SETTINGS, labels)  # type: ignore[arg-type]


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("size", [(300, 400), (400, 300), (256, 256), (100, 101), (1, 1), (224, 700)])
def test_preprocess_is_resize_and_centre_crop(size):
    picture = Image.fromarray(noise(*size))
    scale = 256 / min(picture.size)
    wanted = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BICUBIC)
    left, top = (wanted.width - 224) // 2, (wanted.height - 224) // 2
    wanted = np.asarray(wanted.crop((left, top, left + 224, top + 224)))
    found = preprocess(picture, SETTINGS)
    assert found.shape == (224, 224, 3)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, wanted)


def test_bgr_is_rgb_reversed():
    bgr = ImageSettings(height=224, width=224, resize_short_px=256, channel_order="BGR")
    frame = noise(300, 300)
    np.testing.assert_array_equal(preprocess(frame, bgr), preprocess(frame, SETTINGS)[:, :, ::-1])


def test_grey_alpha_and_deep_pictures_become_rgb():
    grey = Image.new("L", (4, 4), 200)
    assert np.asarray(load_image(grey)).tolist()[0][0] == [200, 200, 200]
    clear = Image.new("RGBA", (4, 4), (255, 100, 0, 0))
    assert np.asarray(load_image(clear)).tolist()[0][0] == [0, 0, 0]
    deep = Image.fromarray(np.full((4, 4), 65535, np.uint16))
    assert np.asarray(load_image(deep)).tolist()[0][0] == [255, 255, 255]
    half = load_image(np.full((4, 4), 0.5, np.float32))
    assert np.asarray(half).tolist()[0][0] == [128, 128, 128]
    assert np.asarray(load_image(Image.new("P", (2, 2)))).shape == (2, 2, 3)
    assert np.asarray(load_image(Image.new("CMYK", (2, 2)))).shape == (2, 2, 3)


def test_a_path_a_picture_and_an_array_are_the_same(tmp_path):
    pixels = noise(60, 80)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    for form in (tmp_path / "a.png", str(tmp_path / "a.png"), Image.fromarray(pixels), pixels):
        np.testing.assert_array_equal(np.asarray(load_image(form)), pixels)


def test_what_is_no_image_is_refused_with_its_name(tmp_path):
    (tmp_path / "a.png").write_bytes(b"not a picture")
    with pytest.raises(InputError, match=r"a\.png is not an image"):
        load_image(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"gone\.png"):
        load_image(tmp_path / "gone.png")
    Image.fromarray(noise(50, 50)).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:900])
    with pytest.raises(InputError, match=r"cut\.png"):
        load_image(tmp_path / "cut.png")


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4, 2), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
        np.zeros((4, 4, 3), np.int64),
        np.full((4, 4, 3), 2.0),
        np.full((4, 4, 3), np.nan),
        np.zeros(3, np.uint8),
    ],
)
def test_arrays_that_are_no_image_are_refused(array):
    with pytest.raises(InputError):
        load_image(array)


def test_classify_ranks_and_names():
    red = np.zeros((50, 50, 3), np.uint8)
    red[..., 0], red[..., 1] = 200, 100
    found = make_classifier().classify(red, top_k=2)[0]
    assert [label.name for label in found] == ["red", "green"]
    assert [label.index for label in found] == [0, 1]
    assert found[0].probability > 0.99
    everything = make_classifier().classify([red, red], top_k=99)
    assert [len(labels) for labels in everything] == [3, 3]
    assert sum(label.probability for label in everything[0]) == pytest.approx(1)


def test_a_batch_array_is_as_many_images():
    assert len(make_classifier().classify(np.zeros((3, 20, 20, 3), np.uint8))) == 3
    assert make_classifier().classify([]) == []


def test_without_labels_the_index_is_the_name():
    assert make_classifier(None).classify(noise(9, 9), top_k=1)[0][0].name.startswith("class ")


def test_bad_calls_are_refused():
    with pytest.raises(UsageError, match="top_k"):
        make_classifier().classify(noise(9, 9), top_k=0)
    with pytest.raises(FeedError, match="batch axis"):
        make_classifier().logits(noise(9, 9))


def test_settings_are_checked():
    with pytest.raises(ManifestError, match="interpolation"):
        ImageSettings(height=2, width=2, resize_short_px=2, interpolation="area")
    with pytest.raises(ManifestError, match="resize_short_px"):
        ImageSettings(height=4, width=4, resize_short_px=2)
    with pytest.raises(ManifestError, match="has no 'resize_short_px'"):
        ImageSettings.from_processing({"height": 2, "width": 2})


PROCESSING = {"height": 4, "width": 4, "resize_short_px": 8, "labels": "labels.txt"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("height", 0), ("height", "4"), ("height", 4.0), ("width", True), ("resize_short_px", 10**30),
        ("interpolation", 3), ("interpolation", "x" * 10**5), ("channel_order", None), ("crop", "left"),
        ("labels", 3), ("labels", ["a"]), ("colour", "red"),
    ],
)  # fmt: skip
def test_processing_is_parsed_strictly(key, value):
    with pytest.raises(ManifestError, match="size is not positive" if value == 0 else key) as caught:
        ImageSettings.from_processing(PROCESSING | {key: value})
    assert len(str(caught.value)) < 400


def graph(height=4, classes=2):
    return GraphSpec(
        "classifier.onnx",
        (TensorSpec("frames", "uint8", ("batch", height, 4, 3)),),
        (TensorSpec("logits", "float32", ("batch", classes)),),
        9, {}, {}, {},
    )  # fmt: skip


def write_bundle(folder, labels, **options):
    folder.mkdir()
    (folder / "labels.txt").write_bytes(labels)
    (folder / "classifier.onnx").write_bytes(b"")
    graphs, files = {"classifier": graph(**options)}, collect_files(folder)
    source = SourceSpec("module", "toy", "0" * 64)
    manifest = Manifest("image-classification", "cpu", "fp32", source, graphs, PROCESSING, files, {}, "now")
    write_manifest(folder, manifest)
    return folder


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (b"caf\xe9\nb\n", {}, r"labels\.txt.*UTF-8"),
        (b"a\n", {}, "1 labels, and the graph gives 2"),
        (b"a\nb\nc\n", {}, "3 labels, and the graph gives 2"),
        (b"a\nb\n", {"height": 5}, "does not take frames of 4x4x3"),
    ],
)
def test_labels_and_frames_must_fit_the_graph(tmp_path, monkeypatch, labels, options, message):
    opened = type("S", (), {"spec": graph(**options)})()
    monkeypatch.setattr(Bundle, "session", lambda *_, **__: opened)
    with pytest.raises(BundleError, match=message):
        ImageClassifier.load(write_bundle(tmp_path / "bad", labels, **options))


def test_labels_of_a_graph_with_any_number_of_classes_are_taken(tmp_path, monkeypatch):
    opened = type("S", (), {"spec": graph(classes="classes")})()
    monkeypatch.setattr(Bundle, "session", lambda *_, **__: opened)
    assert ImageClassifier.load(write_bundle(tmp_path / "b", b"a\r\nb\r\n")).labels == ("a", "b")


def test_a_bomb_is_called_one_and_a_large_picture_is_opened_quietly(tmp_path, monkeypatch):
    Image.fromarray(noise(100, 100)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4000)
    with pytest.raises(InputError, match=r"a\.png has too many pixels .*Give a smaller picture"):
        load_image(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 6000)  # Pillow warns from here to twice as many
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_image(tmp_path / "a.png").size == (100, 100)


@pytest.mark.parametrize("top_k", ["a", 1.5, None, -1])
def test_top_k_is_a_whole_number(top_k):
    with pytest.raises(UsageError, match="top_k"):
        make_classifier().classify(noise(9, 9), top_k=top_k)


def test_frames_are_an_array():
    with pytest.raises(FeedError, match="NumPy array"):
        make_classifier().logits([1])  # type: ignore[arg-type]
