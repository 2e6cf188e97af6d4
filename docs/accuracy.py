"""Draw the accuracies of a table, ours beside the published: python docs/accuracy.py TABLE.csv --out ACCURACY.png."""

import csv
from argparse import ArgumentParser
from pathlib import Path

from longseq.reports.plots import COLOURS, panels, styled

MARKERS = "ospd^DvPX*h"


@styled
def draw(table: Path, out: Path) -> None:
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    names = [f"{row['task']}: {row['tokens']} tokens" for row in rows]
    tasks = list(dict.fromkeys(names))[::-1]
    figure, (axes,) = panels(1, width=7.5, height=4.2)
    for number, system in enumerate(dict.fromkeys(row["system"] for row in rows)):
        of_it = [(float(row["accuracy"]), tasks.index(name)) for row, name in zip(rows, names, strict=True)
                 if row["system"] == system]  # fmt: skip
        is_ours = not system.startswith("published")
        colour = COLOURS[2 + number % (len(COLOURS) - 2)]
        axes.scatter(*zip(*of_it, strict=True), s=42, marker=MARKERS[number], label=system, edgecolors=colour,
                     facecolors=colour if is_ours else "none", zorder=3)  # fmt: skip
    axes.set_yticks(range(len(tasks)), tasks)
    axes.set(xlabel="test accuracy", xlim=(0.2, 1.02))
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3)
    figure.savefig(out)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    draw(given.table, given.out)


if __name__ == "__main__":
    main()
