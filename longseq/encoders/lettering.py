"""Text in figures: names in any script, and titles that fit above their panels."""

import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

from matplotlib import get_data_path
from matplotlib.axes import Axes
from matplotlib.font_manager import FontEntry, FontProperties, findfont, fontManager, get_font

_BASE = "DejaVu Sans"  # comes with matplotlib: Latin, Greek, Cyrillic, Arabic, Hebrew and more
_AFTER = " _-/"  # a line is broken after one of these, if it can be


def families(text: str) -> list[str] | None:
    """Fonts of this machine that have all characters of a text, in the order of their use; None if there are none."""
    missing, chosen = set(text) - _characters(findfont(_BASE)), [_BASE]
    if missing:
        fonts = {font.name: font.fname for font in fontManager.ttflist if _is_plain(font)}
        names = sorted(fonts, key=lambda name: ("sans" not in name.lower(), name))
    while missing:
        best = max(names, key=lambda name: len(missing & _characters(fonts[name])), default=None)
        if best is None or not missing & _characters(fonts[best]):
            return None
        chosen.append(best)
        missing -= _characters(fonts[best])
    return chosen


def drawable(names: Sequence[str]) -> list[str]:
    """The names of classes on one line, as figures can show them: "class NUMBER" for one that no font can write."""
    on_one_line = [" ".join(name.split()) for name in names]
    return [f"class {number}" if families(name) is None else name for number, name in enumerate(on_one_line)]


def key_of(names: Sequence[str]) -> dict[int, str]:
    """The names that figures replace by numbers."""
    return {number: name for number, name in enumerate(names) if families(" ".join(name.split())) is None}


def legible(text: str) -> str:
    """The text with "?" in place of each character that no font can write."""
    return "".join(each if each == "\n" or families(each) else "?" for each in text)


def lettering(*texts: str) -> dict[str, Any]:
    """How matplotlib writes these texts: with the fonts that they need, and never as mathematics."""
    needed = families(legible("".join(texts)).replace("\n", "")) or [_BASE]
    is_plain = needed == [_BASE] and all(text.isascii() for text in texts)  # bold faces have fewer characters
    return {"parse_math": False} | ({} if is_plain else {"fontfamily": needed, "fontweight": "normal"})


def width_of(text: str, size: float) -> float:
    """The width of a line in points.

    Args:
        text: The line.
        size: The size of the font, in points.
    """
    font = get_font([findfont(FontProperties(family=[family])) for family in families(text) or [_BASE]])
    font.set_size(size, 72)
    font.set_text(text, 0.0)
    return font.get_width_height()[0] / 64


def cut(text: str, width: float, size: float) -> str:
    """A line of at most this width, in points: what is too long loses its middle."""
    text = legible(text)
    if width_of(text, size) <= width:
        return text
    for kept in range(len(text) - 1, 0, -1):
        shorter = f"{text[: (kept + 1) // 2].rstrip()}…{text[len(text) - kept // 2 :].lstrip()}"
        if width_of(shorter, size) <= width:
            return shorter
    return "…"


def fits(text: str, width: float, size: float) -> bool:
    """Whether a text fits into two lines of this width without a cut."""
    return all(width_of(line, size) <= width for line in _two_lines(text, width, size))


def fitted(text: str, width: float, size: float) -> str:
    """A text on at most two lines of this width, in points. A line break of the text stays."""
    return "\n".join(cut(line, width, size) for line in _two_lines(text, width, size))


def set_title(axes: Axes, text: str, width: float, size: float) -> None:
    """Write a title of at most two lines above a panel of this width, in points."""
    title = fitted(text, width, size)
    axes.set_title(title, fontsize=size, **lettering(title))


@cache
def _characters(path: str) -> frozenset[str]:
    return frozenset(map(chr, get_font([path]).get_charmap()))


def _is_plain(font: FontEntry) -> bool:
    """Whether a font is upright, of usual weight, and none of matplotlib's own, which are for mathematics."""
    is_own = font.fname.startswith(get_data_path())
    return font.style == "normal" and font.weight in (400, "normal", "regular") and not is_own


def _two_lines(text: str, width: float, size: float) -> list[str]:
    first, *others = legible(text).split("\n")
    if others:
        return [first, " ".join(others)]
    if width_of(first, size) <= width:
        return [first]
    ends = [end for end in range(1, len(first)) if width_of(first[:end].rstrip(), size) <= width]
    after = [end for end in ends if first[end - 1] in _AFTER]
    whole = [end for end in ends if not unicodedata.combining(first[end])]
    end = (after or whole or [1])[-1]
    return [first[:end].rstrip(), first[end:]]
