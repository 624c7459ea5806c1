"""The texts that validation runs on: texts.txt, one a line, and a few chats."""

from __future__ import annotations

from importlib import resources

CHATS: tuple[tuple[dict[str, str], ...], ...] = (
    ({"role": "user", "content": "What is the capital of France?"},),
    (
        {"role": "system", "content": "You are a careful assistant on a small robot. Answer in one sentence."},
        {"role": "user", "content": "The battery is at 12 %. Should I start another inspection round?"},
    ),
    (
        {"role": "user", "content": "Name three primary colours."},
        {"role": "assistant", "content": "Red, yellow and blue."},
        {"role": "user", "content": "Which two of them make green?"},
    ),
    ({"role": "user", "content": "Write a Python function that returns the larger of two numbers.\n\n```python\n"},),
)


def load_texts() -> list[str]:
    r"""All texts in order; `\n` and `\t` in the file stand for a newline and a tab."""
    raw = resources.files("edge_convert.validate").joinpath("texts.txt").read_text(encoding="utf-8")
    return [unescaped(line) for line in raw.removesuffix("\n").split("\n")]


def unescaped(line: str) -> str:
    r"""A line of a file of texts with `\n` and `\t` as a newline and a tab."""
    return line.replace("\\n", "\n").replace("\\t", "\t")


def long_texts(count: int) -> list[str]:
    """The `count` longest texts, longest first; ties in file order."""
    return sorted(load_texts(), key=lambda text: -len(text))[:count]
