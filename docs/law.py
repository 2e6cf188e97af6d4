"""Draw accuracy against tokens and against the time of a step, from a sweep over patch sizes at equal time:
python docs/law.py TABLE.csv --side 32 --seconds 200 --out LAW.png."""

import csv
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from longseq.reports.plots import COLOURS, panels, styled

MARKERS = "os^"


@styled
def draw(table: Path, side: int, seconds: float, out: Path) -> None:
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    figure, (by_tokens, by_seconds) = panels(2)
    names = list(dict.fromkeys(Path(row["config"]).stem for row in rows))
    for number, name in enumerate(names):
        of_name = [row for row in rows if Path(row["config"]).stem == name]
        accuracies = [float(row["test accuracy, mean"]) for row in of_name]
        tokens = [(side // int(row["model.encoder.patch_size"])) ** 2 for row in of_name]
        steps = [1000 * seconds / int(row["steps"]) for row in of_name]
        style: dict[str, Any] = {"color": COLOURS[2 + number], "marker": MARKERS[number], "label": name}
        by_tokens.plot(tokens, accuracies, **style)
        by_seconds.plot(steps, accuracies, **style)
    by_tokens.set(xscale="log", xlabel="tokens", ylabel="test accuracy", title=f"After {seconds:g} s of training")
    by_seconds.set(xscale="log", xlabel="milliseconds of a step", title="The same, by the time of a step")
    by_tokens.set_xticks(tokens, list(map(str, tokens)))
    by_tokens.legend()
    figure.savefig(out)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--side", type=int, required=True, help="pixels of a side")
    parser.add_argument("--seconds", type=float, required=True, help="of a training")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    draw(given.table, given.side, given.seconds, given.out)
