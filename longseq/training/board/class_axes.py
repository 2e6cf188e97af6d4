"""The classes at the axes of a matrix: their names, or numbers with a key below."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase

from longseq.encoders.lettering import cut, lettering, width_of

MOST_IN_KEY = 100  # classes: the key of more would be larger than the matrix
_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def are_short(names: Sequence[str], side: float, size: float) -> bool:
    """Whether the names fit at the axes, none longer than a third of a side.

    Args:
        names: The names, as figures can show them.
        side: The side of the matrix, in points.
        size: The size of the font, in points.
    """
    return len(names) * size * 1.3 <= side and max(width_of(name, size) for name in names) <= side / 3


def write_classes(axes: Axes, names: Sequence[str], side: float, size: float) -> None:
    """Write the names of the classes at both axes if they are short, else their numbers from 0."""
    if are_short(names, side, size):
        ticks, labels = range(len(names)), list(names)
        room = 1.5 * size  # three characters stand upright
    else:
        each = side / len(names)
        ticks = range(0, len(names), next((step for step in _STEPS if step * each >= 1.3 * size), len(names)))
        labels, room = [str(number) for number in ticks], ticks.step * each
    is_upright = all(width_of(label, size) + 2 <= room for label in labels)
    text = {"fontsize": size, **lettering(*labels)}
    axes.set_xticks(ticks, labels, rotation=0 if is_upright else 90, **text)
    axes.set_yticks(ticks, labels, **text)


def figure_with_key(
    width: float, height: float, names: Sequence[str], size: float, unwritten: Collection[int] = ()
) -> tuple[Figure, FigureBase]:
    """A figure, and its part above the key, which has the number and the name of each class.

    Args:
        width, height: The size of that part, in inches.
        names: The names, as figures can show them. Without any, and with more than MOST_IN_KEY, there is no key.
        size: The size of the font, in points.
        unwritten: The numbers of names that no font can write.
    """
    if not 0 < len(names) <= MOST_IN_KEY:
        figure = Figure((width, height), layout="constrained")
        return figure, figure
    shown = ["(no font: see the text)" if number in unwritten else name for number, name in enumerate(names)]
    widest, of_number = max(width_of(name, size) for name in shown), width_of(f"{len(names)}  ", size)
    columns = max(int(72 * width / (of_number + widest + 2 * size)), math.ceil(width / 2))
    rows = math.ceil(len(names) / columns)
    room, below = width / columns, (rows + 1) * 1.35 * size / 72
    figure = Figure((width, height + below), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[height, below])
    upper, key = parts
    for number, name in enumerate(shown):
        column, row = divmod(number, rows)
        x, y = column * room + 0.05, 1 - (row + 0.5) / (rows + 1)
        key.text(x / width, y, str(number), fontsize=size, va="center")  # apart: a name may run to the left
        short = cut(name, 72 * room - of_number - 1.5 * size, size)
        key.text((x + of_number / 72) / width, y, short, fontsize=size, va="center", **lettering(short))
    return figure, upper
