"""Train a grid of settings with several seeds each, into one table and one figure; no finished run is repeated."""

import itertools
import json
import math
import re
import shutil
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from longseq.arguments import ArgumentError
from longseq.compat.lightning import watched_figure
from longseq.files.checkpoint import read_any
from longseq.files.description import build
from longseq.files.storage import write_text
from longseq.reports.equal_time import TRIAL, steps_within
from longseq.reports.plots import COLOURS, Report, machine, markdown, panels, styled
from longseq.reports.processes import run_python
from longseq.tasks import Task
from longseq.training.divergence import DivergenceError

Setting = tuple[tuple[str, str], ...]  # flags and their values


def sweep(
    config: list[str],
    grid: list[str],
    seeds: int = 3,
    baseline: str | None = None,
    mean_over: str | None = None,
    metric: str | None = None,
    seconds: float | None = None,
    flags: list[str] = [],  # noqa: B006  (jsonargparse shows it)
    init_from: str | None = None,
    out: str = "sweep",
) -> None:
    """Train every setting of a grid with several seeds, one after the other, and write a table, a CSV and a figure.

    Settings are compared on the validation split. Only the best setting and the baseline are tested.

    A stopped sweep continues when it is started again: finished runs are kept, and an interrupted run is resumed. To
    search many settings instead of a small grid, give Optuna the same command lines.

    Args:
        config: Configuration files of the experiment.
        grid: Flags and their values, such as model.encoder.attention.k=8,16,32; every combination is trained.
        seeds: Trainings of each setting; their seeds 0, 1, ... decide weights, order and validation split.
        baseline: One more setting, key=value, to compare the others with, such as model.encoder.attention=Softmax.
        mean_over: A key of the grid whose values are repetitions, like seeds, for example the folds of a data set. Mean
            and range are then over these values too.
        metric: The metric, from each run's metrics.json, that the table and the figure show, such as val/f1; by default
            the one that chooses the best checkpoint of a training. With test/accuracy every run is tested, and no
            setting is chosen, because the best of many test results overestimates its setting.
        seconds: Time for the training steps of each run, so that a faster setting takes more steps. The speed of every
            setting is measured before the first run; its number of steps is stored in steps.json. None leaves the
            length to the configuration.
        flags: Further arguments of every training, passed on as they are. Those of data, model and trainer may also
            be given directly: --data.root DIR.
        init_from: Folder of another sweep, for example of pretraining. Each run starts from the final weights of that
            sweep's run with the same setting and seed.
        out: Folder for the runs, table.md, table.csv and sweep.png.

    Raises:
        ValueError: If a file is missing, grid is not of the form key=value,value, mean_over is not one of its keys, or
            seeds or seconds are not positive. If the folder holds runs of another configuration, other flags or other
            keys, or step times of another machine. If the other sweep lacks a run, a training fails, or its
            metrics.json does not have the metric. A training that diverges does not fail: its result is nan.
    """
    if seeds < 1:
        raise ArgumentError("seeds", f"must be positive, got {seeds}; 3 show the spread")
    for path in config:
        if not Path(path).is_file():
            raise ArgumentError("config", f"must be files, got {path!r}, which is none; try configs/image/digits.yaml")
    if seconds is not None and seconds <= 0:
        raise ArgumentError("seconds", f"must be positive, got {seconds}; 300 compare settings roughly")
    if several := {"--folds", "--grow"} & {flag.partition("=")[0] for flag in flags}:
        what = f"must leave out {several.pop()}, which makes several runs of one, got {flags}"
        raise ArgumentError("flags", f"{what}; sweep data.fold with --mean_over data.fold")
    settings = combinations(grid)
    repeated = [entry for entry in grid if entry.partition("=")[0] == mean_over]
    if mean_over is not None and not repeated:
        raise ArgumentError("mean_over", f"must be a key of the grid, got {mean_over!r}; data.test_fold may be one")
    reference = combinations([baseline])[0] if baseline else None
    all_settings = [*(combinations([baseline, *repeated]) if baseline else []), *settings]
    _refuse_settings_alike(all_settings)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    trained: dict[str, Any] = {"config": _texts([*config, *_configs_in(flags)]), "flags": list(flags)}
    trained |= {key: value for key, value in (("seconds", seconds), ("init_from", init_from)) if value is not None}
    _refuse_other_runs(folder, trained, all_settings)
    here = machine("cpu" if re.search(r"accelerator\W+cpu\b", json.dumps(trained)) else "auto")
    runs = _Runs(folder, config, flags, None if init_from is None else Path(init_from), here, metric)
    runs.require_weights(all_settings, seeds)
    steps = None if seconds is None else runs.steps(all_settings, seconds)
    lengths = {} if steps is None else {setting: _length(steps[_experiment(setting)]) for setting in all_settings}
    figures: dict[Setting, list[float]] = {}
    for setting in all_settings:
        figures[setting] = [runs.result(setting, seed, lengths.get(setting, [])) for seed in range(seeds)]
        print(f"{_title(setting)}: " + ", ".join(f"{result:.4f}" for result in figures[setting]), flush=True)
    shown = runs.metric or "val/accuracy"  # if all have diverged
    means = averaged(figures, mean_over)
    header, rows = _table(means, shown, None if mean_over else steps, "each seed" if mean_over is None else "each")
    options = {"baseline": baseline, "mean_over": mean_over, "metric": metric}
    options |= {"seconds": seconds and f"{seconds:g}", "init_from": init_from, "flags": flags and json.dumps(flags)}
    options |= {"out": None if out == "sweep" else out}
    command = ["train.py", "sweep", "--config", *config, "--grid", *grid, "--seeds", str(seeds)]
    command += [word for name, value in options.items() if value for word in (f"--{name}", str(value))]
    report, text = Report(folder, here, command), markdown(header, rows) + "\n"
    report.write(header, rows, text)  # the tests of the best setting, which follow, may fail
    if shown.startswith("test/"):
        text += "These are figures of the test split: they choose no setting.\n"
    elif runs.metric is not None and (best := _best(means, runs.is_lowest_best(), reference)) is not None:
        for title, chosen in (("baseline", reference), (f"best by {_words(shown)}", best)):
            if chosen is not None:
                results = [
                    runs.tested(setting, seed, lengths.get(setting, []))
                    for setting in figures
                    if averaged({setting: []}, mean_over).keys() == {chosen}
                    for seed, figure in enumerate(figures[setting])
                    if not math.isnan(figure)
                ]
                text += f"{title}: {_title(chosen) or 'the only setting'}; {_test_figures(results, shown)}\n"
    alone = means.pop((), None)
    if alone is not None:  # the grid has repetitions only, so the figure shows each of them
        means |= {setting: figures[setting] for setting in settings}
    report.end(report.write(header, rows, text), draw(means, reference, _words(shown)), "sweep.png")


def combinations(grid: Sequence[str]) -> list[Setting]:
    """Every combination of the values of key=value,value; commas within brackets or braces do not separate values.

    Raises:
        ValueError: If an entry has another form.
    """
    axes = []
    for entry in grid:
        key, _, values = entry.partition("=")
        if not key or not values:
            raise ArgumentError(
                "grid",
                f"must be of the form key=value,value, got {entry!r}; for example model.encoder.attention.k=8,16",
            )
        axes.append([(key, value) for value in _split(values)])
    return [tuple(setting) for setting in itertools.product(*axes)]


def _split(values: str) -> list[str]:
    """Split at the commas that are outside brackets and braces."""
    parts, depth = [""], 0
    for letter in values:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def averaged(figures: dict[Setting, list[float]], mean_over: str | None) -> dict[Setting, list[float]]:
    """The results of each setting without the key ``mean_over``, with the results of all its values in one list."""
    together: dict[Setting, list[float]] = {}
    for setting, results in figures.items():
        others = tuple((key, value) for key, value in setting if key != mean_over)
        together.setdefault(others, []).extend(results)
    return together


def _best(means: dict[Setting, list[float]], is_lowest_best: bool, baseline: Setting | None) -> Setting | None:
    """The setting with the best mean; None if every setting has diverged."""
    mean_of = {setting: statistics.mean(results) for setting, results in means.items() if setting != baseline}
    trained = [setting for setting, mean in mean_of.items() if not math.isnan(mean)]
    return (min if is_lowest_best else max)(trained, key=mean_of.__getitem__, default=None)


def _test_figures(results: Sequence[float | None], metric: str) -> str:
    """The test figures of a setting's runs."""
    tested = [result for result in results if result is not None]
    if not tested:
        return "not tested, because trainer.limit_test_batches is 0" if results else "not tested, because it diverged"
    per_run = " ".join(f"{result:.4f}" for result in tested)
    return f"{_words(_of_test(metric))}, mean: {statistics.mean(tested):.4f} ({per_run})"


def _of_test(metric: str) -> str:
    return metric.replace("val/", "test/", 1)


def _words(metric: str) -> str:
    return metric.replace("/", " ")


def _table(
    means: dict[Setting, list[float]], metric: str, steps: dict[str, int] | None, per_run: str
) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a column for each key, one for the steps of settings with equal time, and the results."""
    keys = list(dict.fromkeys(key for setting in reversed(means) for key, _ in setting))
    header = [*keys, *([] if steps is None else ["steps"]), f"{_words(metric)}, mean", "highest less lowest"]
    rows = []
    for setting, results in means.items():
        row = [dict(setting).get(key, "") for key in keys]
        row += [] if steps is None else [str(steps[_experiment(setting)])]
        spread = math.nan if any(map(math.isnan, results)) else max(results) - min(results)
        row += [f"{statistics.mean(results):.4f}", f"{spread:.4f}"]
        rows.append([*row, " ".join(f"{result:.4f}" for result in results)])
    return [*header, per_run], rows


def _texts(paths: Iterable[str]) -> dict[str, str]:
    """The text of each path that is a file. Other paths are names of configurations that come with longseq."""
    return {path: Path(path).read_text() for path in paths if Path(path).is_file()}


def _configs_in(flags: Sequence[str]) -> list[str]:
    words = list(itertools.chain.from_iterable(flag.split("=", 1) for flag in flags))
    return [value for flag, value in itertools.pairwise(words) if flag == "--config"]


def _refuse_other_runs(folder: Path, trained: dict[str, Any], settings: Sequence[Setting]) -> None:
    """Refuse a folder whose runs had another config, other flags, or other keys. A run's name has only the last word of
    each key, its value, and the seed; trained.json records the rest."""
    record = folder / "trained.json"
    is_begun = any((folder / "runs").glob("*/*")) or (folder / "steps.json").exists()
    earlier = json.loads(record.read_text()) if is_begun and record.exists() else trained
    keys, texts = earlier.pop("keys", {}), earlier.pop("texts", {})
    if earlier != trained:
        raise ArgumentError(
            "out", f"must be a folder of runs with this config and these flags, got {folder}; give another"
        )
    for setting in settings:
        name, own = _experiment(setting), [key for key, _ in setting]
        if keys.setdefault(name, own) != own:
            what = f"must be a folder whose runs {name} are of {', '.join(own)}, got {folder}"
            raise ArgumentError("out", f"{what}, where they are of {', '.join(keys[name])}; give another")
        for path, text in _texts(value for key, value in setting if key == "config").items():
            if texts.setdefault(path, text) != text:
                raise ArgumentError("out", f"must be a folder of runs with this {path}, got {folder}; give another")
    write_text(record, json.dumps({**trained, "keys": keys, "texts": texts}, indent=1))


@dataclass
class _Runs:
    """The trainings of a sweep, in their folder.

    Attributes:
        metric: If it is None at first, it becomes the one that chose the best checkpoint of the first run.
    """

    folder: Path
    config: Sequence[str]
    flags: Sequence[str]
    others: Path | None  # the folder of the sweep that gives the initial weights
    machine: str
    metric: str | None

    def result(self, setting: Setting, seed: int, length: Sequence[str]) -> float:
        """The metric of a run, which is trained first if it has no result yet. A run that diverged keeps its error."""
        is_of_test = (self.metric or "").startswith("test/")
        name = _name(setting, seed)
        results, diverged = self._results(name), self.folder / "runs" / name / "diverged.txt"
        if not results and not diverged.exists():
            untested = [] if is_of_test else ["--trainer.limit_test_batches", "0"]
            try:
                self._train_here(setting, seed, "--resume", *length, *untested)
            except _DivergedError as error:
                write_text(diverged, f"{error} (to train it again, remove {diverged})\n")
            results = self._results(name)
        if not results:
            print(diverged.read_text().rstrip(), flush=True)
            return math.nan
        if self.metric is None:
            self.metric = _watched(results[-1])[0]
        figures = self._tested_figures(setting, seed, length) if is_of_test else _read(results[-1])
        if self.metric not in figures:
            known = ", ".join(figures) or "none, because nothing is validated or tested"
            raise ArgumentError("metric", f"must be one of {known}, got {self.metric!r}; choose one")
        return float(figures[self.metric])

    def tested(self, setting: Setting, seed: int, length: Sequence[str]) -> float | None:
        """The same metric on the test split; None if the flags turn the test off."""
        assert self.metric is not None
        return self._tested_figures(setting, seed, length).get(_of_test(self.metric))

    def _tested_figures(self, setting: Setting, seed: int, length: Sequence[str]) -> dict[str, float]:
        """The figures of a run that has ended, which is tested first if it is not tested yet."""
        (*_, result) = self._results(_name(setting, seed))
        is_tested = any(name.startswith("test/") for name in _read(result))
        if not is_tested and (limit := self._limit_of_tests(setting)) != "0":
            flags = ["--resume", str(result.parent), *length, "--trainer.limit_test_batches", limit]
            self._train_here(setting, seed, *flags)  # the training has ended, so this only tests
        return _read(result)

    def is_lowest_best(self) -> bool:
        """Whether the lowest value of the metric is the best. The runs say so for the metric that chooses their best
        checkpoints, and torchmetrics for the others."""
        assert self.metric is not None
        (result, *_) = (self.folder / "runs").glob("*/*/metrics.json")
        watched, is_lowest = _watched(result)
        if watched == self.metric:
            return is_lowest
        settings = read_any(result.with_name("last.ckpt"))["hyper_parameters"]
        task, num_classes = build(settings["task"], Task), settings["num_classes"]
        metrics = {**task.own_metrics(num_classes), **task.user_metrics(num_classes)}
        name = self.metric.partition("/")[2]
        return name == "loss" or (name in metrics and metrics[name].higher_is_better is False)

    def _limit_of_tests(self, setting: Setting) -> str:
        """trainer.limit_test_batches of a training, from the configurations, the grid and the flags."""
        limits = []
        for text in _texts([*self.config, *_configs_in(self.flags)]).values():
            trainer = (yaml.safe_load(text) or {}).get("trainer") or {}
            limits += [str(limit) for name, limit in trainer.items() if name == "limit_test_batches"]
        words = itertools.chain.from_iterable(flag.split("=", 1) for flag in self.flags)
        pairs = [*((f"--{key}", value) for key, value in setting), *itertools.pairwise(words)]
        limits += [value for flag, value in pairs if flag == "--trainer.limit_test_batches"]
        return limits[-1] if limits else "1.0"

    def require_weights(self, settings: Sequence[Setting], seeds: int) -> None:
        """Refuse another sweep if it lacks a run from which a run of this sweep must still start."""
        if self.others is not None:
            for setting, seed in itertools.product(settings, range(seeds)):
                if not self._results(_name(setting, seed)):
                    self._weights(self.others, _name(setting, seed))

    def _results(self, name: str) -> list[Path]:
        return sorted((self.folder / "runs" / name).glob("*/metrics.json"))

    @staticmethod
    def _weights(others: Path, name: str) -> str:
        checkpoints = sorted((others / "runs" / name).glob("*/last.ckpt"))
        if not checkpoints:
            what = f"must be the folder of a sweep with the same grid and seeds, got {others}"
            raise ArgumentError("init_from", f"{what}, which has no runs/{name}/0/last.ckpt; sweep there first")
        return str(checkpoints[-1])

    def steps(self, settings: Sequence[Setting], seconds: float) -> dict[str, int]:
        """How many optimizer steps each setting takes in so many seconds, measured once on one machine and stored."""
        record = self.folder / "steps.json"
        measured = json.loads(record.read_text()) if record.exists() else {"measured on": self.machine, "steps": {}}
        steps: dict[str, int] = measured["steps"]
        for setting in settings:
            name = _experiment(setting)
            if name not in steps:
                if measured["measured on"] != self.machine:
                    what = f"must be a folder whose steps were measured on {self.machine}, got {self.folder}"
                    raise ArgumentError("out", f"{what}, of {measured['measured on']}; go on there, or give another")
                trials = self.folder / "speed"
                shutil.rmtree(trials / "runs" / name, ignore_errors=True)  # left by a sweep that was stopped here
                self._train(setting, 0, trials, "--experiment", name, *TRIAL)
                steps[name] = steps_within(seconds, trials / "runs" / name / "0")
                write_text(record, json.dumps(measured, indent=1))
                print(f"{_title(setting)}: {steps[name]} steps in {seconds:g} s", flush=True)
        return steps

    def _train_here(self, setting: Setting, seed: int, *more: str) -> None:
        name = _name(setting, seed)
        start = [] if self.others is None else ["--model.init_from", self._weights(self.others, name)]
        self._train(setting, seed, self.folder, "--experiment", name, *start, *more)

    def _train(self, setting: Setting, seed: int, root: Path, *more: str) -> None:
        command = ["-m", "longseq", "fit", *itertools.chain.from_iterable(("--config", path) for path in self.config)]
        # a class must come before its arguments, because it removes the arguments given before it
        command += [f"--{key}={value}" for key, value in sorted(setting, key=lambda flag: flag[0].count("."))]
        command += ["--seed_everything", str(seed), "--data.seed", str(seed), *self.flags]
        command += ["--trainer.default_root_dir", str(root), "--trainer.enable_progress_bar", "false", *more]
        command += ["--baseline", "false"]  # all runs have the same one, and their output is not seen
        process = run_python(*command)
        if process.returncode:
            message = process.stderr.strip().split("\n")[-1].removeprefix("error: ")
            message = message or f"the process ended with {process.returncode}"
            kind = _DivergedError if process.returncode == DivergenceError.exit_code else ArgumentError
            raise kind(
                "grid", f"must hold settings that can be trained with these flags, got {_title(setting)}: {message}"
            )


def _read(result: Path) -> dict[str, float]:
    return json.loads(result.read_text())


def _watched(result: Path) -> tuple[str, bool]:
    return watched_figure(read_any(result.with_name("last.ckpt"))["callbacks"], "BestCheckpoint")


class _DivergedError(ArgumentError):
    """A training of a sweep has diverged; the sweep continues with the others."""


def _length(steps: int) -> list[str]:
    return ["--trainer.max_epochs", "-1", "--trainer.max_steps", str(steps)]


def _name(setting: Setting, seed: int) -> str:
    return f"{_experiment(setting)},seed={seed}"


def _experiment(setting: Setting) -> str:
    """The name of a setting's runs, without the seed."""
    return re.sub(r"[^\w.=+-]+", "_", _title(setting))


def _refuse_settings_alike(settings: Sequence[Setting]) -> None:
    """Refuse seeds in the grid, and two settings whose runs would have the same name."""
    by_name: dict[str, Setting] = {}
    for setting in settings:
        for key, _ in setting:
            if key in ("seed_everything", "data.seed"):
                raise ArgumentError("grid", f"must leave out {key}, which the seeds set, got {setting}; give --seeds")
        other = by_name.setdefault(_experiment(setting), setting)
        if other is not setting:
            raise ArgumentError(
                "grid", f"must have no two settings of one name, got {other} and {setting}; sweep them separately"
            )


def _title(setting: Setting) -> str:
    return ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in setting)


@styled
def draw(figures: dict[Setting, list[float]], baseline: Setting | None = None, metric: str = "val accuracy") -> Any:
    """Draw a metric against the grid's first key, a line for each combination of the others; bars span the seeds."""
    figure, (axes,) = panels(1, width=5.0)
    if baseline is not None:
        figures = dict(figures)
        results = figures.pop(baseline)
        axes.axhspan(min(results), max(results), color=COLOURS[0], alpha=0.15, linewidth=0)
        axes.axhline(statistics.mean(results), color=COLOURS[0], label=_title(baseline))
    lines: dict[Setting, dict[str, list[float]]] = {}
    for setting, results in figures.items():
        lines.setdefault(setting[1:], {})[setting[0][1]] = results
    values = list(dict.fromkeys(setting[0][1] for setting in figures))
    are_numbers = all(re.fullmatch(r"[+-]?\d*\.?\d+(e[+-]?\d+)?", value) for value in values)
    for number, ((others, points), colour) in enumerate(zip(lines.items(), itertools.cycle(COLOURS[2:]))):
        shift = 0.12 * (number - (len(lines) - 1) / 2)  # for values that are words, so that bars do not overlap
        x = [float(value) if are_numbers else values.index(value) + shift for value in points]
        means = [statistics.mean(results) for results in points.values()]
        below = [mean - min(results) for mean, results in zip(means, points.values(), strict=True)]
        above = [max(results) - mean for mean, results in zip(means, points.values(), strict=True)]
        form = "o-" if are_numbers else "o"
        axes.errorbar(x, means, [below, above], fmt=form, capsize=3, color=colour, label=_title(others) or None)
    key = next(iter(figures))[0][0]
    if are_numbers and min(map(float, values)) > 0:
        axes.set_xscale("log", base=2)
    ticks = [float(value) for value in values] if are_numbers else range(len(values))
    axes.set_xticks(list(ticks), [value.rpartition(".")[2] if not are_numbers else value for value in values])
    axes.minorticks_off()
    axes.set(xlabel=key.rpartition(".")[2], ylabel=metric, title=f"{metric.capitalize()} by {key.rpartition('.')[2]}")
    if baseline is not None or any(lines):
        axes.legend(fontsize=7)
    return figure
