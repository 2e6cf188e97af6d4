"""Which system learns most in five minutes: every sequence mixer in the same encoder, on pixels, frames and samples.

    python benchmarks/verdict.py --data DIR

DIR holds CIFAR-10-images, MNIST and free-spoken-digit-dataset. On each task every system trains for 300 seconds on one
core, in float32, with the local convolutions and without them. The leaders on the validation split train with two more
seeds. A training is validated once, at its end, and then tested. A system's learning rate is the best of three on the
validation split, in trainings of 60 seconds with the local convolutions. They run on the shortest task of a kind, 784
pixels or 101 frames, and the rate is used in all tasks of that kind, with and without the convolutions.

First the time of a step is measured (`--until speed` ends there). Only such measurements of other tasks may run at the
same time. It is stored in TASK/speeds.json, which is valid for one machine. The trainings then take as many steps as
this machine takes in the time, even if they share it or run on another one. Before the first training the hours of all
trainings are printed. Each system's figures are written to TASK/table.csv as soon as it is done, and a system with rows
there is not trained again, so the work can be done in pieces. After you change a system's flags or a task's
configuration, remove its rows, rates and speeds, because they know a system only by its name.

A process uses one core. It writes only the files of its own tasks, so that processes with different --tasks may run at
the same time. --jobs 12 trains twelve systems at a time, on a machine of many cores, or on a GPU, which one small model
leaves mostly idle.
"""

import argparse
import csv
import itertools
import json
import math
import os
import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from jsonargparse.typing import PositiveInt
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter, StrMethodFormatter

from longseq.arguments import ArgumentError
from longseq.files.storage import write_text
from longseq.reports.equal_time import TRIAL, steps_within
from longseq.reports.plots import COLOURS, Report, machine, markdown, panels, styled
from longseq.reports.processes import run_python
from longseq.reports.sweep import sweep

Result = TypeVar("Result")
ROOT = Path(__file__).parent.parent
SETTINGS = ROOT / "docs/results/verdict"
SECONDS_OF_RATES, SECONDS, LEADERS, SEEDS = 60, 300, 2, 3
SECONDS_OF_START = 10  # roughly, to start a training's process
FEWEST_STEPS = 60  # in SECONDS; a system that takes fewer is not trained
RATES = "0.001,0.003,0.01"
HEADER = ["system", "local", "learning rate", "ms of a step", "steps", "validation accuracy", "test accuracy"]
HEADER += ["lowest to highest"]
PAGE_HEADER = ["system", "with convolutions", "ms of a step, steps", "without", "ms, steps", "learning rate"]


class Task(NamedTuple):
    """What is learned: its title, its data's folder in DIR, the task of its kind that finds the learning rates, and how
    many batches its validation and test splits have together. The rest is in SETTINGS."""

    title: str
    root: str
    rates_from: str
    batches: int


class System(NamedTuple):
    """A mechanism: its kind, for its colour, and its flags under --model.encoder.attention. Sizes are 64, except that
    Transformer-LS has 32 summaries and 32 tokens nearby, and Reformer chunks of 32 tokens."""

    kind: str
    flags: str


TASKS = {
    "mnist": Task("784 pixels (MNIST)", ".", "mnist", 57 + 313),
    "pixels": Task("1,024 pixels (grey CIFAR-10)", "CIFAR-10-images", "mnist", 47 + 313),
    "frames-101": Task("101 frames (spoken digits)", ".", "frames-101", 16 + 32),
    "frames-1001": Task("1,001 frames (spoken digits)", ".", "frames-101", 16 + 32),
    "samples": Task("8,000 samples (spoken digits)", ".", "frames-101", 32 + 63),
}
SYSTEMS = {
    "no attention": System("none", "None"),
    "Softmax": System("exact", "Softmax"),
    "Linformer": System("ours", "Linformer .k=64"),
    "Verma, k = 64": System("ours", "Verma .k=64"),
    "Verma without E": System("ours", "Verma .k=null"),
    "Efficient Attention": System("kernel", "EfficientAttention"),
    "Linear Transformer": System("kernel", "LinearTransformer"),
    "Performer": System("kernel", "Performer .num_features=64"),
    "Nystromformer": System("kernel", "Nystromformer .k=64"),
    "Longformer": System("pattern", "Longformer .window=64"),
    "Sparse Transformer": System("pattern", "SparseTransformer"),
    "Reformer": System("pattern", "Reformer .rounds=2 .chunk=32"),
    "Transformer-LS": System("pattern", "TransformerLS .k=32 .window=16"),
    "LSTM": System("recurrent", "LSTM"),
    "LRU": System("recurrent", "LRU .state=64"),
    "S4D": System("recurrent", "S4D .state=64"),
    "Mamba-2": System("recurrent", "Mamba2 .state=64"),
    "long convolution": System("recurrent", "LongConv"),
}
KINDS = {
    "ours": ("Linformer and Verma", COLOURS[3]),
    "exact": ("exact attention", COLOURS[0]),
    "kernel": ("kernels and landmarks", COLOURS[2]),
    "pattern": ("sparse patterns", COLOURS[4]),
    "recurrent": ("recurrent, and long convolutions", COLOURS[5]),
    "none": ("no attention", COLOURS[1]),
}
FILLS = {"yes": "full", "no": "none"}  # of a point, with the local convolutions and without them


class Setting(NamedTuple):
    """A system on a task, with the local convolutions or without them."""

    task: str
    system: str
    is_local: bool
    data: Path
    out: Path
    runs: Path  # the folder of all trainings

    @property
    def flags(self) -> list[str]:
        name, *arguments = SYSTEMS[self.system].flags.split()
        attention = "--model.encoder.attention"
        flags = [f"{attention}={name}", *(attention + argument for argument in arguments)]
        flags += [] if self.is_local else ["--model.encoder.local=null"]
        return [*flags, f"--data.root={self.data / TASKS[self.task].root}"]

    @property
    def config(self) -> str:
        return str(SETTINGS / f"{self.task}.yaml")

    @property
    def local(self) -> str:
        return "yes" if self.is_local else "no"

    @property
    def folder(self) -> Path:
        return self.runs / self.task / self.system / ("local" if self.is_local else "plain")

    def steps_a_second(self) -> float:
        """Its speed, measured once and stored in a file; 0 if its steps are too long for a trial to show a speed."""
        record = self.out / self.task / "speeds.json"
        here = f"{machine()}; float32"
        measured = json.loads(record.read_text()) if record.exists() else {"measured on": here, "steps a second": {}}
        speeds = measured["steps a second"]
        name = f"{self.system}, {'local' if self.is_local else 'plain'}"
        if name not in speeds:
            if measured["measured on"] != here:
                where = f"{record} is of {measured['measured on']}, and this is {here}"
                others = f"rates.json and tables, and its trainings in {self.runs / self.task}"
                raise SystemExit(f"{where}; measure {name} there, or remove the file, the task's {others}")
            shutil.rmtree(self.folder / "runs/speed", ignore_errors=True)  # left by a trial that was stopped
            command = ["-m", "longseq", "fit", "--config", self.config, *self.flags, *TRIAL]
            command += ["--trainer.enable_progress_bar", "false", "--trainer.default_root_dir", str(self.folder)]
            process = run_python(*command, "--trainer.accelerator", "cpu", "--experiment", "speed")
            if process.returncode:
                raise SystemExit(process.stderr.strip().split("\n")[-1])
            try:
                speeds[name] = round(steps_within(1000, self.folder / "runs/speed/0") / 1000, 4)
            except ArgumentError:
                speeds[name] = 0.0
            record.parent.mkdir(parents=True, exist_ok=True)
            write_text(record, json.dumps(measured, indent=1))
            print(f"{self.task}, {name}: {speeds[name]:.3g} steps a second", flush=True)
        return float(speeds[name])

    def is_too_slow(self) -> bool:
        return SECONDS * self.steps_a_second() < FEWEST_STEPS

    def sweep(self, name: str, seconds: float, rates: str, seeds: int, split: str, *more: str) -> list[dict[str, str]]:
        """Train with some rates, each for as many steps as take so many seconds when nothing else runs. Return the
        sweep's table of accuracies on a split."""
        steps = round(seconds * self.steps_a_second())
        flags = [*self.flags, *more, "--trainer.max_epochs=-1", f"--trainer.max_steps={steps}"]
        flags += ["--trainer.check_val_every_n_epoch=null", f"--trainer.val_check_interval={steps}"]
        folder, grid = self.folder / name, [f"model.learning_rate={rates}"]
        sweep([self.config], grid, seeds, metric=f"{split}/accuracy", flags=flags, out=str(folder))
        return read(folder / "table.csv")

    def best_rate(self) -> str:
        """The learning rate with the best accuracy in validation; "" if the system is too slow."""
        if self.is_too_slow():
            return ""
        rows = self.sweep("rates", SECONDS_OF_RATES, RATES, 1, "val", "--trainer.limit_test_batches=0")
        figures = {row["model.learning_rate"]: accuracy(row["val accuracy, mean"]) for row in rows}
        return max(figures, key=figures.__getitem__)

    def accuracies(self, rate: str, seeds: int, split: str) -> list[float]:
        (row,) = self.sweep("main", SECONDS, rate, seeds, split)
        return [float(figure) for figure in row["each seed"].split()]


def settings_of(task: str, data: Path, out: Path, runs: Path) -> list[Setting]:
    return [Setting(task, system, is_local, data, out, runs) for system in SYSTEMS for is_local in (True, False)]


def measured_on(out: Path, task: str) -> str:
    return json.loads((out / task / "speeds.json").read_text())["measured on"]


def accuracy(figure: str) -> float:
    """A figure of a table as a number by which rows can be sorted: -1 for a training that diverged or was too slow."""
    value = float(figure) if figure and figure != "too slow" else math.nan
    return -1.0 if math.isnan(value) else value


def read(table: Path) -> list[dict[str, str]]:
    with open(table, newline="") as file:
        return list(csv.DictReader(file))


def core_hours(settings: Sequence[Setting]) -> float:
    """Estimate the hours of all trainings of a task from the measured speeds, including those that are done. A forward
    pass counts as a third of a training step. The short validation after each tried rate does not count."""
    task = TASKS[settings[0].task]
    trained = [setting for setting in settings if not setting.is_too_slow()]
    evaluations = [task.batches / 3 / setting.steps_a_second() for setting in trained]
    seconds = [SECONDS_OF_START + SECONDS + evaluation for evaluation in evaluations]
    of_leaders = LEADERS * (SEEDS - 1) * statistics.mean(seconds) if seconds else 0
    is_searched = task.rates_from == settings[0].task
    searches = len(RATES.split(",")) * sum(setting.is_local for setting in trained) if is_searched else 0
    return (sum(seconds) + of_leaders + searches * (SECONDS_OF_START + SECONDS_OF_RATES)) / 3600


def results(jobs: int, work: Callable[..., Result], *arguments: Sequence[object]) -> Iterator[Result]:
    """Like ``map``, with ``jobs`` calls at a time: each result comes when it and those before it are ready."""
    if jobs == 1:
        yield from map(work, *arguments)
    else:
        with ProcessPoolExecutor(jobs) as pool:
            yield from pool.map(work, *arguments)


def rates_of(task: str, data: Path, out: Path, runs: Path, jobs: int) -> dict[str, str]:
    """The learning rate of each system, "" if it is too slow; the task that finds the rates of its kind keeps them."""
    finder = TASKS[task].rates_from
    record = out / finder / "rates.json"
    rates = json.loads(record.read_text()) if record.exists() else {}
    missing = [Setting(task, system, True, data, out, runs) for system in SYSTEMS if system not in rates]
    if missing and task != finder:
        what = f"{record} has no rate of {missing[0].system} for {task} yet"
        raise SystemExit(f"{what}; start with --tasks {finder}")
    for setting, rate in zip(missing, results(jobs, Setting.best_rate, missing), strict=True):
        rates[setting.system] = rate
        write_text(record, json.dumps(rates, indent=1))
    return rates


def row_of(setting: Setting, rate: str, seeds: int) -> dict[str, str]:
    """Train a setting and return its row of the table. A setting that is too slow is not trained, and its row says so.
    The validation accuracy is that of the first seed, so that further seeds do not change who the leaders are."""
    speed = setting.steps_a_second()
    row = dict.fromkeys(HEADER, "") | {"system": setting.system, "local": setting.local}
    row["ms of a step"] = f"{1000 / speed:.0f}" if speed else "over 20,000"
    if not rate or setting.is_too_slow():
        return row | {"test accuracy": "too slow"}
    (validated,), figures = setting.accuracies(rate, 1, "val"), setting.accuracies(rate, seeds, "test")
    row |= {"learning rate": rate, "steps": f"{SECONDS * speed:.0f}", "validation accuracy": f"{validated:.4f}"}
    row["test accuracy"] = f"{statistics.mean(figures):.3f}"
    if seeds > 1:
        row["lowest to highest"] = f"{min(figures):.3f} to {max(figures):.3f}"
    return row


def train(task: str, data: Path, out: Path, runs: Path, jobs: int) -> None:
    """Train every setting that has no row in a task's table yet, ``jobs`` systems at a time."""
    rates = rates_of(task, data, out, runs, jobs)
    table = out / task / "table.csv"
    rows = {(row["system"], row["local"]): row for row in read(table)} if table.exists() else {}

    def keep(setting: Setting, row: dict[str, str]) -> None:
        rows[setting.system, setting.local] = row
        done = [list(rows[key].values()) for key in itertools.product(SYSTEMS, ("yes", "no")) if key in rows]
        notes = f"""The ms of a step, and so the steps: {measured_on(out, task)}. Some trainings may have run elsewhere.
The learning rates were found on {TASKS[task].rates_from}, with local convolutions.
Too slow: fewer than {FEWEST_STEPS} steps in {SECONDS} s.
Test accuracy, the highest first; in parentheses the lowest and the highest of {SEEDS} seeds."""
        report = Report(out / task, notes, ["benchmarks/verdict.py", "--data", "DIR", "--tasks", task])
        report.write(HEADER, done, markdown(PAGE_HEADER, side_by_side(rows.values())))

    def keep_all(settings: Sequence[Setting], seeds: int) -> None:
        arguments = settings, [rates[setting.system] for setting in settings], [seeds] * len(settings)
        for setting, row in zip(settings, results(jobs, row_of, *arguments), strict=True):
            keep(setting, row)

    missing = [setting for setting in settings_of(task, data, out, runs) if (setting.system, setting.local) not in rows]
    keep_all(missing, 1)
    trained = [row for row in rows.values() if row["steps"]]
    leaders = sorted(trained, key=lambda row: -accuracy(row["validation accuracy"]))[:LEADERS]  # the first of equals
    single = [(row["system"], row["local"] == "yes") for row in leaders if not row["lowest to highest"]]
    keep_all([Setting(task, *leader, data, out, runs) for leader in single], SEEDS)


def side_by_side(rows: Iterable[dict[str, str]]) -> list[list[str]]:
    """A row for each system, with the local convolutions and without them, the most accurate first."""
    forms: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        forms.setdefault(row["system"], {})[row["local"]] = row

    def best(system: str) -> float:
        return max(accuracy(row["test accuracy"]) for row in forms[system].values())

    lines = []
    for system in sorted(forms, key=best, reverse=True):
        line = [system]
        for row in (forms[system].get(local, dict.fromkeys(HEADER, "")) for local in ("yes", "no")):
            seeds = row["lowest to highest"]
            line.append(row["test accuracy"] + (f" ({seeds})" if seeds else ""))
            line.append(", ".join(filter(None, (row["ms of a step"], row["steps"]))))
        lines.append([*line, next(iter(forms[system].values()))["learning rate"]])
    return lines


@styled
def draw(out: Path) -> None:
    """Draw test error against the time of a step, in a panel for each task that has a table. A full circle is with the
    local convolutions, a hollow one without them; a line joins the two. The name stands beside the better one, and bars
    span the seeds."""
    tasks = [task for task in TASKS if (out / task / "table.csv").exists()]
    columns = min(len(tasks), 3)
    figure, all_axes = panels(columns, math.ceil(len(tasks) / columns), height=4.6)
    for axes in all_axes[len(tasks) :]:
        axes.remove()
    for task, axes in zip(tasks, all_axes, strict=False):
        trained = [row for row in read(out / task / "table.csv") if accuracy(row["test accuracy"]) >= 0]
        named = []
        for system, forms in itertools.groupby(trained, key=lambda row: row["system"]):
            _, colour = KINDS[SYSTEMS[system].kind]
            points = []
            for row in forms:
                x, y, fill = float(row["ms of a step"]), 1 - float(row["test accuracy"]), FILLS[row["local"]]
                ends = [1 - float(end) for end in row["lowest to highest"].split(" to ") if end]
                bars = [[y - ends[1]], [ends[0] - y]] if ends else None
                axes.errorbar(x, y, bars, fmt="o", color=colour, fillstyle=fill, capsize=2)
                points.append((x, y))
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=0.5)
            named.append((system, min(points, key=lambda point: point[1])))
        axes.set(
            xscale="log", yscale="log", xlabel="ms of a training step", ylabel="test error", title=TASKS[task].title
        )
        axes.invert_yaxis()
        axes.margins(0.08, 0.1)
        axes.xaxis.set(major_locator=LogLocator(10, (1, 2, 5)), major_formatter=StrMethodFormatter("{x:,g}"))
        axes.yaxis.set(major_locator=LogLocator(10, (1, 2, 3, 5)), major_formatter=PercentFormatter(1, 0))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
        name_points(axes, named)
    handles = [Line2D([], [], marker="o", linestyle="", color=colour, label=text) for text, colour in KINDS.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2 * columns, fontsize=7)
    figure.savefig(out / "verdict.png")


def name_points(axes: Any, named: Sequence[tuple[str, tuple[float, float]]]) -> None:
    """Write names beside points, each at the nearest height at which it covers no other name."""
    taken: list[tuple[float, float, float]] = []  # left and right end and height, in points of the page
    axes.figure.draw_without_rendering()
    for name, point in sorted(named, key=itemgetter(1)):
        x, y = axes.transData.transform(point) * 72 / axes.figure.dpi
        left, right = x + 4, x + 4 + 3.6 * len(name)

        def is_free(shift: float, left: float = left, right: float = right, y: float = y) -> bool:
            return all(left > end or right < begin or abs(y + shift - height) >= 8 for begin, end, height in taken)

        shift = next(filter(is_free, (sign * 4 * step for step in itertools.count() for sign in (1, -1))))
        taken.append((left, right, y + shift))
        line = {"arrowstyle": "-", "linewidth": 0.3, "shrinkA": 0} if abs(shift) > 4 else None
        axes.annotate(
            name, point, (4, shift), textcoords="offset points", fontsize=6, verticalalignment="center", arrowprops=line
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--out", type=Path, default=SETTINGS, help="the folder of speeds, tables and the picture")
    parser.add_argument("--runs", type=Path, default=Path("runs/verdict"), help="the folder of all trainings")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--until", choices=["speed", "trained"], default="trained", help="where to end")
    parser.add_argument("--jobs", type=PositiveInt, default=1, help="how many systems to train at a time")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # for the trainings
    torch.set_num_threads(1)  # machine() reports it
    folders = options.data, options.out, options.runs
    for task in options.tasks:
        for setting in settings_of(task, *folders):
            setting.steps_a_second()
    hours = {task: core_hours(settings_of(task, *folders)) for task in options.tasks}
    per_task = ", ".join(f"{task} {of_task:.1f}" for task, of_task in hours.items())
    print(f"Hours of a core, from the first training to the last: {sum(hours.values()):.1f} ({per_task})", flush=True)
    if options.until == "speed":
        return
    try:
        for task in options.tasks:
            train(task, *folders, options.jobs)
    except ArgumentError as error:
        raise SystemExit(f"error: {error}") from error
    draw(options.out)


if __name__ == "__main__":
    main()
