from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from edge_convert.runtime.errors import BundleError, InputError, ManifestError, UsageError
from edge_convert.runtime.manifest import GraphSpec, TensorSpec
from edge_convert.wrappers.embed import EmbedSettings, TextEmbedder
from edge_convert.wrappers.tokenizer import load_tokenizer

SETTINGS = EmbedSettings("tokenizer.json", 8, 0, 0, 2, ("input_ids", "attention_mask", "token_type_ids"), "embedding")
WORDS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "left", "right", "stop")


class FakeSession:
    """Sums the unmasked ids and counts them; remembers the feeds."""

    def __init__(self) -> None:
        self.feeds: list[dict[str, np.ndarray]] = []

    def run(self, feed):
        self.feeds.append(feed)
        mask = feed["attention_mask"]
        sums = np.stack([(feed["input_ids"] * mask).sum(1), mask.sum(1)], axis=1)
        return {"embedding": sums.astype(np.float32)}


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    tokenizer.enable_padding(length=16)  # a file may come with settings of its own; the wrapper's must win
    tokenizer.enable_truncation(4)
    return tokenizer


def make_embedder() -> tuple[TextEmbedder, FakeSession]:
    session = FakeSession()
    return TextEmbedder(session, make_tokenizer(), SETTINGS), session  # type: ignore[arg-type]


def test_any_mix_of_lengths_keeps_the_order():
    embedder, session = make_embedder()
    texts = ["left right stop left right", "", "left", "right stop", "stop"]
    vectors = embedder.embed(texts, batch_size=2)
    expected = [[sum(embedder.encode_ids(text)), len(embedder.encode_ids(text))] for text in texts]
    assert vectors.dtype == np.float32
    assert vectors.tolist() == expected
    assert [feed["input_ids"].shape for feed in session.feeds] == [(2, 3), (2, 4), (1, 7)]


def test_padding_is_masked():
    embedder, session = make_embedder()
    embedder.embed(["left right", "stop"])
    assert session.feeds[0]["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert session.feeds[0]["input_ids"].tolist() == [[1, 6, 2, 0], [1, 4, 5, 2]]


def test_empty_text_has_the_special_tokens():
    embedder, _ = make_embedder()
    assert embedder.encode_ids("") == [1, 2]
    assert embedder.embed("").shape == (1, 2)


def test_a_tokenizer_without_special_tokens_still_gives_one_token_for_empty_text():
    embedder, _ = make_embedder()
    bare = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 3}, unk_token="[UNK]"))
    embedder = TextEmbedder(FakeSession(), bare, SETTINGS)  # type: ignore[arg-type]
    assert embedder.encode_ids("") == [0]


def test_a_long_text_is_cut_and_keeps_its_special_tokens():
    embedder, _ = make_embedder()
    ids = embedder.encode_ids(" ".join(["left"] * 10_000))
    assert ids == [1, 4, 4, 4, 4, 4, 4, 2]


def test_no_texts_give_no_rows():
    embedder, session = make_embedder()
    assert embedder.embed([]).shape == (0, 2)
    assert session.feeds == []


def test_lone_surrogate_is_replaced():
    embedder, _ = make_embedder()
    assert embedder.encode_ids("left \udcff") == [1, 4, 3, 2]


def test_only_the_inputs_of_the_graph_are_fed():
    session = FakeSession()
    settings = EmbedSettings("tokenizer.json", 8, 0, 0, 2, ("input_ids", "attention_mask"), "embedding")
    TextEmbedder(session, make_tokenizer(), settings).embed("left")  # type: ignore[arg-type]
    assert list(session.feeds[0]) == ["input_ids", "attention_mask"]


def test_bytes_are_refused():
    embedder, _ = make_embedder()
    with pytest.raises(InputError, match="found bytes"):
        embedder.embed([b"left"])  # type: ignore[list-item]


def test_bad_batch_size_is_refused():
    embedder, _ = make_embedder()
    with pytest.raises(UsageError, match="batch_size"):
        embedder.embed("left", batch_size=0)


PROCESSING = {
    "tokenizer": "tokenizer.json",
    "max_length": 8,
    "pad_token_id": 0,
    "pad_token_type_id": 0,
    "dimension": 2,
    "inputs": ["input_ids", "attention_mask", "token_type_ids"],
    "output": "embedding",
}


def test_settings_are_read_back():
    assert EmbedSettings.from_processing(PROCESSING) == SETTINGS


@pytest.mark.parametrize("key", [key for key in PROCESSING if key != "pad_token_type_id"])
def test_settings_without_a_key_name_it(key):
    with pytest.raises(ManifestError, match=key):
        EmbedSettings.from_processing({name: value for name, value in PROCESSING.items() if name != key})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer", 5), ("max_length", "8"), ("max_length", True), ("max_length", 0), ("max_length", 10**30),
        ("pad_token_id", -1), ("pad_token_id", 1.5), ("pad_token_type_id", None), ("dimension", 0),
        ("dimension", 10**30), ("inputs", "input_ids"), ("inputs", []), ("inputs", ["input_ids", "colour"]),
        ("inputs", ["attention_mask"]), ("inputs", [1]), ("output", None), ("colour", "red"),
    ],
)  # fmt: skip
def test_settings_are_checked(key, value):
    with pytest.raises(ManifestError, match=key):
        EmbedSettings.from_processing(PROCESSING | {key: value})


def graph(dimension=2, names=SETTINGS.inputs, output="embedding"):
    inputs = tuple(TensorSpec(name, "int64", ("batch", "sequence")) for name in names)
    return GraphSpec("encoder.onnx", inputs, (TensorSpec(output, "float32", ("batch", dimension)),), 9, {}, {}, {})


def test_settings_must_fit_the_graph():
    SETTINGS.check_graph(graph())
    SETTINGS.check_graph(graph("hidden"))
    for other in (graph(3), graph(names=("input_ids",)), graph(output="pooled")):
        with pytest.raises(ManifestError, match="the graph has others"):
            SETTINGS.check_graph(other)


def test_a_length_without_room_for_the_special_tokens_is_refused():
    settings = EmbedSettings.from_processing(PROCESSING | {"max_length": 1})
    with pytest.raises(ManifestError, match="max_length"):
        TextEmbedder(FakeSession(), make_tokenizer(), settings).embed("left")  # type: ignore[arg-type]


def test_a_broken_tokenizer_is_a_bundle_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    bundle = type("B", (), {"file": lambda _, name: tmp_path / name})()
    with pytest.raises(BundleError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(bundle, "tokenizer.json")
