"""Numbers as text, the same everywhere: significant digits, units, sizes, and rows of measurements.

Nothing here measures or judges; the JSON forms keep every digit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

# How the names of measurements end, longest first, and the unit that the ending stands for.
_UNITS = {
    "_tokens_per_s": "tokens/s",
    "_ms_per_token": "ms/token",
    "_ms": "ms",
    "_mb": "MiB",
    "_nats": "nats",
}
_PLAIN = {
    "frames_per_s": ("single frames", "frames/s"),
    "batch_frames_per_s": ("frames in batches", "frames/s"),
    "cache_speedup": ("speed-up by the cache", "x"),
    "growth_last_to_first_quarter": ("growth, last to first quarter", "x"),
    "texts_per_s": ("texts in batches", "texts/s"),
}
_WORDS = {
    "ttft": "time to first token",
    "token": "time per token",
    "call": "time per call",
    "batch": "time per batch",
    "kl": "KL divergence",
}


def number(value: float, digits: int = 3) -> str:
    """`value` with `digits` significant digits and no fewer than its whole part; whole numbers as they are.

    Just below 1, where shares and cosines lie, the digits count from the distance to 1; just above it, where
    ratios lie, there is one more.
    """
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e6):
        return str(int(value))
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if 0.99 <= size < 1:
        return f"{value:.{min(9, digits - 2 - math.floor(math.log10(1 - size)))}f}".rstrip("0").rstrip(".")
    if 1 <= size < 1.1:  # ratios
        return f"{value:.{digits}f}"
    if 1 <= size < 10**digits:
        return f"{value:.{digits - 1 - math.floor(math.log10(size))}f}"
    if 10**digits <= size < 1e6:
        return f"{value:.0f}"
    return f"{value:#.{digits}g}" if 1e-4 <= size < 1 else f"{value:.{digits - 1}e}"


def apart(value: float, bound: float) -> tuple[str, str]:
    """Both as text, with as many digits as it takes to tell them apart where they differ."""
    # A bound that somebody wrote is short and stays as written; one that was computed is rounded.
    short = f"{bound:.12g}"
    written = short if len(short.lstrip("-0.").replace(".", "")) <= 6 else ""
    texts = number(value), written or number(bound)
    digits = 4
    while value != bound and digits < 13 and (texts[0] == texts[1] or _is(texts[0], bound)):
        texts = number(value, digits), written or number(bound, digits)
        digits += 1
    return texts


def text(value: Any) -> str:
    """Any value of a report or a manifest as text: numbers rounded, lists joined, yes, no and none in words."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(text(item) for item in value) or "none"
    return str(value)


def size(count: float) -> str:
    """`count` bytes as text with a binary unit, such as '1.5 MiB'."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if round(count, 1) < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.0f} {unit}" if count >= 100 or count == int(count) else f"{count:.1f} {unit}"


def duration(seconds: float) -> str:
    """Seconds as a person says them: '0.4 s', '39 s', '2 min 5 s'."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60} s"


def rows(measurements: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(what, value, unit) of each number; several numbers of one measurement share a row: 'p50 / p90'."""
    found = []
    for key, value in measurements.items():
        what, unit = _named(key)
        if isinstance(value, Mapping):
            shown = {name: item for name, item in value.items() if name != "samples"}
            what = f"{what}, {' / '.join(shown)}"
            found.append((what, " / ".join(text(item) for item in shown.values()), unit))
        else:
            found.append((what, text(value), "" if value is None else unit))
    return found


def table(*headings: str, right: Iterable[str] = ()) -> Table:
    """An empty table without a frame, whose cells are folded and never cut; with a line below any headings."""
    from rich.box import Box
    from rich.table import Table

    line = Box("    \n    \n ── \n    \n    \n    \n    \n    \n")
    made = Table(box=line if headings else None, show_header=bool(headings), pad_edge=False, padding=(0, 2, 0, 0),
                 show_edge=False, header_style="bold")  # fmt: skip
    for heading in headings:
        made.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    return made


def pairs(values: Mapping[str, str]) -> Table:
    """A table of names and texts without headings; a long text is wrapped beside its name."""
    from rich.text import Text

    made = table()
    made.add_column(style="dim", no_wrap=True, overflow="fold")
    made.add_column(overflow="fold")
    for key, value in values.items():
        made.add_row(Text(key), Text(value))
    return made


def titled(title: str, *parts: Any) -> Group:
    """`parts` below a bold title, and an empty line after them."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(title, style="bold"), *parts, Text(""))


def footnotes(notes: Iterable[str]) -> Table:
    """The notes, numbered from 1, each wrapped beside its number."""
    from rich.text import Text

    made = table()
    made.add_column(no_wrap=True, justify="right")
    made.add_column(overflow="fold")
    for index, note in enumerate(notes, start=1):
        made.add_row(Text(f"[{index}]"), Text(note))
    return made


def _is(shown: str, bound: float) -> bool:
    return float(shown) == bound


def _named(key: str) -> tuple[str, str]:
    if key in _PLAIN:
        return _PLAIN[key]
    for ending, unit in _UNITS.items():
        if key.endswith(ending):
            key = key.removesuffix(ending)
            return _WORDS.get(key, key.replace("_", " ")), unit
    return _WORDS.get(key, key.replace("_", " ")), ""
