"""The test of an experiment of controlled.py: the chosen checkpoints' answers, and the comparisons of the protocol."""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import curves
import numpy as np
from paired import Tested, answers_of, group_of, interval, mcnemar
from run_table import COMPARED, Row, chosen, comparisons, mean, read, write

from longseq.cli import main as longseq
from longseq.reports.plots import write_csv

if TYPE_CHECKING:
    from controlled import Trainer

TRIALS, WINDOW, EMPTY_HOURS = 100, 10, 1  # of needle: recordings of each duration; seconds; hours of each duration


class Judged(NamedTuple):
    """A test of a training. One training of Needles has several: of each duration, as one sequence and in windows."""

    experiment: str
    system: str
    tested: Tested
    false_alarms: str = ""  # an hour


def judge(trainer: "Trainer") -> None:
    """Test the chosen checkpoints, complete their rows, and compare each system with the better ones of primary."""
    of_all = chosen(read(trainer.table, trainer.name))
    best = {name: of_all[name] for name in trainer.systems if name in of_all}
    missing = [name for group in trainer.experiment.primary for name in group if name not in best]
    if missing:
        raise SystemExit(f"error: {trainer.table}: has no runs of {', '.join(missing)}; train them first")
    answers: dict[str, dict[str, list[Tested]]] = {}
    for system, rows in best.items():
        for row in rows:
            for judged in _tests(trainer, system, row):
                test = {"test": f"{judged.tested.right.mean():.4g}", "false alarms an hour": judged.false_alarms}
                write(trainer.table, row | {"experiment": judged.experiment, "system": judged.system} | test)
                answers.setdefault(judged.experiment, {}).setdefault(judged.system, []).append(judged.tested)

    def better(systems: list[str]) -> str:
        return max(systems, key=lambda name: mean(best[name]))

    ours, control = map(better, trainer.experiment.primary)
    first = {experiment: {control: tested[control]} | tested for experiment, tested in answers.items()}
    compare(trainer.table, ours, first, trainer.experiment.group)
    curves.draw(trainer.table, trainer.name, trainer.table.with_name(f"curves-{trainer.label}.png"))


def compare(runs: Path, ours: str, answers: Mapping[str, Mapping[str, list[Tested]]], group: str | None = None) -> None:
    """Write by how much our system is ahead of each other one, in each experiment, to the table of comparisons beside
    the table of runs."""
    rows = [
        [experiment, first, ours, *_compared(tested[first], tested[ours], group)]
        for experiment, tested in answers.items()
        for first in tested
        if first != ours
    ]
    table = comparisons(runs)
    others = [row for row in read(table, header=COMPARED) if row["experiment"] not in answers]
    write_csv(table, COMPARED, [*([*row.values()] for row in others), *rows])


def _compared(first: list[Tested], second: list[Tested], group: str | None) -> list[str]:
    """The cells of a comparison after its names. Only seeds that both systems have are compared."""
    pairs = [*zip(first, second, strict=False)]
    names = first[0].names
    if any(tested.names != names for pair in pairs for tested in pair):
        raise SystemExit("error: test: all systems must have the same samples; train them again from the same data")
    rights = [(one.right, other.right) for one, other in pairs]
    groups = [group_of(name, group) for _ in pairs for name in names]
    of_first, of_second = (np.concatenate([pair[place] for pair in rights]) for place in (0, 1))
    figures = [f"{figure:+.3f}" for figure in interval(of_first, of_second, groups)]
    ps = " ".join(f"{p:.2g}" if (p := mcnemar(*pair)[2]) else "<1e-300" for pair in rights)
    return [str(len(names)), str(len(set(groups))), *figures, ps]


def _tests(trainer: "Trainer", system: str, row: Row) -> Iterator[Judged]:
    folder = trainer.run(system, row["setting"], row["seed"])
    if peer := trainer.experiment.peers.get(system):
        yield Judged(trainer.name, system, peer.answers(trainer.place, folder, int(row["seed"])))
    elif trainer.experiment.seconds:
        yield from _of_needles(trainer, system, folder)
    else:
        yield Judged(trainer.name, system, answers_of(trainer.checkpoint(folder)))


def _of_needles(trainer: "Trainer", system: str, folder: Path) -> Iterator[Judged]:
    """The figures of needle, which are measured if they are not there."""
    out, (first, *_) = folder / "needle", trainer.experiment.seconds
    if not (out / "trials.csv").exists():
        seconds = [str(each) for each in trainer.experiment.seconds]
        asked = ["--trials", str(TRIALS), "--window", str(WINDOW), "--empty_hours", str(EMPTY_HOURS)]
        checkpoint = str(trainer.checkpoint(folder))
        longseq(["needle", "--ckpt_path", checkpoint, "--seconds", *seconds, *asked, "--out", str(out)])
    trials = _read(out / "trials.csv")
    for figures in _read(out / "table.csv"):
        of_way = [trial for trial in trials if all(trial[name] == figures[name] for name in ("seconds", "heard"))]
        right = np.array([trial["class"] == trial["answer"] for trial in of_way])
        tested = Tested([trial["trial"] for trial in of_way], [int(trial["class"]) for trial in of_way], right)
        experiment = trainer.name if figures["seconds"] == str(first) else f"{trainer.name}/{figures['seconds']} s"
        in_windows = figures["heard"] if figures["heard"].startswith("in windows") else ""
        name = ", ".join(part for part in (system, in_windows) if part)
        yield Judged(experiment, name, tested, figures["false alarms an hour"])


def _read(path: Path) -> list[Row]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
