"""A grid of trainings, with several seeds each: one table, one figure, and no run that is done is done again."""

import itertools
import json
import re
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longseq.arguments import ArgumentError
from longseq.reports.apart import run_python
from longseq.reports.plots import COLOURS, machine, markdown, panels, styled, write_csv

Setting = tuple[tuple[str, str], ...]  # flags and their values


def sweep(
    config: list[str],
    grid: list[str],
    seeds: int = 3,
    baseline: str | None = None,
    mean_over: str | None = None,
    metric: str = "test/accuracy",
    flags: list[str] = [],  # noqa: B006  (jsonargparse shows it)
    out: str = "sweep",
) -> None:
    """Train every setting of a grid with several seeds, one after the other, and write a table, a CSV and a figure.

    A sweep that was stopped goes on where it was when it is started again: runs that have come to their end are taken
    as they are, and one that was interrupted is resumed. For a search over many settings rather than a grid of few,
    give Optuna the same command lines.

    Args:
        config: Configuration files of the experiment.
        grid: Flags and their values, as model.encoder.attention.k=8,16,32; every combination is trained.
        seeds: How many trainings of each setting, with the seeds 0, 1, ... of weights, order and validation split.
        baseline: One more setting, key=value, that the others are held against, as model.encoder.attention=Softmax.
        mean_over: A key of the grid whose values are repetitions, as seeds are, and no settings: the folds of a data
            set, for example. Mean and range are then over them too.
        metric: The figure of each run's metrics.json that is tabulated and drawn.
        flags: Further arguments of every training, as they are.
        out: Folder for the runs, table.md, table.csv and sweep.png.

    Raises:
        ValueError: If a file is not there, a grid is not of the form key=value,value, mean_over is no key of it, there
            are no seeds, the folder holds runs of another configuration or other flags, a training fails, or has no
            such figure.
    """
    if seeds < 1:
        raise ArgumentError("seeds", f"must be positive, got {seeds}; 3 show the spread")
    for path in config:
        if not Path(path).is_file():
            raise ArgumentError("config", f"must be files, got {path!r}, which is none; configs/image/digits.yaml is")
    settings = combinations(grid)
    repeated = [entry for entry in grid if entry.partition("=")[0] == mean_over]
    if mean_over is not None and not repeated:
        raise ArgumentError("mean_over", f"must be a key of the grid, got {mean_over!r}; data.test_fold may be one")
    beside = combinations([baseline])[0] if baseline else None
    besides = combinations([baseline, *repeated]) if baseline else []
    _refuse_settings_alike([*besides, *settings])
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_other_runs(folder, {"config": {path: Path(path).read_text() for path in config}, "flags": list(flags)})
    found: dict[Setting, list[float]] = {}
    for setting in [*besides, *settings]:
        found[setting] = [_result(folder, config, setting, seed, flags, metric) for seed in range(seeds)]
        print(f"{_said(setting)}: " + ", ".join(f"{result:.4f}" for result in found[setting]), flush=True)
    means = averaged(found, mean_over)
    keys = list(dict.fromkeys(key for setting in reversed(means) for key, _ in setting))
    rows = [
        [*(dict(setting).get(key, "") for key in keys), f"{statistics.mean(results):.4f}",
         f"{max(results) - min(results):.4f}", " ".join(f"{result:.4f}" for result in results)]
        for setting, results in means.items()
    ]  # fmt: skip
    header = [
        *keys,
        f"{metric.replace('/', ' ')}, mean",
        "highest less lowest",
        "each seed" if mean_over is None else "each",
    ]
    write_csv(folder / "table.csv", header, rows)
    command = f"python train.py sweep --config {' '.join(config)} --grid {' '.join(grid)} --seeds {seeds}"
    if baseline:
        command += f" --baseline {baseline}"
    if mean_over:
        command += f" --mean_over {mean_over}"
    if metric != "test/accuracy":
        command += f" --metric {metric}"
    if flags:
        command += f" --flags {shlex.quote(json.dumps(flags))}"
    text = f"    {command}\n\n{machine()}\n\n{markdown(header, rows)}"
    (folder / "table.md").write_text(text)
    alone = means.pop((), None)
    if alone is not None:  # there is nothing but repetitions: the figure shows each
        means |= {setting: found[setting] for setting in settings}
    draw(means, beside, metric.replace("/", " ")).savefig(folder / "sweep.png")
    print(f"\n{text}\n{folder}/table.md, table.csv, sweep.png")


def combinations(grid: Sequence[str]) -> list[Setting]:
    """Every combination of the values of key=value,value; commas within brackets part no values.

    Raises:
        ValueError: If an entry has another form.
    """
    axes = []
    for entry in grid:
        key, _, values = entry.partition("=")
        if not key or not values:
            raise ArgumentError(
                "grid", f"must be of the form key=value,value, got {entry!r}; model.encoder.attention.k=8,16 is"
            )
        axes.append([(key, value) for value in re.split(r",(?![^\[]*\])", values)])
    return [tuple(setting) for setting in itertools.product(*axes)]


def averaged(found: dict[Setting, list[float]], mean_over: str | None) -> dict[Setting, list[float]]:
    """The results of each setting without one of its keys: those of all values of that key together."""
    together: dict[Setting, list[float]] = {}
    for setting, results in found.items():
        others = tuple((key, value) for key, value in setting if key != mean_over)
        together.setdefault(others, []).extend(results)
    return together


def _refuse_other_runs(folder: Path, trained: dict[str, Any]) -> None:
    """A run is known by its setting and seed; what else decides it is written down, and must be the same."""
    record = folder / "trained.json"
    if record.exists() and json.loads(record.read_text()) != trained:
        raise ArgumentError(
            "out", f"must be a folder of runs with this config and these flags, got {folder}; give another"
        )
    record.write_text(json.dumps(trained, indent=1))


def _result(
    folder: Path, config: Sequence[str], setting: Setting, seed: int, flags: Sequence[str], metric: str
) -> float:
    """A figure of a run, which is made if it is not there."""
    name = f"{_experiment(setting)},seed={seed}"
    done = sorted((folder / "runs" / name).glob("*/metrics.json"))
    if not done:
        command = ["-m", "longseq", "fit", *itertools.chain.from_iterable(("--config", path) for path in config)]
        # a class before its arguments, which it would take away again
        command += [f"--{key}={value}" for key, value in sorted(setting, key=lambda each: each[0].count("."))]
        command += ["--seed_everything", str(seed), "--data.seed", str(seed), *flags]
        command += ["--trainer.default_root_dir", str(folder), "--experiment", name, "--resume"]
        command += ["--trainer.enable_progress_bar", "false"]
        ended = run_python(*command)
        if ended.returncode:
            said = ended.stderr.strip().split("\n")[-1].removeprefix("error: ")
            raise ArgumentError("grid", f"must be of settings that train, got {_said(setting)}: {said}")
        done = sorted((folder / "runs" / name).glob("*/metrics.json"))
    figures = json.loads(done[-1].read_text())
    if metric not in figures:
        raise ArgumentError("metric", f"must be one of {', '.join(figures)}, got {metric!r}")
    return float(figures[metric])


def _experiment(setting: Setting) -> str:
    """The name of a setting's runs, but for the seed."""
    return re.sub(r"[^\w.=+-]+", "_", _said(setting))


def _refuse_settings_alike(settings: Sequence[Setting]) -> None:
    """Two settings whose runs had one name would be taken for one."""
    by_name: dict[str, Setting] = {}
    for setting in settings:
        for key, _ in setting:
            if key in ("seed_everything", "data.seed"):
                raise ArgumentError("grid", f"must leave out {key}, which the seeds set, got {setting}; give --seeds")
        other = by_name.setdefault(_experiment(setting), setting)
        if other is not setting:
            raise ArgumentError(
                "grid", f"must have no two settings of one name, got {other} and {setting}; sweep them apart"
            )


def _said(setting: Setting) -> str:
    return ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in setting)


@styled
def draw(found: dict[Setting, list[float]], baseline: Setting | None = None, metric: str = "test accuracy") -> Any:
    """A metric against the first key of the grid, one line for each combination of the others; bars span the seeds."""
    figure, (axes,) = panels(1, width=5.0)
    if baseline is not None:
        found = dict(found)
        results = found.pop(baseline)
        axes.axhspan(min(results), max(results), color=COLOURS[0], alpha=0.15, linewidth=0)
        axes.axhline(statistics.mean(results), color=COLOURS[0], label=_said(baseline))
    lines: dict[Setting, dict[str, list[float]]] = {}
    for setting, results in found.items():
        lines.setdefault(setting[1:], {})[setting[0][1]] = results
    values = list(dict.fromkeys(setting[0][1] for setting in found))
    are_numbers = all(re.fullmatch(r"[\d.e+-]+", value) for value in values)
    for number, ((others, points), colour) in enumerate(zip(lines.items(), itertools.cycle(COLOURS[2:]))):
        beside = 0.12 * (number - (len(lines) - 1) / 2)  # of words, so that bars do not cover each other
        x = [float(value) if are_numbers else values.index(value) + beside for value in points]
        means = [statistics.mean(results) for results in points.values()]
        below = [mean - min(results) for mean, results in zip(means, points.values(), strict=True)]
        above = [max(results) - mean for mean, results in zip(means, points.values(), strict=True)]
        form = "o-" if are_numbers else "o"
        axes.errorbar(x, means, [below, above], fmt=form, capsize=3, color=colour, label=_said(others) or None)
    key = next(iter(found))[0][0]
    if are_numbers and min(map(float, values)) > 0:
        axes.set_xscale("log", base=2)
    ticks = [float(value) for value in values] if are_numbers else range(len(values))
    axes.set_xticks(list(ticks), [value.rpartition(".")[2] if not are_numbers else value for value in values])
    axes.minorticks_off()
    axes.set(xlabel=key.rpartition(".")[2], ylabel=metric, title=f"{metric.capitalize()} by {key.rpartition('.')[2]}")
    if baseline is not None or any(lines):
        axes.legend(fontsize=7)
    return figure
