"""The experiments of docs/results/protocol.md: systems with attention beside their controls, at equal time.

    python benchmarks/controlled.py few --data DIR
    python benchmarks/controlled.py few --data DIR --judge

DIR holds SpeechCommands, MNIST, free-spoken-digit-dataset and ESC-50-master. experiments.py describes the experiments;
pixels and pathfinder have parts, which run one after the other. First the time of a step of every system is measured:
seconds of the processor, one thread, the systems in turns. Then each training takes the steps that fit into the
experiment's minutes, so that it may share the machine, or run on another one. Each system tries three learning rates
with seed 0, and further ones while the best on the validation is the lowest or the highest; then it trains with the
other seeds at its best rate. A training adds a row to docs/results/runs.csv, and its validations to curves.csv beside
it, and is not run again, so the work can be done in pieces, and by several processes with different --systems. A
training that was stopped goes on from its last checkpoint.

No training reads the test. --judge, after all trainings, tests the chosen checkpoints, adds the figures to their rows,
writes the comparisons that the protocol names to docs/results/comparisons.csv, and draws the validations by minutes.
"""

import argparse
import fcntl
import gc
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import curves
import torch
from experiments import EXPERIMENTS, Experiment
from judge import judge
from run_table import RUNS, Row, best_rate, chosen, measured, read

from longseq.cli import main as longseq

VALIDATIONS = 5  # of a training
LEARNED = 0.6  # the validation accuracy of one system with which the experiment after it begins
_TRIALS, _ROUNDS = (5, 35), 3  # steps of the two trainings whose times are subtracted, and how often this is done


class Trainer(NamedTuple):
    """Trains the systems of one experiment."""

    name: str
    experiment: Experiment
    data: Path
    folder: Path  # of all trainings
    table: Path  # of runs

    @property
    def label(self) -> str:
        """The name, for files."""
        return self.name.replace(",", "").replace("/", "-").replace(" ", "-")

    @property
    def place(self) -> Path:
        """The folder of the experiment's data and trainings."""
        return self.folder / self.label

    @property
    def systems(self) -> list[str]:
        return [*self.experiment.systems, *self.experiment.peers]

    def words(self, flags: str) -> list[str]:
        return flags.replace("DATA", str(self.data)).replace("RUNS", str(self.folder)).split()

    def fit(self, flags: str, folder: Path, *more: str) -> None:
        """Train in this process: a start would take longer than some trials."""
        always = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false", "--baseline", "false"]
        always += ["--trainer.limit_test_batches", "0", "--trainer.default_root_dir", str(folder)]
        longseq(["fit", *self.words(flags), *always, "--experiment", "run", *more])
        gc.collect()  # trainer, model and data refer to each other: several trainings would hold gigabytes of data

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Other processes of the experiment wait here."""
        self.place.mkdir(parents=True, exist_ok=True)
        with open(self.place / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def prepare(self) -> None:
        """Write the data, and train the common model, if it is not there."""
        if self.experiment.prepare:
            self.experiment.prepare(self.data, self.place)
        if self.experiment.start and not self.common.exists():
            self.fit(self.experiment.start, self.place / "start")

    @property
    def common(self) -> Path:
        return self.place / "start/runs/run/0/best.ckpt"

    def of_other(self, experiment: str, system: str) -> Row:
        """The row of a system in another experiment, at its chosen rate with seed 0."""
        rows = chosen(read(self.table, experiment))
        if system not in rows:
            raise SystemExit(f"error: {self.table}: has no runs of {system} in {experiment}; train it there first")
        return rows[system][0]

    def first_model(self, system: str) -> Path | None:
        """The checkpoint from which a system goes on."""
        if not (after := self.experiment.after):
            return self.common if self.experiment.start else None
        row = self.of_other(after, system)
        before = self._replace(name=after)
        return before.checkpoint(before.run(system, row["setting"], row["seed"]))

    def fit_system(self, system: str, folder: Path, steps: int, *more: str) -> None:
        flags = f"{self.experiment.flags} {self.experiment.systems[system]}"
        if first := self.first_model(system):
            more += "--model.init_from", str(first)
        self.fit(flags, folder, "--trainer.max_epochs", "-1", "--trainer.max_steps", str(steps), *more)

    def steps(self, system: str) -> int:
        """The steps of a training of this system."""
        if other := self.experiment.paced_by:
            row = self.of_other(other, system)
            return round(int(row["steps"]) * self.experiment.minutes / float(row["minutes"]))
        return round(60 * self.experiment.minutes / self.speeds()[system])

    def speeds(self) -> dict[str, float]:
        """The seconds that the processor takes for a step of each system, as measured once."""
        experiment, times = f"{self.name}/speeds", dict[str, list[float]]()
        known = {row["system"] for row in read(self.table, experiment)}
        missing = [system for system in self.experiment.systems if system not in known]
        for number in range(_ROUNDS):
            for system in missing:
                seconds = []
                for steps in _TRIALS:
                    trial = self.place / "trials" / f"{system}-{number}-{steps}"
                    began = time.process_time()
                    self.fit_system(system, trial, steps, "--trainer.limit_val_batches", "0")
                    seconds.append(time.process_time() - began)
                times.setdefault(system, []).append((seconds[1] - seconds[0]) / (_TRIALS[1] - _TRIALS[0]))
        for system, of_rounds in times.items():
            figures = {"steps": 1, "minutes": statistics.median(of_rounds) / 60}
            measured(self.table, (experiment, system, "", "0"), lambda figures=figures: figures)
        return {row["system"]: 60 * float(row["minutes"]) for row in read(self.table, experiment)}

    def run(self, system: str, setting: str, seed: str) -> Path:
        return self.place / f"{system}-{setting}-{seed}".replace(",", "").replace(" ", "_")

    def checkpoint(self, run: Path) -> Path:
        (path,) = run.glob("runs/run/*/best.ckpt")
        return path

    def row(self, system: str, rate: float, seed: int, steps: int) -> Row:
        """The row of a training, which is run if the table lacks it."""
        key = self.name, system, f"{rate:g}", str(seed)

        def measure() -> dict[str, object]:
            folder = self.run(*key[1:])
            more = ["--model.learning_rate", f"{rate:g}", "--seed_everything", str(seed)]
            more += ["--trainer.check_val_every_n_epoch", "null"]
            more += ["--trainer.val_check_interval", str(max(steps // VALIDATIONS, 1))]
            if list(folder.glob("runs/run/*/last.ckpt")):
                more.append("--resume")
            self.fit_system(system, folder, steps, *more)
            (metrics,) = folder.glob("runs/run/*/metrics.json")
            curves.add(self.table, key, metrics.parent, steps, self.experiment.minutes)
            figures = json.loads(metrics.read_text())
            described = {"steps": steps, "minutes": self.experiment.minutes}
            flags = f"{self.experiment.flags} {self.experiment.systems[system]}".strip()
            return {"validation": figures["val/accuracy"], "loss": figures["val/loss"], **described, "flags": flags}

        return measured(self.table, key, measure)

    def train(self, system: str) -> None:
        """Train a system with all rates and seeds that the protocol asks for."""
        if peer := self.experiment.peers.get(system):
            for seed in range(self.experiment.seeds):
                asked = self.place, self.run(system, peer.setting, str(seed)), self.experiment.minutes, seed
                measured(self.table, (self.name, system, peer.setting, str(seed)), lambda asked=asked: peer.fit(*asked))
            return
        steps, rates = self.steps(system), self.experiment.rates
        if self.experiment.rates_of:
            rates = (float(self.of_other(self.experiment.rates_of, system)["setting"]),)
        best = best_rate(rates, lambda rate: self.row(system, rate, 0, steps))
        for seed in range(1, self.experiment.seeds):
            self.row(system, best, seed, steps)

    def may_begin(self) -> bool:
        """Whether a system has learned the experiment before, if there is one."""
        if not (before := self.experiment.after):
            return True
        systems = self.experiment.systems  # and not peers, which train nothing that the systems could go on from
        return any(float(row["validation"]) >= LEARNED for row in read(self.table, before) if row["system"] in systems)


def main() -> None:
    names = [*dict.fromkeys(name.partition("/")[0] for name in EXPERIMENTS)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=names)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--runs", type=Path, default=Path("runs/controlled"), help="the folder of all trainings")
    parser.add_argument("--table", type=Path, default=RUNS, help="the table of runs; the other tables lie beside it")
    parser.add_argument("--systems", nargs="+", help="only these")
    parser.add_argument("--judge", action="store_true", help="read the test, after all trainings")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    parts = [
        Trainer(name, experiment, given.data, given.runs.resolve(), given.table)
        for name, experiment in EXPERIMENTS.items()
        if name.partition("/")[0] == given.experiment
    ]
    for system in given.systems or []:
        if system not in parts[0].systems:
            raise SystemExit(f"error: systems: {system}: must be one of {', '.join(parts[0].systems)}")
    for trainer in parts:
        if not trainer.may_begin():
            print(f"{trainer.name}: left out, as no system has {LEARNED:g} on the validation before it")
            continue
        if given.judge:
            judge(trainer)
            continue
        with trainer.alone():
            trainer.prepare()
            if not trainer.experiment.paced_by:
                trainer.speeds()
        for system in trainer.systems:
            if system in (given.systems or trainer.systems):
                trainer.train(system)


if __name__ == "__main__":
    main()
