"""Draw accuracy against tokens and against the time of a step, from sweeps over patch sizes at equal time, one a row:
python docs/law.py TABLE.csv OTHER.csv --names Small Large --sides 32 64 --seconds 200 --out LAW.png."""

import csv
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from longseq.reports.plots import COLOURS, panels, styled

MARKERS = "os^"


@styled
def draw(tables: list[Path], names: list[str], sides: list[int], seconds: float, out: Path) -> None:
    figure, axes = panels(2, len(tables))
    for row, (table, name, side) in enumerate(zip(tables, names, sides, strict=True)):
        draw_row(axes[2 * row], axes[2 * row + 1], table, name, side, seconds)
    figure.savefig(out)


def draw_row(by_tokens: Any, by_time: Any, table: Path, name: str, side: int, seconds: float) -> None:
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    every = sorted({(side // int(row["model.encoder.patch_size"])) ** 2 for row in rows})
    for number, mechanism in enumerate(dict.fromkeys(Path(row["config"]).stem for row in rows)):
        of_it = [row for row in rows if Path(row["config"]).stem == mechanism]
        accuracies = [float(row["test accuracy, mean"]) for row in of_it]
        tokens = [(side // int(row["model.encoder.patch_size"])) ** 2 for row in of_it]
        steps = [1000 * seconds / int(row["steps"]) for row in of_it]
        style: dict[str, Any] = {"color": COLOURS[2 + number], "marker": MARKERS[number], "label": mechanism}
        by_tokens.plot(tokens, accuracies, **style)
        by_time.plot(steps, accuracies, **style)
    by_tokens.set(
        xscale="log", xlabel="tokens", ylabel="test accuracy", title=f"{name} after {seconds:g} s of training"
    )
    by_time.set(xscale="log", xlabel="milliseconds of a step", title="The same, by the time of a step")
    by_tokens.set_xticks(every, list(map(str, every)))
    by_tokens.legend()


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--names", nargs="+", required=True, help="of the data of each table")
    parser.add_argument("--sides", type=int, nargs="+", required=True, help="pixels of a side, for each table")
    parser.add_argument("--seconds", type=float, required=True, help="of a training")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    draw(given.tables, given.names, given.sides, given.seconds, given.out)


if __name__ == "__main__":
    main()
