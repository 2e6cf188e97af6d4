"""benchmarks/controlled.py and run_table.py: the trainings of an experiment, its figures, and the tables of pages."""

import csv
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
# The validation accuracy of each system at a rate.
VALIDATED = {
    "ours": {0.001: 0.5, 0.002: 0.7, 0.004: 0.6},
    "low": {0.00025: 0.1, 0.0005: 0.3, 0.001: 0.2, 0.002: 0.1, 0.004: 0.1},
    "high": {0.001: 0.1, 0.002: 0.2, 0.004: 0.3, 0.008: 0.6, 0.016: 0.4},
}


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for name in ("controlled", "run_table", "paired"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("controlled"), importlib.import_module("run_table")


@pytest.fixture
def trainer(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An experiment whose trainings leave the figures of VALIDATED, and whose steps take 20 ms more each."""
    controlled, _ = scripts
    systems = dict.fromkeys(VALIDATED, "--config DATA/x.yaml")
    experiment = controlled.Experiment(1.5, "--data.root RUNS/set", systems, (["ours", "low"], ["high"]), r"(s\d)_")
    clock = [0.0]

    def fit_system(trainer: Any, system: str, folder: Path, steps: int, *more: str) -> None:
        clock[0] += 7 + 0.02 * (1 + list(VALIDATED).index(system)) * steps
        asked = dict(zip(more[::2], more[1::2], strict=True))
        if rate := asked.get("--model.learning_rate"):
            fitted.append((system, float(rate), int(asked["--seed_everything"]), steps))
            (run := folder / "runs/run/0").mkdir(parents=True)
            (run / "best.ckpt").touch()
            (run / "metrics.json").write_text(
                json.dumps({"val/accuracy": VALIDATED[system][float(rate)], "val/loss": 1.0})
            )

    fitted: list[tuple[str, float, int, int]] = []
    monkeypatch.setattr(controlled.Trainer, "fit_system", fit_system)
    monkeypatch.setattr(controlled.time, "process_time", lambda: clock[0])
    trainer = controlled.Trainer("mine", experiment, tmp_path / "data", tmp_path / "runs", tmp_path / "runs.csv")
    return trainer, fitted


def test_the_steps_of_a_system_are_those_of_its_minutes_by_the_processors_time(trainer: Any) -> None:
    controlled, _ = trainer
    expected = {"ours": 0.02, "low": 0.04, "high": 0.06}
    assert controlled.speeds() == pytest.approx(expected, rel=1e-3)
    assert controlled.speeds() == pytest.approx(expected, rel=1e-3)  # the second time from the table
    words = controlled.words(f"{controlled.experiment.flags} {controlled.experiment.systems['ours']}")
    assert words == ["--data.root", f"{controlled.folder}/set", "--config", f"{controlled.data}/x.yaml"]


def test_rates_are_added_until_the_best_has_a_worse_one_on_both_sides_and_then_the_other_seeds_train(
    trainer: Any,
) -> None:
    controlled, fitted = trainer
    for system, seconds in controlled.speeds().items():
        controlled.train(system, seconds)
        controlled.train(system, seconds)  # what has a row is not trained again
    expected = []
    for system, rates, best in (
        ("ours", [0.001, 0.002, 0.004], 0.002),
        ("low", [0.001, 0.002, 0.004, 0.0005, 0.00025], 0.0005),
        ("high", [0.001, 0.002, 0.004, 0.008, 0.016], 0.008),
    ):
        steps = {"ours": 4500, "low": 2250, "high": 1500}[system]
        expected += [(system, rate, 0, steps) for rate in rates] + [(system, best, seed, steps) for seed in (1, 2)]
    assert fitted == expected


def test_the_test_is_read_once_at_the_chosen_rate_and_the_better_systems_of_both_groups_are_compared(
    trainer: Any, scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controlled, _ = trainer
    with pytest.raises(SystemExit, match="has no runs of ours, low, high; train them first"):
        controlled.judge()
    for system, seconds in controlled.speeds().items():
        controlled.train(system, seconds)
    script, table = scripts
    paired = importlib.import_module("paired")
    right = {"ours": [1, 1, 1, 0], "low": [1, 1, 0, 0], "high": [1, 0, 0, 0]}
    tested = []

    def answers_of(checkpoint: Path) -> Any:
        name, rate, seed = checkpoint.relative_to(tmp_path / "runs/mine").parts[0].split("-")
        tested.append((name, float(rate), seed))
        names = ["s1_a", "s1_b", "s2_a", "s2_b"]
        return paired.Tested(names, [0] * 4, np.array(right[name], bool))

    monkeypatch.setattr(script, "answers_of", answers_of)
    controlled.judge()
    best = {"ours": 0.002, "low": 0.0005, "high": 0.008}
    assert tested == [(name, rate, seed) for name, rate in best.items() for seed in "012"]
    rows = table.read(tmp_path / "runs.csv", "mine")
    assert {row["system"]: row["test"] for row in rows if row["test"]} == {
        "ours": "0.75", "low": "0.5", "high": "0.25"
    }  # fmt: skip
    assert sum(1 for row in rows if row["test"]) == 9
    with open(tmp_path / "comparisons.csv", newline="") as file:
        compared = list(csv.DictReader(file))
    # of s1 both seeds differ by 1/2, of s2 too; "low" is no better than "ours" on the validation
    assert [(row["first"], row["second"], row["difference"]) for row in compared] == [
        ("high", "ours", "+0.500"), ("low", "ours", "+0.250")
    ]  # fmt: skip
    assert (compared[0]["low"], compared[0]["high"], compared[0]["groups"]) == ("+0.500", "+0.500", "2")


def test_a_table_has_the_mean_and_the_range_at_the_rate_that_seed_0_chose(scripts: Any, tmp_path: Path) -> None:
    _, table = scripts
    for rate, seed, val, test in (("0.1", 0, 0.5, 0.9), ("0.2", 0, 0.6, 0.4), ("0.2", 1, 0.4, 0.6)):
        row = {"experiment": "e", "system": "a", "setting": rate, "seed": str(seed), "steps": "7"}
        row |= {"validation": str(val), "test": str(test)}
        table.write(tmp_path / "runs.csv", dict.fromkeys(table.HEADER, "") | row)
    page = "# Page\n\n<!-- runs: e -->\nold\n<!-- end -->\n"
    assert table.generated(page, tmp_path / "runs.csv").splitlines()[3:] == [
        "| system | setting | seeds | validation | test | steps |",
        "|---|---|---|---|---|---|",
        "| a | 0.2 | 2 | 0.500 (0.400 to 0.600) | 0.500 (0.400 to 0.600) | 7 |",
        "<!-- end -->",
    ]
    with pytest.raises(KeyError, match="no runs of f"):
        table.generated(page.replace("runs: e", "runs: f"), tmp_path / "runs.csv")


def test_the_tables_of_the_pages_are_those_of_the_runs(scripts: Any) -> None:
    _, table = scripts
    for path in (ROOT / "docs/results").rglob("*.md"):
        assert table.generated(path.read_text(), table.RUNS) == path.read_text(), path
