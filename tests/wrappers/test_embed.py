from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from edge_convert.runtime.errors import InputError, ManifestError, UsageError
from edge_convert.wrappers.embed import EmbedSettings, TextEmbedder

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


def test_settings_without_a_key_name_it():
    with pytest.raises(ManifestError, match="max_length"):
        EmbedSettings.from_processing({"tokenizer": "tokenizer.json"})
