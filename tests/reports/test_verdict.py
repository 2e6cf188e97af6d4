"""benchmarks/verdict.py, with accuracies that are computed and not trained."""

import csv
import importlib.util
import json
import math
import re
import shutil
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.figure import Figure

SCRIPT = Path(__file__).parents[2] / "benchmarks/verdict.py"
HERE = "one machine; float32"
SYSTEMS = ["no attention", "Softmax", "Verma without E", "LSTM"]
# of each system its accuracy in validation and test; without convolutions it has 0.1 less, and a seed adds 0.01
ACCURACIES = {"no attention": (0.5, 0.9), "Verma without E": (0.8, 0.6), "LSTM": (0.7, 0.7)}


class Stopped(BaseException):
    """The script was killed."""


class Trainings:
    """Stands in for sweep: writes its table, of a setting's accuracies, which are best with a rate of 0.003."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []  # task, system, form, what for
        self.left = 1000  # until the script is killed

    def __call__(
        self, config: list[str], grid: list[str], seeds: int, *, metric: str, flags: list[str], out: str
    ) -> None:
        self.left -= 1
        if not self.left:
            raise Stopped
        *_, system, form, name = Path(out).parts
        self.asked.append((Path(config[0]).stem, system, form, name))
        record = Path(out, "flags.json")
        record.parent.mkdir(parents=True, exist_ok=True)
        assert not record.exists() or json.loads(record.read_text()) == flags, "sweep refuses the folder"
        record.write_text(json.dumps(flags))
        key, _, rates = grid[0].partition("=")
        accuracy = ACCURACIES[system][metric == "test/accuracy"] - 0.1 * (form == "plain")
        with open(Path(out, "table.csv"), "w", newline="") as file:
            table = csv.writer(file)
            table.writerow([key, metric.replace("/", " ") + ", mean", "highest less lowest", "each seed"])
            for rate in rates.split(","):
                each = [accuracy - 0.3 * (rate != "0.003") + 0.01 * seed for seed in range(seeds)]
                table.writerow([rate, sum(each) / seeds, max(each) - min(each), " ".join(map(str, each))])


@pytest.fixture
def verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with four systems, of which Softmax is too slow, and with speeds in its folder, out."""
    spec = importlib.util.spec_from_file_location("verdict", SCRIPT)
    assert spec and spec.loader
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SYSTEMS", {name: module.SYSTEMS[name] for name in SYSTEMS})
    monkeypatch.setattr(module, "sweep", Trainings())
    monkeypatch.setattr(module, "machine", lambda: "one machine")
    monkeypatch.setattr(module.torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: None)  # it takes seconds
    monkeypatch.setattr(sys, "path", [*sys.path])  # it adds the repository
    monkeypatch.chdir(tmp_path)
    for task in module.TASKS:
        speeds = {f"{name}, {form}": 2.0 for name in SYSTEMS for form in ("local", "plain")}
        speeds |= {"Softmax, local": 0.0, "Softmax, plain": 0.1, "LSTM, local": 1.0}
        folder = tmp_path / "out" / task
        folder.mkdir(parents=True)
        (folder / "speeds.json").write_text(json.dumps({"measured on": HERE, "steps a second": speeds}))
    return module


def run(verdict: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["verdict.py", "--data", "data", "--out", "out", *arguments])
    verdict.main()


def rows(task: str) -> dict[tuple[str, str], dict[str, str]]:
    with open(f"out/{task}/table.csv", newline="") as file:
        return {(row["system"], row["local"]): row for row in csv.DictReader(file)}


def test_every_system_has_a_row_and_the_leaders_of_the_validation_have_three_seeds(verdict, monkeypatch):
    run(verdict, monkeypatch, "--tasks", "mnist")
    table = rows("mnist")
    assert list(table) == [(name, local) for name in SYSTEMS for local in ("yes", "no")]
    leaders = {key for key, row in table.items() if row["lowest to highest"]}
    assert leaders == {("Verma without E", "yes"), ("Verma without E", "no")}  # by the test "no attention" would lead
    assert table["Verma without E", "yes"]["test accuracy"] == "0.610"
    assert table["Verma without E", "yes"]["lowest to highest"] == "0.600 to 0.620"
    assert table["LSTM", "yes"] == {
        "system": "LSTM", "local": "yes", "learning rate": "0.003", "ms of a step": "1000", "steps": "300",
        "validation accuracy": "0.7000", "test accuracy": "0.700", "lowest to highest": "",
    }  # fmt: skip
    assert {asked[1] for asked in verdict.sweep.asked if asked[3] == "rates"} == ACCURACIES.keys()
    page = Path("out/mnist/table.md").read_text()
    assert HERE in page
    assert re.findall(r"^\| (?!system)(\w.*) \|$", page, re.MULTILINE) == [
        "no attention | 0.900 | 500, 600 | 0.800 | 500, 600 | 0.003",
        "LSTM | 0.700 | 1000, 300 | 0.600 | 500, 600 | 0.003",
        "Verma without E | 0.610 (0.600 to 0.620) | 500, 600 | 0.510 (0.500 to 0.520) | 500, 600 | 0.003",
        "Softmax | too slow | over 20,000 | too slow | 10000 | ",
    ]


def test_a_system_that_is_too_slow_is_not_trained_and_its_row_says_so(verdict, monkeypatch):
    run(verdict, monkeypatch, "--tasks", "mnist")
    table = rows("mnist")
    assert [table["Softmax", local]["test accuracy"] for local in ("yes", "no")] == ["too slow", "too slow"]
    assert [table["Softmax", local]["ms of a step"] for local in ("yes", "no")] == ["over 20,000", "10000"]
    assert "Softmax" not in {asked[1] for asked in verdict.sweep.asked}


def test_a_training_that_has_diverged_leads_nothing(verdict, monkeypatch):
    monkeypatch.setitem(ACCURACIES, "no attention", (math.nan, math.nan))
    run(verdict, monkeypatch, "--tasks", "mnist")
    table = rows("mnist")
    assert (table["no attention", "yes"]["test accuracy"], table["no attention", "yes"]["lowest to highest"]) == (
        "nan",
        "",
    )
    assert [key for key, row in table.items() if row["lowest to highest"]] == [
        ("Verma without E", "yes"), ("Verma without E", "no"),
    ]  # fmt: skip
    assert re.findall(r"^\| (?!system)([\w ]+) \|", Path("out/mnist/table.md").read_text(), re.MULTILINE) == [
        "LSTM", "Verma without E", "no attention", "Softmax",
    ]  # fmt: skip


def test_it_goes_on_where_it_was_stopped_and_ends_in_the_same_table(verdict, monkeypatch):
    run(verdict, monkeypatch, "--tasks", "mnist")
    whole, trained = rows("mnist"), Counter(verdict.sweep.asked)
    for file in ("table.csv", "rates.json"):
        Path("out/mnist", file).unlink()
    verdict.sweep = Trainings()
    for _ in range(20):
        verdict.sweep.left = 3
        try:
            run(verdict, monkeypatch, "--tasks", "mnist")
        except Stopped:
            continue
        break
    assert rows("mnist") == whole
    again = Counter(verdict.sweep.asked) - trained
    assert all(count == 1 for count in again.values())  # asked for twice only where it was stopped at the second
    verdict.sweep = Trainings()
    run(verdict, monkeypatch, "--tasks", "mnist")
    assert (rows("mnist"), verdict.sweep.asked) == (whole, [])


def test_several_at_a_time_give_the_same_table(verdict, monkeypatch):
    run(verdict, monkeypatch, "--tasks", "mnist")
    one_by_one = rows("mnist")
    for file in ("table.csv", "rates.json"):
        Path("out/mnist", file).unlink()
    shutil.rmtree("runs")
    kept: list[bool] = []

    class Pool:
        """Threads instead of processes, which would not find a module of a test."""

        def __init__(self, jobs: int) -> None:
            self.threads = ThreadPoolExecutor(jobs)

        def __enter__(self) -> ThreadPoolExecutor:
            return self.threads.__enter__()

        def __exit__(self, *error: Any) -> None:
            self.threads.__exit__(*error)
            kept.append(Path("out/mnist/table.csv").exists())

    monkeypatch.setattr(verdict, "ProcessPoolExecutor", Pool)
    run(verdict, monkeypatch, "--tasks", "mnist", "--jobs", "3")
    assert rows("mnist") == one_by_one
    assert kept == [False, True, True]  # rates; rows, each kept as soon as it is there; the leaders


def test_the_rates_of_a_kind_come_from_its_shortest_task(verdict, monkeypatch):
    with pytest.raises(SystemExit, match=r"rates.json has no rate of no attention for samples yet; start with"):
        run(verdict, monkeypatch, "--tasks", "samples")
    run(verdict, monkeypatch, "--tasks", "frames-101", "samples")
    assert {asked[0] for asked in verdict.sweep.asked if asked[3] == "rates"} == {"frames-101"}
    assert rows("samples")["LSTM", "no"]["learning rate"] == "0.003"


def test_the_picture_joins_the_two_forms_of_a_system_and_shows_the_range_of_the_leaders(verdict, monkeypatch):
    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    run(verdict, monkeypatch, "--tasks", "mnist")
    (axes,) = figures.pop().axes
    lines = [line for line in axes.lines if len(line.get_xdata()) == 2]
    assert [list(line.get_xdata()) for line in lines] == [[500, 500], [500, 500], [1000, 500]]
    assert [text.get_text() for text in axes.texts] == ["no attention", "Verma without E", "LSTM"]
    assert sum(bool(bars.has_yerr) for bars in axes.containers) == 2


def test_the_hours_are_printed_before_a_training(verdict, monkeypatch, capsys):
    """By hand: a start, 300 s and 370 batches of a third of a step each, for three systems with and without
    convolutions and two leaders twice; 70 s for each of three rates."""
    run(verdict, monkeypatch, "--tasks", "mnist", "--until", "speed")
    (printed,) = re.findall(r"last: ([\d.]+) \(mnist", capsys.readouterr().out)
    six = 6 * 310 + 370 / 3 * (5 * 0.5 + 1.0)
    assert float(printed) == pytest.approx((six + 4 * six / 6 + 9 * 70) / 3600, abs=0.06)
    assert not verdict.sweep.asked


def test_a_speed_is_measured_after_a_trial_that_was_stopped_and_only_on_its_machine(verdict, monkeypatch, tmp_path):
    record = Path("out/mnist/speeds.json")
    kept = json.loads(record.read_text())
    del kept["steps a second"]["LSTM, local"]
    record.write_text(json.dumps(kept))
    stopped = Path("runs/verdict/mnist/LSTM/local/runs/speed/0")
    stopped.mkdir(parents=True)

    def trial(*command: str) -> SimpleNamespace:
        assert not stopped.exists()
        stopped.mkdir(parents=True)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(verdict, "run_python", trial)
    monkeypatch.setattr(verdict, "steps_within", lambda seconds, run: 1500)
    run(verdict, monkeypatch, "--until", "speed")
    assert json.loads(record.read_text())["steps a second"]["LSTM, local"] == 1.5
    record.write_text(json.dumps(kept))
    monkeypatch.setattr(verdict, "machine", lambda: "another machine")
    with pytest.raises(SystemExit, match=r"is of one machine; float32, and this is another machine; float32"):
        run(verdict, monkeypatch, "--until", "speed")
