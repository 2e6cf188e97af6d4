"""k-fold cross-validation: a run for each fold, then a table with mean and spread of the figures."""

import json
import math
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longseq.cli.errors import UserError
from longseq.cli.names import shown
from longseq.cli.runs.folders import METRICS, config_of
from longseq.cli.runs.resuming import folds_begun
from longseq.files.storage import write_text
from longseq.reports.plots import machine, markdown, write_csv

# Settings that may differ between the folds of one cross-validation, because they do not change results.
_FREE = (
    "data.fold", "data.root", "data.num_workers", "data.in_memory", "trainer.default_root_dir", "trainer.logger",
    "trainer.enable_progress_bar", "trainer.log_every_n_steps",
)  # fmt: skip


@dataclass(frozen=True)
class Fold:
    """One run of a cross-validation.

    Attributes:
        number: The fold that is held out, counted from 1.
        of: The number of folds.
    """

    number: int
    of: int

    def flags(self, tested: str | None) -> list[str]:
        """The flags of this run. It uses no checkpoint of another run."""
        return ["--data.folds", str(self.of), "--data.fold", str(self.number)]


def folds_of(folds: int, data: Any) -> list[Fold]:
    """The runs that --folds asks for.

    Raises:
        UserError: If the data cannot be divided into folds.
    """
    if "folds" not in data.init_args:
        raise UserError(f"folds: {data.class_path} has no folds; derive it from datamodules.DataModule")
    return [Fold(number, folds) for number in range(1, folds + 1)]


def folds_left(experiment: Path, folds: list[Fold], resumed: Path | None, settings: Mapping[str, Any]) -> list[Fold]:
    """The folds of an experiment's newest cross-validation that are still to be trained. The resumed one comes first.

    Args:
        experiment: The folder of the runs.
        folds: All folds.
        resumed: The folder of the resumed run, if there is one.
        settings: The configuration of this command.

    Raises:
        UserError: If the resumed run is none of the folds, or if a finished fold was trained with other settings.
    """
    runs = folds_begun(experiment, len(folds))
    now = next((number for number, run in runs.items() if resumed is not None and run.samefile(resumed)), None)
    finished = {number: run for number, run in runs.items() if (run / METRICS).exists() and number != now}
    if resumed is not None and now is None:
        what = f"{resumed} is none of the newest {len(folds)} folds in {experiment}"
        raise UserError(f"resume: {what}; leave out --folds")
    for run in finished.values():
        _refuse_other_settings(run, settings)
    left = [fold for fold in folds if fold.number not in finished]
    return sorted(left, key=lambda fold: fold.number != now)


def _refuse_other_settings(run: Path, settings: Mapping[str, Any]) -> None:
    parts = ("model", "data", "trainer", "seed_everything")
    before, now = ({part: config.get(part) for part in parts} for config in (config_of(run), settings))
    for key, was, is_now in _differences(before, now):
        if not key.startswith(_FREE):
            what = f"{key} is {_named(is_now)} here, and was {_named(was)} in the finished fold {run}"
            raise UserError(f"resume: {what}; give the flags of its start, or leave out --resume")


def _differences(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each key whose value differs, with both values. Arguments that one side lacks are new in this version."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in sorted(before.keys() & now.keys()):
            inner = key if name in ("class_path", "init_args") else f"{key}.{name}".lstrip(".")
            yield from _differences(before[name], now[name], inner)
    elif isinstance(before, list | tuple) and isinstance(now, list | tuple) and len(before) == len(now):
        for was, is_now in zip(before, now, strict=True):
            yield from _differences(was, is_now, key)
    elif before != now:
        yield key, before, now


def _named(value: Any) -> Any:
    return value.get("class_path", value) if isinstance(value, Mapping) else value


def write_report(experiment: Path, folds: int, args: Sequence[str]) -> None:
    """Print a table of each fold's figures with mean and spread, and write it to the folder of the last fold."""
    runs = dict(sorted(folds_begun(experiment, folds).items()))
    figures = {number: json.loads((run / METRICS).read_text()) for number, run in runs.items()}
    names = sorted(set.intersection(*map(set, figures.values())), key=lambda name: (not name.startswith("test/"), name))
    header = ["fold", "run", *(name.replace("/", " ") for name in names)]
    rows = [[str(number), str(run), *(_four(figures[number][name]) for name in names)] for number, run in runs.items()]
    columns = [[figures[number][name] for number in runs] for name in names]
    for what, of in {
        "mean": statistics.mean, "standard deviation": statistics.stdev, "lowest": min, "highest": max,
    }.items():  # fmt: skip
        spread = [math.nan if any(map(math.isnan, column)) else of(column) for column in columns]
        rows.append([what, "", *map(_four, spread)])
    last = max(runs.values(), key=lambda run: int(run.name))
    write_csv(last / "folds.csv", header, rows)
    table = markdown(header, rows)
    here = machine(config_of(last)["trainer"]["accelerator"])
    write_text(last / "folds.md", f"    longseq {shlex.join(args)}\n\n{here}\n\n{table}")
    print("\n" + "\n".join(map(shown, table.splitlines())))
    print(shown(f"{last}/folds.md, folds.csv"))


def _four(value: float) -> str:
    return f"{value:.4f}"
