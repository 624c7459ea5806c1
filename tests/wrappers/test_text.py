from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from edge_convert.runtime.bundle import Bundle, collect_files, write_manifest
from edge_convert.runtime.device import load_profile
from edge_convert.runtime.errors import BundleError, ContextLengthError, InputError, UsageError
from edge_convert.runtime.generate import Decoder
from edge_convert.runtime.manifest import Manifest, SourceSpec
from edge_convert.runtime.sampling import GenerationConfig
from edge_convert.runtime.session import Session
from edge_convert.wrappers.chat import ChatTemplate
from edge_convert.wrappers.text import TextGenerator
from tests.models import toy_decoder

VOCAB, BOS, EOS = 258, 256, 257
PROCESSING: dict[str, Any] = {
    "tokenizer": "tokenizer.json",
    "chat_template": "chat_template.jinja",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": None,
    "bos_token_id": BOS,
    "eos_token_ids": [EOS],
    "context_length": 128,
    "add_special_tokens": True,
}
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def byte_tokenizer() -> Tokenizer:
    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.enable_truncation(5)  # as some checkpoints' files do; a prompt must not be cut silently
    return tokenizer


def write_bundle(folder: Path, *, task: str = "text-generation") -> Path:
    folder.mkdir()
    _, spec = toy_decoder(folder, VOCAB, max_length=128)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    source = SourceSpec("module", "toy", "0" * 64)
    files = collect_files(folder)
    graphs, created = {"decoder": spec}, "2026-01-01T00:00:00Z"
    write_manifest(folder, Manifest(task, "cpu", "fp32", source, graphs, PROCESSING, files, {}, created))
    return folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundles") / "toy")


@pytest.fixture(scope="module")
def model(bundle: Path) -> TextGenerator:
    return TextGenerator.load(bundle, threads=1)


class ScriptedDecoder:
    """Stands for a decoder that says one text, byte by byte, and then the end."""

    chunk_tokens, context_length, vocab_size = 16, 4096, VOCAB

    def __init__(self, text: str) -> None:
        ids = byte_tokenizer()
        ids.no_truncation()
        self.script = [*ids.encode(text, add_special_tokens=False).ids, EOS]
        self.turn = self.length = self.steps = 0

    def reset(self) -> None:
        self.turn, self.length, self.steps = self.turn + 1, 0, 0

    def prefill(self, ids: Any) -> np.ndarray:
        self.length += len(ids)
        return self._next()

    def step_view(self, token: int) -> np.ndarray:
        self.length, self.steps = self.length + 1, self.steps + 1
        return self._next()

    def _next(self) -> np.ndarray:
        logits = np.zeros(VOCAB, np.float32)
        logits[self.script[self.steps]] = 1
        return logits


def scripted(text: str, **processing: Any) -> TextGenerator:
    return TextGenerator(ScriptedDecoder(text), byte_tokenizer(), processing=PROCESSING | processing)  # type: ignore[arg-type]


def test_loads_from_a_path_and_from_a_bundle(bundle: Path, model: TextGenerator) -> None:
    other = TextGenerator.load(Bundle.open(bundle), threads=1)
    config = GenerationConfig(max_tokens=12, temperature=1.0, seed=2)
    first, second = model.generate("abc", config), other.generate("abc", config)
    assert (first.text, first.token_ids) == (second.text, second.token_ids)
    assert first.prompt_tokens == 4
    assert first.finish_reason == "length"
    assert len(first.token_ids) == 12
    assert first.ttft_ms > 0
    assert first.tokens_per_s > 0


def test_stream_adds_up_to_generate(model: TextGenerator) -> None:
    config = GenerationConfig(max_tokens=60, temperature=1.0, seed=4)
    pieces = list(model.stream("안녕", config))
    assert "".join(pieces) == model.generate("안녕", config).text
    assert all(pieces)


def test_encoding(model: TextGenerator) -> None:
    assert model.encode("long enough to be cut")[0] == BOS
    assert len(model.encode("long enough to be cut")) == 22
    assert model.decode(model.encode("한글 👍")) == "한글 👍"
    assert BOS not in model.encode("ab", add_special_tokens=False)
    assert BOS not in scripted("", add_special_tokens=False).encode("ab")


def test_a_chat_gets_its_special_tokens_from_the_template_only(model: TextGenerator) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert model.render(messages) == "<s>[user] hi\n"
    config = GenerationConfig(max_tokens=5)
    answer = model.chat(messages, config)
    assert answer.prompt_tokens == len("[user] hi\n") + 1
    assert answer.token_ids == model.generate("[user] hi\n", config).token_ids
    assert "".join(model.stream_chat(messages, config)) == answer.text


def test_without_a_template_a_chat_is_refused() -> None:
    with pytest.raises(InputError, match="no chat template"):
        scripted("x").chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("text", ["좋아요 👍🏽 — 東京", "plain"])
def test_characters_are_never_split_and_the_models_end_is_a_stop(text: str) -> None:
    model = scripted(text)
    assert list(model.stream("q")) == list(text)
    result = model.generate("q")
    assert (result.text, result.finish_reason) == (text, "stop")
    assert EOS not in result.token_ids


def test_a_limit_inside_a_character_leaves_the_character_out() -> None:
    result = scripted("가나").generate("q", GenerationConfig(max_tokens=5))
    assert (result.text, result.finish_reason, len(result.token_ids)) == ("가", "length", 5)


def test_stop_strings_end_the_text_and_never_show() -> None:
    model = scripted("Answer: 42\nUser: more")
    config = GenerationConfig(stop=("\nUser:",))
    assert "".join(model.stream("q", config)) == "Answer: 42"
    result = model.generate("q", config)
    assert (result.text, result.finish_reason) == ("Answer: 42", "stop")
    assert len(result.token_ids) == len("Answer: 42\nUser:")


def test_a_beginning_of_a_stop_string_at_the_end_is_text() -> None:
    assert scripted("a\nUs").generate("q", GenerationConfig(stop=("\nUser:",))).text == "a\nUs"


def test_cancelling_keeps_what_was_made() -> None:
    answers = itertools.chain([False] * 4, itertools.repeat(True))
    result = scripted("abcdefgh").generate("q", cancel=lambda: next(answers))
    assert (result.text, result.finish_reason) == ("abcd", "cancelled")
    result = scripted("abcdefgh").generate("q", cancel=lambda: True)
    assert (result.text, result.token_ids, result.tokens_per_s) == ("", (), 0.0)


def test_an_empty_prompt_starts_from_the_first_token_or_is_refused(model: TextGenerator) -> None:
    assert model.generate("", GenerationConfig(max_tokens=2)).prompt_tokens == 1
    with pytest.raises(InputError, match="empty"):
        scripted("x", add_special_tokens=False, bos_token_id=None).generate("")


@pytest.mark.parametrize("prompt", [None, 3, "\ud800"])
def test_what_is_no_text_is_refused(model: TextGenerator, prompt: Any) -> None:
    with pytest.raises(InputError):
        model.generate(prompt)


def test_a_prompt_longer_than_the_context_is_refused(model: TextGenerator) -> None:
    with pytest.raises(ContextLengthError, match="needs 201 tokens, and the context holds 128"):
        model.generate("x" * 200)


def test_a_bundle_for_another_task_is_refused(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b")
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"text-generation"', '"feature-extraction"'))
    with pytest.raises(BundleError, match="feature-extraction"):
        TextGenerator.load(folder)


def test_a_broken_tokenizer_is_a_bundle_error(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b")
    Bundle.open(folder).update_file("tokenizer.json", b"{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json is not a tokenizer"):
        TextGenerator.load(folder)


def test_a_decoder_can_be_given_directly(tmp_path: Path) -> None:
    path, spec = toy_decoder(tmp_path, VOCAB)
    decoder = Decoder(Session(path, spec, load_profile("cpu"), threads=1))
    template = ChatTemplate(TEMPLATE, {"bos_token": "<s>"})
    model = TextGenerator(decoder, byte_tokenizer(), processing=PROCESSING, template=template)
    assert len(model.generate("a", GenerationConfig(max_tokens=3)).token_ids) <= 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": 5}, "processing.tokenizer .* str is expected"),
        ({"tokenizer": "gone.json"}, "has no file 'gone.json'"),
        ({"chat_template": ["a"]}, "processing.chat_template"),
        ({"chat_template": "gone.jinja"}, "has no file"),
        ({"chat_template": ""}, "has no file"),
        ({"chat_template": "../manifest.json"}, "has no file"),
        ({"eos_token_ids": None}, "processing.eos_token_ids"),
        ({"eos_token_ids": 5}, "processing.eos_token_ids"),
        ({"eos_token_ids": "257"}, "processing.eos_token_ids"),
        ({"eos_token_ids": [True]}, "processing.eos_token_ids"),
        ({"eos_token_ids": [1.5]}, "processing.eos_token_ids"),
        ({"eos_token_ids": [-1]}, "eos_token_ids"),
        ({"eos_token_ids": [VOCAB]}, "token id 258, and the vocabulary has 258"),
        ({"bos_token_id": VOCAB}, "token id 258"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"bos_token_id": "x"}, "bos_token_id"),
        ({"bos_token": 3}, "processing.bos_token"),
        ({"context_length": 0}, "context_length"),
        ({"context_length": 129}, "the cache holds 128"),
        ({"context_length": 10**30}, "context_length"),
        ({"add_special_tokens": 5}, "add_special_tokens"),
        ({"colour": "red"}, "unknown key 'colour'"),
    ],
)
def test_settings_that_are_not_of_this_model_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = write_bundle(tmp_path / "b")
    manifest = Bundle.open(folder).manifest
    write_manifest(folder, dataclasses.replace(manifest, processing=PROCESSING | change))
    with pytest.raises(BundleError, match=message):
        TextGenerator.load(folder, threads=1)


def test_a_chat_template_that_is_not_utf8_is_a_bundle_error(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b")
    Bundle.open(folder).update_file("chat_template.jinja", b"caf\xe9")
    with pytest.raises(BundleError, match=r"chat_template\.jinja.*UTF-8"):
        TextGenerator.load(folder, threads=1)


@pytest.mark.parametrize("config", [{"max_tokens": 3}, 3, "greedy", {}])
def test_the_settings_of_a_generation_must_be_a_config(model: TextGenerator, config: Any) -> None:
    for call in (model.generate, model.stream):
        with pytest.raises(UsageError, match="GenerationConfig"):
            call("a", config)
    for chat in (model.chat, model.stream_chat):
        with pytest.raises(UsageError, match="GenerationConfig"):
            chat([{"role": "user", "content": "a"}], config)


def test_a_step_between_two_pieces_ends_the_stream(model: TextGenerator) -> None:
    pieces = model.stream("abc", GenerationConfig(max_tokens=60, temperature=1.0, seed=4))
    next(pieces)
    model.decoder.step(3)
    with pytest.raises(UsageError, match="in between"):
        list(pieces)
