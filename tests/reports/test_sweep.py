"""A grid of trainings: its combinations and its table; no training is done twice."""

import csv
import itertools
import json
import math
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import yaml
from torch.utils.tensorboard import SummaryWriter

from longseq.reports.equal_time import TRIAL, steps_within
from longseq.reports.plots import machine
from longseq.reports.sweep import _name, _table, averaged, combinations, draw, sweep

DIGITS = str(Path(__file__).parents[2] / "configs/image/digits.yaml")
ESC50 = str(Path(__file__).parents[2] / "configs/audio/esc50.yaml")


def test_every_combination_is_there_and_brackets_keep_their_commas():
    assert combinations(["a.k=1,2", "b=[3,4],5"]) == [
        (("a.k", "1"), ("b", "[3,4]")), (("a.k", "1"), ("b", "5")),
        (("a.k", "2"), ("b", "[3,4]")), (("a.k", "2"), ("b", "5")),
    ]  # fmt: skip
    assert combinations(["k=[[3,4],[5,6]],8"]) == [(("k", "[[3,4],[5,6]]"),), (("k", "8"),)]
    step, one_cycle = "{scheduler: StepLR, step_size: 10}", "{scheduler: MultiStepLR, milestones: [2, 3]}"
    assert combinations([f"s=linear,{step},{one_cycle}"]) == [(("s", "linear"),), (("s", step),), (("s", one_cycle),)]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--grid", "k"], "grid: must be of the form key=value,value, got 'k'"),
        (["--grid", "a=1", "--seeds", "0"], "seeds: must be positive, got 0"),
        (["--grid", "a=1", "--seconds", "-1"], "seconds: must be positive, got -1"),
        (["--grid", "a=1", "--config", "no.yaml"], "no.yaml: no such file; longseq has configurations"),
        (["--grid", "a=1", "--mean_over", "b"], "mean_over: must be a key of the grid, got 'b'"),
    ],
)
def test_a_flag_that_cannot_be_is_one_line(flags, said, command):
    done = command("sweep", "--config", DIGITS, *flags)
    assert (done.code, said in done.error) == (2, True), done.err


def test_a_report_without_any_flag_says_which_it_needs(command):
    done = command("spectrum")
    assert (done.code, "ckpt_path" in done.error) == (2, True), done.err


def test_a_training_that_diverges_is_nan_and_the_others_go_on(command, forked_reports, tmp_path, monkeypatch):
    flags = ["--trainer.max_steps", "12", "--model.encoder.dim", "8", "--model.encoder.depth", "1"]
    flags += ["--trainer.limit_test_batches", "1", "--model.optimizer", "sgd", "--model.warmup_fraction", "0"]
    rates = "model.learning_rate=1e30,1e-3"
    done = command("sweep", "--config", DIGITS, "--grid", rates, "--seeds", "1", "--flags", json.dumps(flags))
    assert done.code == 0, done.err
    assert (
        "learning_rate=1e30: nan" in done.out
        and "grid must hold settings that can be trained with these flags" in done.out
    )
    with open(tmp_path / "sweep/table.csv", newline="") as file:
        first, second = csv.DictReader(file)
    assert first["val accuracy, mean"] == "nan" and 0 <= float(second["val accuracy, mean"]) <= 1
    assert "best by val accuracy: learning_rate=1e-3; " in done.out
    none = ["--grid", "model.learning_rate=1e30", "--out", "none"]
    alone = command("sweep", "--config", DIGITS, *none, "--seeds", "1", "--flags", json.dumps(flags))
    assert (alone.code, "best by" in alone.out) == (0, False), alone.err
    monkeypatch.setattr("longseq.reports.sweep.run_python", lambda *_: pytest.fail("trained again"))
    again = command("sweep", "--config", DIGITS, "--grid", rates, "--seeds", "1", "--flags", json.dumps(flags))
    assert (again.code, again.out) == (0, done.out)


SHORT = ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1"]
SHORT += ["--model.encoder.dim", "8", "--model.encoder.depth", "1"]


def figures_of(tmp_path: Path) -> dict[str, dict[str, float]]:
    results = (tmp_path / "sweep/runs").glob("*/*/metrics.json")
    return {result.parent.parent.name: json.loads(result.read_text()) for result in results}


def test_settings_are_compared_on_the_validation_and_the_best_alone_is_tested(command, forked_reports, tmp_path):
    """The flags of the trainings are given as fit takes them; those in --flags come first."""
    start = ["sweep", "--config", DIGITS, "--seeds", "2", "--flags", json.dumps(["--model.learning_rate", "1e-9"])]
    rates = ["--grid", "model.encoder.local=null", "model.encoder.patch_size=1,2", "--model.learning_rate", "1e-3"]
    done = command(*start, *rates, *SHORT, "--trainer.limit_val_batches", "3")
    assert done.code == 0, done.err
    figures = figures_of(tmp_path)
    rows = list(csv.DictReader((tmp_path / "sweep/table.csv").open()))
    means = {}
    for row in rows:
        of_seeds = [f"local=null_patch_size={row['model.encoder.patch_size']},seed={seed}" for seed in range(2)]
        means[tuple(of_seeds)] = sum(figures[name]["val/accuracy"] for name in of_seeds) / 2
        assert float(row["val accuracy, mean"]) == pytest.approx(means[tuple(of_seeds)], abs=1e-4)
    best = max(means, key=means.__getitem__)
    tested = {name for name, of_run in figures.items() if "test/accuracy" in of_run}
    assert tested == set(best)
    mean = sum(figures[name]["test/accuracy"] for name in best) / 2
    assert f"test accuracy, mean: {mean:.4f}" in done.out
    assert "best by val accuracy: " in (tmp_path / "sweep/table.md").read_text()
    config = yaml.safe_load((tmp_path / "sweep/runs" / best[0] / "0/config.yaml").read_text())
    assert config["model"]["learning_rate"] == 1e-3 and config["trainer"]["limit_val_batches"] == 3


def test_a_test_figure_of_every_row_is_there_on_demand_and_chooses_nothing(command, forked_reports, tmp_path):
    start = ["sweep", "--config", DIGITS, "--grid", "model.encoder.attention.k=4,8", "--seeds", "1", *SHORT]
    assert command(*start).code == 0
    before = figures_of(tmp_path)
    done = command(*start, "--metric", "test/accuracy")  # of the runs that are there
    assert (done.code, "best by" in done.out, "choose no setting" in done.out) == (0, False, True), done.err
    rows = list(csv.DictReader((tmp_path / "sweep/table.csv").open()))
    for row, (name, figures) in zip(rows, sorted(figures_of(tmp_path).items()), strict=True):
        assert float(row["test accuracy, mean"]) == pytest.approx(figures["test/accuracy"], abs=1e-4)
        assert before[name] == {key: figures[key] for key in before[name]}


def test_of_a_figure_whose_lowest_is_best_the_lowest_is_chosen_and_tests_may_be_left_out(
    command, forked_reports, tmp_path
):
    masked = [*SHORT[:4], *SHORT[6:], "--model.task", "Masked", "--trainer.limit_test_batches=0"]
    rates = "model.learning_rate=1e-30,1e-2"
    done = command("sweep", "--config", DIGITS, "--grid", rates, "--seeds", "1", *masked)
    assert done.code == 0, done.err
    of_rates = {name: figures["val/l1"] for name, figures in figures_of(tmp_path).items()}
    best = min(of_rates, key=of_rates.__getitem__).partition(",seed")[0]
    assert f"best by val l1: {best}; not tested, because trainer.limit_test_batches is 0" in done.out
    assert not any("test/l1" in figures for figures in figures_of(tmp_path).values())


def test_of_a_users_metric_torchmetrics_says_which_is_best(command, forked_reports, tmp_path):
    flags = [
        "--model.task",
        "SingleLabel",
        "--model.task.metrics",
        "{error: {metric: MulticlassHingeLoss}}",
        "--metric",
        "val/error",
        *SHORT,
    ]
    done = command("sweep", "--config", DIGITS, "--grid", "model.learning_rate=1e-30,1e-2", "--seeds", "1", *flags)
    assert done.code == 0, done.err
    of_rates = {name: figures["val/error"] for name, figures in figures_of(tmp_path).items()}
    assert f"best by val error: {min(of_rates, key=of_rates.__getitem__).partition(',seed')[0]}" in done.out


def test_a_baseline_is_tested_beside_the_best_setting(command, forked_reports, tmp_path):
    grid = ["--grid", "model.encoder.attention.k=4,8", "--baseline", "model.encoder.attention=Softmax"]
    done = command("sweep", "--config", DIGITS, *grid, "--seeds", "1", *SHORT)
    assert done.code == 0, done.err
    assert re.search(r"baseline: attention=Softmax; test accuracy, mean: 0\.\d+", done.out)
    tested = [name for name, figures in figures_of(tmp_path).items() if "test/accuracy" in figures]
    assert len(tested) == 2 and sum("Softmax" in name for name in tested) == 1


def test_a_sweep_trains_each_setting_once_and_goes_on_where_it_was(command, forked_reports, tmp_path, monkeypatch):
    flags = ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1"]
    arguments = ["sweep", "--config", DIGITS, "--grid", "model.encoder.attention.k=4,8", "--seeds", "1",
                 "--metric", "test/accuracy", "--flags", json.dumps(flags)]  # fmt: skip
    done = command(*arguments)
    assert done.code == 0, done.err
    runs = sorted(path.name for path in (tmp_path / "sweep/runs").iterdir())
    assert runs == ["k=4,seed=0", "k=8,seed=0"] or runs == ["k=4_seed=0", "k=8_seed=0"]
    with open(tmp_path / "sweep/table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["model.encoder.attention.k"] for row in rows] == ["4", "8"]
    (metrics,) = (tmp_path / "sweep/runs" / runs[1]).glob("0/metrics.json")
    assert float(rows[1]["test accuracy, mean"]) == pytest.approx(
        json.loads(metrics.read_text())["test/accuracy"], abs=1e-4
    )
    monkeypatch.setattr("longseq.reports.sweep.run_python", lambda *_: pytest.fail("trained again"))
    assert command(*arguments).code == 0
    done = command(*arguments, "--metric", "test/f1")
    assert (done.code, "| test f1, mean |" in done.out) == (0, True), done.err
    done = command(*arguments, "--metric", "test/auroc")
    assert (done.code, "metric: must be one of test/accuracy, test/f1, " in done.error) == (2, True), done.err
    assert command(*arguments, "--metric", "val/accuracy").code == 0
    assert (tmp_path / "sweep/sweep.png").stat().st_size > 5_000
    done = command(*arguments[:-1], json.dumps([*flags, "--model.learning_rate", "0.1"]))
    assert (done.code, "out: must be a folder of runs with this config and these flags" in done.error) == (2, True)


def test_settings_are_compared_at_equal_time(command, forked_reports, tmp_path, monkeypatch):
    monkeypatch.setattr("longseq.reports.sweep.TRIAL", [*TRIAL, "--trainer.max_steps", "9"])
    small = ["--model.encoder.dim", "8", "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1"]
    small += ["--trainer.accelerator", "cpu"]
    small += ["--model.schedule", "{scheduler: ReduceLROnPlateau, monitor: val/loss}"]  # the trial has a validation too
    arguments = ["sweep", "--config", DIGITS, "--grid", "model.encoder.depth=1,3", "--seeds", "1", "--seconds", "0.3",
                 "--flags", json.dumps(small)]  # fmt: skip
    done = command(*arguments)
    assert done.code == 0, done.err
    steps = json.loads((tmp_path / "sweep/steps.json").read_text())["steps"]
    with open(tmp_path / "sweep/table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["steps"]) for row in rows] == list(steps.values())
    for run, length in zip(sorted((tmp_path / "sweep/runs").iterdir()), steps.values(), strict=True):
        assert torch.load(run / "0/last.ckpt", weights_only=True)["global_step"] == length
    words = shlex.split((tmp_path / "sweep/table.md").read_text().strip().split("\n")[0])
    assert (
        words[:3] == ["python", "train.py", "sweep"]
        and "--out" not in words
        and words[words.index("--seconds") + 1] == "0.3"
    )
    assert json.loads(words[words.index("--flags") + 1]) == small
    monkeypatch.setattr("longseq.reports.sweep.run_python", lambda *_: pytest.fail("measured or trained again"))
    assert command(*arguments).code == 0
    monkeypatch.setattr("longseq.reports.sweep.machine", lambda device: f"another {device}")
    assert command(*arguments).code == 0  # nothing is left to measure
    third = [argument.replace("depth=1,3", "depth=1,3,4") for argument in arguments]
    assert "out: must be a folder whose steps were measured on another cpu, got sweep, of " in command(*third).error
    other = [argument.replace("0.3", "0.4") for argument in arguments]
    assert "out: must be a folder of runs with this config and these flags" in command(*other).error


def test_each_run_starts_from_its_likeness_in_another_sweep(command, forked_reports, tmp_path):
    flags = ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1"]
    arguments = ["sweep", "--config", DIGITS, "--seeds", "1", "--grid"]
    masked = json.dumps([*flags, "--model.task", "Masked"])
    before = ["model.encoder.attention.k=4", "--flags", masked, "--out", "before"]
    done = command(*arguments, *before)
    assert done.code == 0, done.err
    still = json.dumps([*flags, "--model.learning_rate", "1e-12"])
    done = command(*arguments, "model.encoder.attention.k=4", "--flags", still, "--init_from", "before")
    assert done.code == 0, done.err
    assert "--init_from before" in (tmp_path / "sweep/table.md").read_text()
    first, second = (
        torch.load(next((tmp_path / folder).glob("runs/*/0/last.ckpt")), weights_only=True)["state_dict"]
        for folder in ("before", "sweep")
    )
    encoder = [name for name in second if name.startswith("encoder.")]
    assert encoder
    for name in encoder:
        torch.testing.assert_close(second[name], first[name], rtol=0, atol=1e-10)
    missing = [*arguments, "model.encoder.attention.k=8", "--init_from", "before", "--out", "other"]
    done = command(*missing, "--flags", json.dumps(flags), "--seconds", "60")
    assert not (tmp_path / "other/speed").exists()  # refused before any speed is measured
    assert (done.code, "init_from: must be the folder of a sweep with the same grid" in done.error) == (2, True)


def test_the_steps_of_a_time_follow_from_the_logged_speed(tmp_path):
    with SummaryWriter(str(tmp_path / "run/Verma-seed0")) as writer:
        for step, milliseconds in enumerate([30.0, 20.0, 500.0]):
            writer.add_scalar("throughput/step_ms", milliseconds, step)
    assert steps_within(1.5, tmp_path / "run") == 50
    with pytest.raises(ValueError, match=r"^seconds must be at least 0.03, the time of one step, got 0.01; "):
        steps_within(0.01, tmp_path / "run")
    with SummaryWriter(str(tmp_path / "empty/Verma-seed0")) as writer:
        writer.add_scalar("loss", 1.0, 0)
    with pytest.raises(ValueError, match=r"^seconds must be left out, because .*empty shows no speed after 20 s"):
        steps_within(1.0, tmp_path / "empty")


def test_folds_of_esc50_are_trained_each_once_and_end_in_one_mean(command, tmp_path, monkeypatch):
    """Every fold has two classes of three sounds."""
    generator = np.random.default_rng(0)
    for part in ("audio", "meta"):
        (tmp_path / "ESC-50-master" / part).mkdir(parents=True)
    rows = [("filename", "fold", "category")]
    for fold, name, number in itertools.product(range(1, 6), ("rain", "wind"), range(3)):
        rows.append((f"{fold}-{name}-{number}.wav", fold, name))
        soundfile.write(tmp_path / "ESC-50-master/audio" / rows[-1][0], generator.uniform(-0.5, 0.5, 800), 8000)
    with open(tmp_path / "ESC-50-master/meta/esc50.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)

    def in_this_process(call, **options):
        if call[0] == "git":  # the model card asks for the commit
            return run(call, **options)
        assert call[1:4] == ["-m", "longseq", "fit"]
        done = command(*call[3:])
        return subprocess.CompletedProcess(call, done.code, done.out, done.err)

    run = subprocess.run
    monkeypatch.setattr("subprocess.run", in_this_process)
    small = ["--data.root", ".", "--model.encoder.dim", "8", "--model.encoder.heads", "1", "--trainer.max_steps", "1"]
    grid = ["--grid", "data.test_fold=1,4", "--mean_over", "data.test_fold", "--seeds", "1"]
    done = command("sweep", "--config", ESC50, *grid, "--flags", json.dumps(small))
    assert done.code == 0, done.err

    tested = []
    for fold, before in zip("14", "53", strict=True):
        (run,) = (tmp_path / "sweep/runs").glob(f"test_fold={fold}*/0")
        with open(run / "splits.csv", newline="") as file:
            splits = {(row["split"], Path(row["path"]).name[0]) for row in csv.DictReader(file)}
        assert {which for split, which in splits if split == "test"} == {fold}
        assert {which for split, which in splits if split == "val"} == {before}
        assert {which for split, which in splits if split == "train"} == set("12345") - {fold, before}
        tested.append(json.loads((run / "metrics.json").read_text()))
    with open(tmp_path / "sweep/table.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    of_val, of_test = ([figures[f"{split}/accuracy"] for figures in tested] for split in ("val", "test"))
    assert float(row["val accuracy, mean"]) == pytest.approx(sum(of_val) / 2, abs=1e-4)
    assert float(row["highest less lowest"]) == pytest.approx(max(of_val) - min(of_val), abs=1e-4)
    assert f"the only setting; test accuracy, mean: {sum(of_test) / 2:.4f}" in done.out
    assert len(row["each"].split()) == 2
    assert (tmp_path / "sweep/sweep.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        (["data.seed=1,2"], "grid must leave out data.seed, which the seeds set, "),
        (["a.k=1 2,1_2"], "grid must have no two settings of one name, "),
    ],
)
def test_settings_that_would_be_taken_for_each_other_are_refused(grid, said, tmp_path):
    with pytest.raises(ValueError, match=f"^{said}"):
        sweep([DIGITS], grid, out=str(tmp_path / "sweep"))
    assert not (tmp_path / "sweep").exists()


def test_runs_of_another_key_with_the_same_last_word_are_not_taken(command, forked_reports, tmp_path):
    short = json.dumps(["--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--trainer.limit_test_batches=1"])
    flags = ["--config", DIGITS, "--seeds", "1", "--out", str(tmp_path / "sweep"), "--flags", short]
    started = command("sweep", *flags, "--grid", "model.encoder.depth=1,2", "--init_from", tmp_path)
    assert (started.code, "init_from: must be the folder of a sweep" in started.error) == (2, True)
    assert command("sweep", *flags, "--grid", "model.encoder.dim=16,24").code == 0
    done = command("sweep", *flags, "--grid", "model.encoder.attention.dim=16,24")
    assert done.code == 2
    assert "out: must be a folder whose runs dim=16 are of model.encoder.attention.dim, got " in done.error


def test_a_configuration_of_the_grid_or_of_the_flags_that_was_changed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("longseq.reports.sweep.run_python", lambda *command: pytest.fail(" ".join(command)))
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    for path in (one, two):
        path.write_text("model: {learning_rate: 0.01}")
    grid, flags, out = [f"config={one}"], [f"--config={two}"], str(tmp_path / "sweep")
    run = Path(out, "runs", _name((("config", str(one)),), 0), "0")
    run.mkdir(parents=True)
    (run / "metrics.json").write_text('{"test/accuracy": 0.5}')
    sweep([DIGITS], grid, 1, metric="test/accuracy", flags=flags, out=out)
    sweep([DIGITS], grid, 1, metric="test/accuracy", flags=flags, out=out)
    text = one.read_text()
    one.write_text(text.replace("0.01", "0.02"))
    with pytest.raises(ValueError, match=rf"^out must be a folder of runs with this {re.escape(str(one))}, got "):
        sweep([DIGITS], grid, 1, flags=flags, out=out)
    one.write_text(text)
    two.write_text(text.replace("0.01", "0.02"))
    with pytest.raises(ValueError, match=r"^out must be a folder of runs with this config and these flags, got "):
        sweep([DIGITS], grid, 1, flags=flags, out=out)


def test_flags_that_make_several_runs_of_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^flags must leave out --folds, which makes several runs of one, "):
        sweep([DIGITS], ["a.k=1,2"], flags=["--folds=3"], out=str(tmp_path / "sweep"))
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(("threads", "said"), [(1, "1 thread;"), (2, "2 threads;")])
def test_what_a_figure_was_measured_on_counts_threads(threads, said, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert said in machine()


def test_a_mean_over_a_key_leaves_the_other_keys_as_settings():
    found = {(("k", k), ("fold", fold)): [float(k) * int(fold)] for k in ("1", "2") for fold in ("1", "3")}
    assert averaged(found, "fold") == {(("k", "1"),): [1.0, 3.0], (("k", "2"),): [2.0, 6.0]}
    assert averaged(found, None) == found


def test_the_figure_has_a_line_for_each_combination_of_the_other_keys():
    found = {(("k", k), ("sharing", sharing)): [0.5, 0.6] for k in ("8", "16") for sharing in ("none", "layerwise")}
    (axes,) = draw(found).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["sharing=none", "sharing=layerwise"]
    words = {(("projection", name),): [0.5] for name in ("longseq.Mean", "longseq.Max")}
    assert [label.get_text() for label in draw(words).axes[0].get_xticklabels()] == ["Mean", "Max"]


def test_a_run_that_diverged_leaves_no_range_whichever_it_was():
    for results in ([0.5, 0.6, math.nan], [math.nan, 0.5, 0.6]):
        _, ((*_, mean, spread, _),) = _table({(("k", "8"),): results}, "test/accuracy", None, "each seed")
        assert (mean, spread) == ("nan", "nan")


def test_a_baseline_is_a_line_across_and_a_row_of_the_table():
    baseline = (("attention", "Softmax"),)
    found = {baseline: [0.8, 0.9], (("k", "8"),): [0.5], (("k", "16"),): [0.6]}
    (axes,) = draw(found, baseline).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["attention=Softmax"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["8", "16"]
