"""benchmarks/controlled.py, judge.py and run_table.py: an experiment's trainings, its test, and the tables of pages."""

import csv
import importlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

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
    for path in (ROOT / "benchmarks").glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
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
            with SummaryWriter(str(run / "logs")) as board:
                for part in (1, 2):
                    board.add_scalar("val/accuracy", VALIDATED[system][float(rate)] * part / 2, part * steps // 2 - 1)
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
    for system in controlled.speeds():
        controlled.train(system)
        controlled.train(system)  # what has a row is not trained again
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
    judge = importlib.import_module("judge")
    with pytest.raises(SystemExit, match="has no runs of ours, low, high; train them first"):
        judge.judge(controlled)
    for system in controlled.speeds():
        controlled.train(system)
    _, table = scripts
    paired = importlib.import_module("paired")
    right = {"ours": [1, 1, 1, 0], "low": [1, 1, 0, 0], "high": [1, 0, 0, 0]}
    tested = []

    def answers_of(checkpoint: Path) -> Any:
        name, rate, seed = checkpoint.relative_to(tmp_path / "runs/mine").parts[0].split("-")
        tested.append((name, float(rate), seed))
        names = ["s1_a", "s1_b", "s2_a", "s2_b"]
        return paired.Tested(names, [0] * 4, np.array(right[name], bool))

    monkeypatch.setattr(judge, "answers_of", answers_of)
    judge.judge(controlled)
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
    # half of its last accuracy after half of its steps
    with open(tmp_path / "curves.csv", newline="") as file:
        curve = [row for row in csv.DictReader(file) if (row["system"], row["setting"]) == ("ours", "0.002")]
    assert [(row["seed"], row["steps"], row["minutes"], row["validation"]) for row in curve] == [
        (seed, *point) for seed in "012" for point in (("2250", "0.75", "0.35"), ("4500", "1.5", "0.7"))
    ]
    assert (tmp_path / "curves-mine.png").read_bytes().startswith(b"\x89PNG")


def test_the_next_level_begins_if_one_system_has_learned_the_one_before_and_goes_on_from_its_model(
    trainer: Any, scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controlled, fitted = trainer
    script, table = scripts
    first = controlled._replace(experiment=controlled.experiment._replace(rates=(0.002,), seeds=1))
    second = first._replace(name="mine/2", experiment=first.experiment._replace(after="mine"))
    assert first.may_begin() and not second.may_begin()
    with pytest.raises(SystemExit, match="has no runs of ours in mine; train it there first"):
        second.train("ours")
    first.train("low")  # 0.1 on the validation
    peer = {"experiment": "mine", "system": "a peer", "seed": "0", "validation": "0.9"}  # from which nothing goes on
    table.write(tmp_path / "runs.csv", dict.fromkeys(table.HEADER, "") | peer)
    assert not second.may_begin()
    first.train("ours")  # 0.7
    assert second.may_begin()
    second.train("ours")
    longer = second._replace(name="mine/2, longer", experiment=second.experiment._replace(minutes=4.5))
    longer.train("ours")
    assert longer.label == "mine-2-longer"
    assert fitted == [("low", 0.002, 0, 2250), *[("ours", 0.002, 0, steps) for steps in (4500, 4500, 13500)]]
    monkeypatch.undo()
    asked: list[Any] = []
    monkeypatch.setattr(script.Trainer, "fit", lambda trainer, *given: asked.extend(given))
    second.fit_system("ours", tmp_path, 9)
    assert asked[asked.index("--model.init_from") + 1] == str(tmp_path / "runs/mine/ours-0.002-0/runs/run/0/best.ckpt")


def test_an_experiment_may_have_the_rates_of_another_and_systems_of_its_own(
    trainer: Any, scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controlled, fitted = trainer
    _, table = scripts
    words, paired = importlib.import_module("words"), importlib.import_module("paired")
    for system in controlled.speeds():
        controlled.train(system)
    fitted.clear()
    simple = words.Peer(
        "500 trees",
        lambda folder, run, minutes, seed: {"validation": 0.5 + seed / 10},
        lambda folder, run, seed: paired.Tested(["s1_a", "s2_a"], [0, 0], np.array([True, seed == 2])),
    )
    others = controlled.experiment._replace(rates_of="mine", seeds=2, peers={"forest": simple})
    permuted = controlled._replace(name="mine/permuted", experiment=others)
    for system in permuted.systems:
        permuted.train(system)
    best = {"ours": (0.002, 4500), "low": (0.0005, 2250), "high": (0.008, 1500)}
    assert fitted == [(system, rate, seed, steps) for system, (rate, steps) in best.items() for seed in (0, 1)]
    rows = [row for row in table.read(tmp_path / "runs.csv", "mine/permuted") if row["system"] == "forest"]
    assert [(row["setting"], row["seed"], row["validation"]) for row in rows] == [
        ("500 trees", "0", "0.5"), ("500 trees", "1", "0.6")
    ]  # fmt: skip
    judge = importlib.import_module("judge")
    ours = paired.Tested(["s1_a", "s2_a"], [0, 0], np.array([True, True]))
    monkeypatch.setattr(judge, "answers_of", lambda checkpoint: ours)
    judge.judge(permuted)
    rows = table.read(tmp_path / "runs.csv", "mine/permuted")
    assert {row["test"] for row in rows if row["system"] == "forest"} == {"0.5"}
    with open(tmp_path / "comparisons.csv", newline="") as file:
        compared = [(row["first"], row["second"], row["difference"]) for row in csv.DictReader(file)]
    assert compared == [("high", "ours", "+0.000"), ("low", "ours", "+0.000"), ("forest", "ours", "+0.500")]


def test_an_experiment_may_have_the_steps_a_minute_of_another(trainer: Any, scripts: Any, tmp_path: Path) -> None:
    controlled, fitted = trainer
    _, table = scripts
    same = controlled._replace(name="mine/same", experiment=controlled.experiment._replace(steps_of="mine", minutes=3))
    with pytest.raises(SystemExit, match="has no runs of ours in mine; train it there first"):
        same.steps("ours")
    controlled.train("ours")
    fitted.clear()
    same.train("ours")
    assert {steps for *_, steps in fitted} == {9000}  # in 3 minutes, after 4,500 in 1.5
    assert not table.read(tmp_path / "runs.csv", "mine/same/speeds")


@pytest.mark.parametrize(("dashes", "lowest", "highest"), [(1, 0.9, 1), (2, 0.3, 0.7)])
def test_brightness_tells_joined_dots_only_where_they_overlap(
    scripts: Any, dashes: int, lowest: float, highest: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawings = importlib.import_module("drawings")
    monkeypatch.setenv("LONGSEQ_CACHE", str(tmp_path))
    monkeypatch.setattr(drawings, "Pathfinder", partial(drawings.Pathfinder, num_train=200, num_test=100))
    control = drawings.brightness(dashes)
    tested = control.answers(tmp_path, tmp_path, 0)
    assert len(tested.names) == 100 and tested.labels == [0, 1] * 50
    assert lowest <= tested.right.mean() <= highest
    assert lowest <= control.fit(tmp_path, tmp_path, 1, 0)["validation"] <= highest


def test_needles_are_judged_by_duration_as_one_sequence_and_in_windows(
    trainer: Any, scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controlled, _ = trainer
    _, table = scripts
    judge = importlib.import_module("judge")
    needles = controlled._replace(experiment=controlled.experiment._replace(group=None, seconds=(600, 60), seeds=1))
    for system in needles.speeds():
        needles.train(system)
    ways = "as one sequence", "in windows of 10 s"
    right = {
        "ours": {"600": (4, 2), "60": (4, 4)},
        "low": {"600": (0, 1), "60": (1, 1)},
        "high": {"600": (1, 3), "60": (3, 3)},
    }
    measured: list[list[str]] = []

    def needle(asked: list[str]) -> None:
        measured.append(asked)
        (out := Path(asked[asked.index("--out") + 1])).mkdir()
        system = out.parent.name.partition("-")[0]
        figures, trials = ["seconds,heard,false alarms an hour"], ["seconds,heard,trial,class,answer"]
        for seconds, counts in right[system].items():
            for way, count in zip(ways, counts, strict=True):
                figures.append(f"{seconds},{way},{'' if system == 'low' else count}")
                trials += [f"{seconds},{way},{trial},7,{7 if trial < count else 8}" for trial in range(4)]
        (out / "table.csv").write_text("\n".join(figures))
        (out / "trials.csv").write_text("\n".join(trials))

    monkeypatch.setattr(judge, "longseq", needle)
    for _ in range(2):  # the second time nothing is measured
        judge.judge(needles)
    assert len(measured) == 3 and " --seconds 600 60 --trials 100 --window 10 --empty_hours 1 " in " ".join(measured[0])
    for experiment, seconds in (("mine", "600"), ("mine/60 s", "60")):
        rows = table.read(tmp_path / "runs.csv", experiment)
        found = {row["system"]: (row["test"], row["false alarms an hour"]) for row in rows if row["test"]}
        assert found == {
            system + suffix: (f"{counts[seconds][way] / 4:g}", "" if system == "low" else str(counts[seconds][way]))
            for system, counts in right.items()
            for way, suffix in enumerate(("", ", in windows of 10 s"))
        }
    with open(tmp_path / "comparisons.csv", newline="") as file:
        compared = {(row["experiment"], row["first"]): row for row in csv.DictReader(file)}
    assert {row["second"] for row in compared.values()} == {"ours"} and len(compared) == 10
    assert compared["mine", "high"]["difference"] == "+0.750"
    assert compared["mine", "high, in windows of 10 s"]["difference"] == "+0.250"
    assert compared["mine/60 s", "high"]["difference"] == "+0.250"
    assert compared["mine", "high"]["groups"] == "4"


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
    with pytest.raises(KeyError, match="no rows of f"):
        table.generated(page.replace("runs: e", "runs: f"), tmp_path / "runs.csv")


def test_a_table_of_comparisons_has_the_difference_with_its_interval(scripts: Any, tmp_path: Path) -> None:
    _, table = scripts
    row = dict(zip(table.COMPARED, ["e", "a", "b", "9", "3", "+0.100", "-0.050", "+0.250", "0.5 1"], strict=True))
    table.write(tmp_path / "comparisons.csv", row, header=table.COMPARED, key=table.COMPARED[:3])
    page = "<!-- compared: e -->\n<!-- end -->\n"
    assert table.generated(page, tmp_path / "runs.csv").splitlines()[3] == (
        "| b | a | +0.100 (-0.050 to +0.250) | 9, 3 | 0.5, 1 |"
    )
    with pytest.raises(KeyError, match=r"comparisons.csv has no rows of f"):
        table.generated(page.replace(": e", ": f"), tmp_path / "runs.csv")


def test_the_tables_of_the_pages_are_those_of_the_runs(scripts: Any) -> None:
    _, table = scripts
    for path in (ROOT / "docs/results").rglob("*.md"):
        assert table.generated(path.read_text(), table.RUNS) == path.read_text(), path
