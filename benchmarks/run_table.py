"""The table of runs, docs/results/runs.csv, and the tables on pages that are made from it.

    python benchmarks/run_table.py
    python benchmarks/run_table.py --of elpv front_door

Each row is one training: what ran, where and when, and its figures. The scripts beside this one add rows. A page marks
the place of a table with a comment, <!-- runs: EXPERIMENT -->, before it and <!-- end --> after it; this command writes
all of them anew. <!-- compared: EXPERIMENT --> marks a table of comparisons.csv, which lies beside it. With --of it
prints the tables of the experiments whose names begin so.
"""

import argparse
import csv
import datetime
import fcntl
import io
import os
import re
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from longseq.reports.plots import machine, markdown

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "docs/results/runs.csv"
KEY = ["experiment", "system", "setting", "seed"]
FIGURES = ["validation", "loss", "test", "f1", "false alarms an hour", "epochs", "steps", "minutes"]
HEADER = [*KEY, *FIGURES, "machine", "date", "commit", "flags"]
_SHOWN = ["validation", "test", "f1", "false alarms an hour", "steps", "epochs", "minutes"]
COMPARED = ["experiment", "first", "second", "n", "groups", "difference", "low", "high", "McNemar p of each seed"]
_MARKED = re.compile(r"(<!-- (runs|compared): (.+?) -->\n).*?(<!-- end -->)", re.S)
Row = dict[str, str]


def read(table: Path, experiment: str | None = None, header: Sequence[str] = HEADER) -> list[Row]:
    """The rows of an experiment, or all, in the order in which they were added. A column that the table lacks is
    empty."""
    if not table.exists():
        return []
    with open(table, newline="") as file:
        of_experiment = [row for row in csv.DictReader(file) if experiment in (None, row["experiment"])]
    return [{name: row.get(name) or "" for name in header} for row in of_experiment]


def write(table: Path, *new: Row, header: Sequence[str] = HEADER, key: Sequence[str] = KEY) -> None:
    """Add rows, or replace those of the same key. Several processes may write."""
    table.parent.mkdir(parents=True, exist_ok=True)
    with open(table, "a+", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        rows = {tuple(row[name] for name in key): row for row in [*csv.DictReader(file), *new]}
        text = io.StringIO()
        writer = csv.DictWriter(text, header, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())
        file.truncate(0)
        file.write(text.getvalue())


def measured(table: Path, key: Sequence[str], measure: Callable[[], Mapping[str, object]]) -> Row:
    """The row of an experiment, system, setting and seed. If the table lacks it, it is measured and written, with the
    machine, the date and the commit.

    Its minutes, unless they are among its figures, are those of the processor, so that other processes count little:
    with one thread they are the time on an idle core.
    """
    for row in read(table, key[0]):
        if [row[name] for name in KEY] == list(key):
            return row
    began = _processor_seconds()
    figures = dict(measure())
    figures.setdefault("minutes", (_processor_seconds() - began) / 60)
    row = dict.fromkeys(HEADER, "") | dict(zip(KEY, key, strict=True))
    row |= {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in figures.items()}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    row |= {"machine": machine(), "date": datetime.date.today().isoformat(), "commit": commit.stdout.strip()}
    write(table, row)
    print(*(row[name] for name in [*KEY, *FIGURES]), flush=True)
    return row


def _processor_seconds() -> float:
    return sum(os.times()[:4])  # of this process and of those that it started


def best_rate(rates: Sequence[float], row_of: Callable[[float], Row]) -> float:
    """The learning rate that is best on the validation. While that is the lowest or the highest of several, the next
    one is tried too: half or twice of it."""
    rows = {rate: row_of(rate) for rate in rates}
    while (best := float(best_of([*rows.values()])["setting"])) in (min(rows), max(rows)) and len(rates) > 1:
        rate = best / 2 if best == min(rows) else 2 * best
        rows[rate] = row_of(rate)
    return best


def measure_all(
    table: Path,
    experiment: str,
    settings: Mapping[str, Sequence[str]],
    seeds: int,
    measure: Callable[[str, str, int], Mapping[str, object]],
) -> None:
    """Try all settings of each system with seed 0, and measure the other seeds with the best one on the validation."""

    def row_of(system: str, setting: str, seed: int) -> Row:
        return measured(table, (experiment, system, setting, str(seed)), lambda: measure(system, setting, seed))

    for system, names in settings.items():
        best = best_of([row_of(system, setting, 0) for setting in names])["setting"]
        for seed in range(1, seeds):
            row_of(system, best, seed)


def best_of(rows: Sequence[Row]) -> Row:
    """The row with the highest accuracy on the validation; of several, the one with the lowest loss, or the first."""
    return max(rows, key=lambda row: (float(row["validation"]), -float(row["loss"] or 0)))


def chosen(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each system with the setting that is best with seed 0, by seed."""
    systems: dict[str, list[Row]] = {}
    for row in rows:
        systems.setdefault(row["system"], []).append(row)
    for name, of_system in systems.items():
        best = best_of([row for row in of_system if row["seed"] == "0"])["setting"]
        systems[name] = sorted((row for row in of_system if row["setting"] == best), key=lambda row: int(row["seed"]))
    return systems


def mean(rows: Sequence[Row], column: str = "validation") -> float:
    return statistics.mean(float(row[column]) for row in rows)


def written(rows: Sequence[Row]) -> str:
    """A table in Markdown with a line for each system: the mean over its seeds, and in brackets the lowest and the
    highest. The best on the validation comes first. A column that no row fills is left out."""
    shown = [name for name in _SHOWN if any(row[name] for row in rows)]
    lines = [
        [name, rows[0]["setting"], str(len(rows)), *(_figure(rows, column) for column in shown)]
        for name, rows in sorted(chosen(rows).items(), key=lambda item: -mean(item[1]))
    ]
    return markdown(["system", "setting", "seeds", *shown], lines)


def _figure(rows: Sequence[Row], column: str) -> str:
    figures = [float(row[column]) for row in rows if row[column]]
    if not figures:
        return ""
    average = statistics.mean(figures)
    if column in ("steps", "epochs"):
        return f"{average:,.0f}"
    if column in ("minutes", "false alarms an hour"):
        return f"{average:.2g}"
    return f"{average:.3f}" + (f" ({min(figures):.3f} to {max(figures):.3f})" if len(figures) > 1 else "")


def comparisons(table: Path) -> Path:
    """The table of comparisons, beside a table of runs."""
    return table.with_name("comparisons.csv")


def _differences(rows: Sequence[Row]) -> str:
    """A table in Markdown of differences in test accuracy, each with its 95 % interval."""
    header = ["", "minus", "difference (95 % interval)", "n, groups", "McNemar's p of each seed"]
    lines = [
        [
            row["second"],
            row["first"],
            f"{row['difference']} ({row['low']} to {row['high']})",
            f"{int(row['n']):,}, {int(row['groups']):,}",
            row["McNemar p of each seed"].replace(" ", ", "),
        ]
        for row in rows
    ]
    return markdown(header, lines)


def generated(page: str, table: Path) -> str:
    """A page with its marked tables written anew.

    Raises:
        KeyError: If a table is of an experiment without rows.
    """

    def write_table(match: re.Match[str]) -> str:
        begin, kind, experiment, end = match.groups()
        source, header, show = {
            "runs": (table, HEADER, written),
            "compared": (comparisons(table), COMPARED, _differences),
        }[kind]
        if not (rows := read(source, experiment, header)):
            raise KeyError(f"{source} has no rows of {experiment}")
        return f"{begin}{show(rows)}{end}"

    return _MARKED.sub(write_table, page)


def print_tables(table: Path, *beginnings: str) -> None:
    """Print the tables of all experiments whose names begin so."""
    names = dict.fromkeys(row["experiment"] for row in read(table) if row["validation"])  # rows of speeds have none
    for name in names:
        if name.startswith(beginnings):
            print(f"{name}\n{written(read(table, name))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", nargs="+", help="print the tables of these experiments")
    given = parser.parse_args()
    if given.of:
        print_tables(RUNS, *given.of)
        return
    for path in sorted((ROOT / "docs/results").rglob("*.md")):
        page = path.read_text()
        if (new := generated(page, RUNS)) != page:
            path.write_text(new)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
