"""The validation accuracy of trainings by their minutes and steps: docs/results/curves.csv, and a picture of it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from run_table import KEY, Row, chosen, read, write

from longseq.reports.plots import colour_of, panels, save, styled
from longseq.training.board.curves import read_curves

HEADER = [*KEY, "steps", "minutes", "validation"]


def beside(table: Path) -> Path:
    """The curves of a table of runs."""
    return table.with_name("curves.csv")


def add(table: Path, key: Sequence[str], run: Path, steps: int, minutes: float) -> None:
    """Add the validations of a training, which took so many steps and minutes, to the curves beside a table of runs."""
    named = dict(zip(KEY, key, strict=True))
    rows = [
        named | {"steps": str(step + 1), "minutes": f"{minutes * (step + 1) / steps:.4g}", "validation": f"{value:.4g}"}
        for step, value in read_curves(run)["val/accuracy"]  # Lightning counts a step after its validation
    ]
    write(beside(table), *rows, header=HEADER, key=HEADER[:-2])


@styled
def draw(table: Path, experiment: str, path: Path) -> None:
    """Draw the mean over the seeds of each system at its chosen setting, and a band from the lowest to the highest.
    Validations of different seeds are after the same steps."""
    settings = {name: rows[0]["setting"] for name, rows in chosen(read(table, experiment)).items()}
    points: dict[str, list[Row]] = {}
    for row in read(beside(table), experiment, HEADER):
        if row["setting"] == settings.get(row["system"]):
            points.setdefault(row["system"], []).append(row)
    figure, (by_minutes, by_steps) = panels(2)
    for system, rows in sorted(points.items()):
        steps = sorted({int(row["steps"]) for row in rows})
        values = [[float(row["validation"]) for row in rows if int(row["steps"]) == step] for step in steps]
        minutes = sorted({float(row["minutes"]) for row in rows})
        for axes, x in ((by_minutes, minutes), (by_steps, steps)):
            colour = colour_of(system, sorted(points))
            axes.fill_between(x, [*map(min, values)], [*map(max, values)], color=colour, alpha=0.2, linewidth=0)
            axes.plot(x, [np.mean(of_step) for of_step in values], "o-", color=colour, label=system)
    by_minutes.set(xlabel="minutes of a core", ylabel="validation accuracy", title=experiment)
    by_steps.set(xlabel="steps")
    figure.legend(*by_minutes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7)
    save(figure, path)
