from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edge_convert.wrappers.detokenize import Detokenizer, StopStrings

TEXT = "Hi 안녕하세요! 👍🏽 family 👨‍👩‍👧 naïve café — 東京 🇰🇷 end. " * 3


def byte_level() -> Tokenizer:
    """A byte-level BPE without merges that matter: one token for each UTF-8 byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)} | {"He": 256}
    tokenizer = Tokenizer(models.BPE(vocab, [("H", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Sentencepiece-like: words with a leading mark, bytes for everything else."""
    words = ["<unk>", "▁a", "▁b", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_korean_and_emoji_come_whole_and_add_up() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(TEXT).ids
    assert len(ids) > len(TEXT) * 1.3  # many tokens are parts of characters
    stream = Detokenizer(tokenizer.decode)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces.count("") > 20


def test_every_prefix_ends_at_a_whole_character() -> None:
    tokenizer = byte_level()
    stream, text = Detokenizer(tokenizer.decode), ""
    raw = b""
    for byte in TEXT.encode():
        raw += bytes([byte])
        token = tokenizer.token_to_id(pre_tokenizer_character(byte))
        text += stream.push(token)
        assert text == raw.decode(errors="ignore")


def pre_tokenizer_character(byte: int) -> str:
    """The printable stand-in of a byte in the byte-level alphabet."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [value for value in range(256) if value not in printable].index(byte))


def test_bytes_between_words_and_their_spaces() -> None:
    tokenizer = byte_fallback()
    ids = [1, 2, *(3 + byte for byte in "👍한".encode()), 1, 2] * 6
    stream = Detokenizer(tokenizer.decode)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_never_make_a_character_do_not_stop_the_stream() -> None:
    tokenizer = byte_level()
    bad, good = tokenizer.token_to_id(pre_tokenizer_character(0xFF)), tokenizer.encode("abc").ids
    stream = Detokenizer(tokenizer.decode)
    assert "".join(stream.push(token) for token in [bad, *good, bad]) == "\ufffdabc"


def test_the_cost_of_a_token_does_not_grow() -> None:
    tokenizer, longest = byte_level(), 0

    def decode(ids: object) -> str:
        nonlocal longest
        longest = max(longest, len(ids))  # type: ignore[arg-type]
        return str(tokenizer.decode(ids))

    stream = Detokenizer(decode)
    text = "".join(stream.push(token) for token in tokenizer.encode(TEXT * 5).ids)
    assert text == TEXT * 5
    assert longest < 64


@pytest.mark.parametrize(
    ("stops", "pieces", "expected", "stopped"),
    [
        (("END",), ["one E", "ND two"], "one ", True),
        (("END",), ["one E", "N", "x"], "one ENx", False),
        (("END",), ["E", "E", "N", "D"], "E", True),
        (("\n\n", "User:"), ["Hi\n", "Us", "er", ":"], "Hi\n", True),
        (("abc", "b"), ["abc"], "a", True),
        (("aab",), ["aaab"], "a", True),
        (("END",), ["END"], "", True),
        (("끝",), ["이제 ", "끝", "!"], "이제 ", True),
        ((), ["a", "b"], "ab", False),
    ],
)
def test_stop_strings(stops: tuple[str, ...], pieces: list[str], expected: str, stopped: bool) -> None:
    matcher = StopStrings(stops)
    text = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    assert (text, matcher.stopped) == (expected, stopped)


def test_no_part_of_a_stop_string_ever_leaves_and_chunks_do_not_matter() -> None:
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choice("ab") for _ in range(30))
        stops = tuple("".join(rng.choice("ab") for _ in range(rng.randint(3, 6))) for _ in range(2))
        whole = StopStrings(stops)
        expected = whole.push(text) + whole.flush()
        assert not any(stop in expected for stop in stops)
        matcher, emitted, start = StopStrings(stops), "", 0
        while start < len(text):
            size = rng.randint(1, 4)
            emitted += matcher.push(text[start : start + size])
            assert expected.startswith(emitted)
            start += size
        assert emitted + matcher.flush() == expected
