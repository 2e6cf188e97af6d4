"""The experiments of docs/results/protocol.md: systems with attention beside their controls, at equal time.

    python benchmarks/controlled.py few --data DIR
    python benchmarks/controlled.py few --data DIR --judge

DIR holds SpeechCommands, MNIST, free-spoken-digit-dataset and ESC-50-master. First the time of a step of every system
is measured: seconds of the processor, one thread, the systems in turns. Then each training takes the steps that fit
into the experiment's minutes, so that it may share the machine, or run on another one. Each system tries three
learning rates with seed 0, and further ones while the best on the validation is the lowest or the highest; then it
trains with the other seeds at its best rate. A training adds a row to docs/results/runs.csv and is not run again, so
the work can be done in pieces, and by several processes with different --systems. A training that was stopped goes on
from its last checkpoint.

No training reads the test. --judge, after all trainings, tests the chosen checkpoints, adds the figures to their rows,
and writes the comparisons that the protocol names to docs/results/comparisons.csv.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from paired import answers_of, group_of, interval, mcnemar
from run_table import RUNS, Row, best_of, chosen, mean, measured, read, write

from longseq.cli import main as longseq
from longseq.reports.plots import write_csv

RATES = 1e-3, 2e-3, 4e-3  # tried first
VALIDATIONS = 5  # of a training
COMPARED = ["experiment", "first", "second", "n", "groups", "difference", "low", "high", "McNemar p of each seed"]
_TRIALS, _ROUNDS = (10, 90), 3  # steps of the two trainings whose times are subtracted, and how often this is done


class Experiment(NamedTuple):
    """What its systems share, and how long each trains. ``flags`` are those of ``fit`` before a system's own. In flags
    DATA is the folder of the data sets and RUNS that of the trainings. ``prepare`` gets both folders once, before; the
    flags of ``start`` train a common model from which all systems go on, and whose time does not count.
    ``primary`` are the systems of the primary comparison: the better one of the first group, on the validation, minus
    the better one of the second. ``group`` matches what is drawn together in the bootstrap, in a sample's name."""

    minutes: float
    flags: str
    systems: dict[str, str]
    primary: tuple[list[str], list[str]]
    group: str | None = None
    prepare: Callable[[Path, Path], object] | None = None
    start: str = ""
    seeds: int = 3


def write_words(data: Path, folder: Path) -> None:
    """Ten words of Speech Commands as class folders, with the first 30 clips of each in train; lists as published."""
    from front_door import speech_commands

    counts: dict[str, int] = {}
    for split, word, file in speech_commands(data):
        counts[split + word] = counts.get(split + word, 0) + 1
        if split == "train" and counts[split + word] > 30:
            continue
        (target := folder / "words" / split / word).mkdir(parents=True, exist_ok=True)
        if not (link := target / Path(str(file)).name).exists():
            link.symlink_to(Path(str(file)).resolve())


_LINFORMER, _VERMA = "Linformer, Dynamic", "Verma without E"
_ANY_LENGTH = {
    _LINFORMER: "--model.encoder.attention Linformer --model.encoder.attention.k 32 "
    "--model.encoder.attention.projection Dynamic",
    _VERMA: "--model.encoder.attention Verma --model.encoder.attention.k null "
    "--model.encoder.attention.length_scaling 1",
    "exact softmax": "--config controls/softmax",
    "no attention": "--config controls/none",
    "one key": "--config controls/one_key --model.encoder.attention.projection Mean",
    "pooled features": "--config controls/features",
}
_NEEDLES = (
    "--config audio/needles --data.root DATA --data.test_speakers [theo,yweweler] --data.val_speakers [lucas] "
    "--data.held_out_digits [7,8,9]"
)
EXPERIMENTS = {
    "same": Experiment(
        6,
        f"{_NEEDLES} --data.question same --data.shortest 2.2 --data.num_test 600 --model.pool attention",
        {
            _LINFORMER: "--model.encoder.attention Linformer --model.encoder.attention.k 64 "
            "--model.encoder.attention.projection Dynamic",
            "Verma": "",
            "exact softmax": "--config controls/softmax",
            "pooled features": "--config controls/features",
            "no attention": "--config controls/none --model.pool max",
        },
        ([_LINFORMER, "Verma"], ["pooled features"]),
        start=f"{_NEEDLES} --config controls/none --trainer.max_epochs 10",
    ),
    "few": Experiment(
        4,
        "--config audio/speech_commands --data AudioFolder --data.root RUNS/few/words",
        {
            **_ANY_LENGTH,
            "no attention, long kernel": "--config controls/long_kernel --model.encoder.local.kernel_size 31",
        },
        ([_LINFORMER, _VERMA], ["no attention", "no attention, long kernel"]),
        r"(\w+)_nohash",
        write_words,
    ),
    "pixels": Experiment(
        4,
        "--config image/mnist --data.root DATA",
        {
            "Linformer, k = 64": "",
            "static E": "--config controls/static --model.encoder.attention.k 64",
            "one key": "--config controls/one_key",
            "exact softmax": "--config controls/softmax",
            "no attention": "--config controls/none",
        },
        (["Linformer, k = 64"], ["static E"]),
    ),
    "permuted": Experiment(
        4,
        "--config image/mnist --data.root DATA --data.permutation 0 --data.augment [] --model.encoder.local null",
        {"Linformer, k = 64": "", "static E": "--config controls/static --model.encoder.attention.k 64"},
        (["Linformer, k = 64"], ["static E"]),
    ),
}


class Trainer(NamedTuple):
    """Trains the systems of one experiment."""

    name: str
    experiment: Experiment
    data: Path
    folder: Path  # of all trainings
    table: Path  # of runs

    def words(self, flags: str) -> list[str]:
        return flags.replace("DATA", str(self.data)).replace("RUNS", str(self.folder)).split()

    def fit(self, flags: str, folder: Path, *more: str) -> None:
        """Train in this process: a start would take longer than some trials."""
        always = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false", "--baseline", "false"]
        always += ["--trainer.limit_test_batches", "0", "--trainer.default_root_dir", str(folder)]
        longseq(["fit", *self.words(flags), *always, "--experiment", "run", *more])

    def prepare(self) -> None:
        """Write the data, and train the common model, if it is not there."""
        if self.experiment.prepare:
            self.experiment.prepare(self.data, self.folder / self.name)
        if self.experiment.start and not self.common.exists():
            self.fit(self.experiment.start, self.folder / self.name / "start")

    @property
    def common(self) -> Path:
        return self.folder / self.name / "start/runs/run/0/best.ckpt"

    def fit_system(self, system: str, folder: Path, steps: int, *more: str) -> None:
        flags = f"{self.experiment.flags} {self.experiment.systems[system]}"
        if self.experiment.start:
            more += "--model.init_from", str(self.common)
        self.fit(flags, folder, "--trainer.max_epochs", "-1", "--trainer.max_steps", str(steps), *more)

    def speeds(self) -> dict[str, float]:
        """The seconds that the processor takes for a step of each system, as measured once."""
        experiment, times = f"{self.name}/speeds", dict[str, list[float]]()
        known = {row["system"] for row in read(self.table, experiment)}
        missing = [system for system in self.experiment.systems if system not in known]
        for number in range(_ROUNDS):
            for system in missing:
                seconds = []
                for steps in _TRIALS:
                    trial = self.folder / self.name / "trials" / f"{system}-{number}-{steps}"
                    began = time.process_time()
                    self.fit_system(system, trial, steps, "--trainer.limit_val_batches", "0")
                    seconds.append(time.process_time() - began)
                times.setdefault(system, []).append((seconds[1] - seconds[0]) / (_TRIALS[1] - _TRIALS[0]))
        for system, of_rounds in times.items():
            figures = {"steps": 1, "minutes": statistics.median(of_rounds) / 60}
            measured(self.table, (experiment, system, "", "0"), lambda figures=figures: figures)
        return {row["system"]: 60 * float(row["minutes"]) for row in read(self.table, experiment)}

    def run(self, system: str, rate: str, seed: str) -> Path:
        return self.folder / self.name / f"{system}-{rate}-{seed}".replace(",", "").replace(" ", "_")

    def row(self, system: str, rate: float, seed: int, seconds: float) -> Row:
        """The row of a training, which is run if the table lacks it."""
        steps = round(60 * self.experiment.minutes / seconds)

        def measure() -> dict[str, object]:
            folder = self.run(system, f"{rate:g}", str(seed))
            more = ["--model.learning_rate", f"{rate:g}", "--seed_everything", str(seed)]
            more += ["--trainer.check_val_every_n_epoch", "null"]
            more += ["--trainer.val_check_interval", str(max(steps // VALIDATIONS, 1))]
            if list(folder.glob("runs/run/*/last.ckpt")):
                more.append("--resume")
            self.fit_system(system, folder, steps, *more)
            (metrics,) = folder.glob("runs/run/*/metrics.json")
            figures = json.loads(metrics.read_text())
            described = {"steps": steps, "minutes": self.experiment.minutes}
            flags = f"{self.experiment.flags} {self.experiment.systems[system]}".strip()
            return {"validation": figures["val/accuracy"], "loss": figures["val/loss"], **described, "flags": flags}

        return measured(self.table, (self.name, system, f"{rate:g}", str(seed)), measure)

    def train(self, system: str, seconds: float) -> None:
        """Train a system with all rates and seeds that the protocol asks for."""
        rows = {rate: self.row(system, rate, 0, seconds) for rate in RATES}
        while (best := float(best_of([*rows.values()])["setting"])) in (min(rows), max(rows)):
            rate = best / 2 if best == min(rows) else 2 * best
            rows[rate] = self.row(system, rate, 0, seconds)
        for seed in range(1, self.experiment.seeds):
            self.row(system, best, seed, seconds)

    def judge(self) -> None:
        """Test the chosen checkpoints, complete their rows, and compare each system with the better ones of primary."""
        answers: dict[str, list[np.ndarray]] = {}
        names: list[str] = []
        best = chosen(read(self.table, self.name))
        missing = [name for group in self.experiment.primary for name in group if name not in best]
        if missing:
            raise SystemExit(f"error: {self.table}: has no runs of {', '.join(missing)}; train them first")
        for system, rows in best.items():
            for row in rows:
                folder = self.run(system, row["setting"], row["seed"])
                (checkpoint,) = folder.glob("runs/run/*/best.ckpt")
                tested = answers_of(checkpoint)
                if names and tested.names != names:
                    raise SystemExit(f"error: {checkpoint}: must have the test samples of the other systems")
                names = tested.names
                answers.setdefault(system, []).append(tested.right)
                write(self.table, {**row, "test": f"{tested.right.mean():.4g}"})

        def better(systems: list[str]) -> str:
            return max(systems, key=lambda name: mean(best[name]))

        ours, control = map(better, self.experiment.primary)
        pairs = [(control, ours)] + [(name, ours) for name in answers if name not in (control, ours)]
        rows = [self._compared(first, second, answers, names) for first, second in pairs]
        table = self.table.with_name("comparisons.csv")
        others = [row for row in read(table) if row["experiment"] != self.name]
        write_csv(table, COMPARED, [list(row.values()) for row in [*others, *rows]])

    def _compared(self, first: str, second: str, answers: dict[str, list[np.ndarray]], names: list[str]) -> Row:
        pairs = list(zip(answers[first], answers[second], strict=True))
        groups = [group_of(name, self.experiment.group) for _ in pairs for name in names]
        of_first, of_second = (np.concatenate([pair[place] for pair in pairs]) for place in (0, 1))
        figures = [f"{figure:+.3f}" for figure in interval(of_first, of_second, groups)]
        ps = " ".join(f"{mcnemar(*pair)[2]:.2g}" for pair in pairs)
        cells = [self.name, first, second, str(len(names)), str(len(set(groups))), *figures, ps]
        return dict(zip(COMPARED, cells, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--runs", type=Path, default=Path("runs/controlled"), help="the folder of all trainings")
    parser.add_argument("--table", type=Path, default=RUNS, help="the table of runs; comparisons.csv lies beside it")
    parser.add_argument("--systems", nargs="+", help="only these")
    parser.add_argument("--judge", action="store_true", help="read the test, after all trainings")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    experiment = EXPERIMENTS[given.experiment]
    trainer = Trainer(given.experiment, experiment, given.data, given.runs.resolve(), given.table)
    for system in given.systems or []:
        if system not in experiment.systems:
            raise SystemExit(f"error: systems: {system}: must be one of {', '.join(experiment.systems)}")
    if given.judge:
        trainer.judge()
        return
    trainer.prepare()
    speeds = trainer.speeds()
    for system in given.systems or experiment.systems:
        trainer.train(system, speeds[system])


if __name__ == "__main__":
    main()
