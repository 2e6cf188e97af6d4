"""Cross-validation in one command: a run for each fold, and a table with mean and spread."""

import csv
import functools
import io
import json
import math
import shutil
import statistics
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import forked
import pytest
import yaml
from PIL import Image
from several_runs import killed_in, same, weights

from longseq.cli.runs.folds import write_report

ROOT = Path(__file__).parents[2]
SMALL = ["--model.encoder.dim", "8", "--model.encoder.depth", "1", "--trainer.max_epochs", "2"]
SMALL += ["--trainer.limit_train_batches", "3", "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1"]
FIT = ["fit", "--config", str(ROOT / "configs/image/digits.yaml"), *SMALL, "--trainer.logger", "false"]
FIT += ["--experiment", "x"]
FOLDS = [*FIT, "--folds", "3"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, str]]:
    """The runs of a cross-validation of so many folds that was never stopped, and what it printed; it is trained when a
    test first needs it."""
    from longseq.cli import main

    @functools.cache
    def of(folds: int) -> tuple[Path, str]:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
            patch.chdir(tmp_path_factory.mktemp("folds"))
            main([*FIT, "--folds", str(folds)])
            return Path.cwd() / "runs", printed.getvalue()

    return of


def rows_of(table: str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(table).read_text().splitlines()))


def figures(run: int) -> dict[str, float]:
    return json.loads(Path(f"runs/x/{run}/metrics.json").read_text())


def test_every_fold_is_an_ordinary_run_and_the_table_has_mean_and_spread(whole: Callable, command) -> None:
    runs, out = whole(3)
    shutil.copytree(runs, "runs")
    assert [line for line in out.splitlines() if line.startswith("fold ")] == [f"fold {n} of 3" for n in (1, 2, 3)]
    held = []
    for run in range(3):
        data = yaml.safe_load(Path(f"runs/x/{run}/config.yaml").read_text())["data"]["init_args"]
        assert (data["folds"], data["fold"]) == (3, run + 1)
        held += [row["path"] for row in rows_of(f"runs/x/{run}/splits.csv") if row["split"] == "val"]
    assert len(held) == len(set(held)) == 1438  # of digits, whose test split stays as it is
    rows = {row.pop("fold"): row for row in rows_of("runs/x/2/folds.csv")}
    values = [figures(run)["test/accuracy"] for run in range(3)]
    assert [float(rows[str(number)]["test accuracy"]) for number in (1, 2, 3)] == pytest.approx(values, abs=1e-4)
    expected = (statistics.mean(values), statistics.stdev(values), min(values), max(values))
    found = [float(rows[name]["test accuracy"]) for name in ("mean", "standard deviation", "lowest", "highest")]
    assert found == pytest.approx(expected, abs=1e-4)
    assert Path("runs/x/2/folds.md").read_text().split("\n\n", 2)[2].strip() in out
    # the same as the ordinary command of one fold, whose checkpoint is enough to test it, and whose configuration is of
    # one run
    assert command(*FIT, "--data.folds", "3", "--data.fold", "2").code == 0
    assert same(weights("x/3"), weights("x/1"))
    again = command("fit", "--config", "runs/x/1/config.yaml")
    assert again.code == 0 and "fold " not in again.out
    assert sorted(path.name for path in Path("runs/x").iterdir()) == ["0", "1", "2", "3", "4"]
    assert same(weights("x/4"), weights("x/1"))
    assert command("test", "--ckpt_path", "runs/x/1/best.ckpt", "--trainer.limit_test_batches", "1").code == 0


def test_a_figure_that_a_fold_lacks_has_no_mean_and_hides_no_other(tmp_path: Path) -> None:
    """As the R2 of a fold with one sample."""
    for number, explained in ((1, 0.5), (2, math.nan)):
        run = tmp_path / f"x/{number}"
        run.mkdir(parents=True)
        config = {"data": {"init_args": {"fold": number}}, "trainer": {"accelerator": "cpu"}}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        (run / "series.json").write_text('{"folds": 2}')
        (run / "metrics.json").write_text(json.dumps({"test/mae": float(number), "test/r2": explained}))
    write_report(tmp_path / "x", 2, [])
    (mean,) = [row for row in rows_of(str(tmp_path / "x/2/folds.csv")) if row["fold"] == "mean"]
    assert (mean["test mae"], mean["test r2"]) == ("1.5000", "nan")


@pytest.mark.parametrize(
    ("stop", "how"), [(7, "--resume"), pytest.param(5, "--resume FOLDER", marks=pytest.mark.thorough)]
)
def test_a_stopped_cross_validation_goes_on_and_repeats_no_finished_fold(
    stop: int, how: str, whole: Callable, command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 1 to 6 are of the first fold, 7 to 12 of the second."""
    two, runs = [*FIT, "--folds", "2"], whole(2)[0]
    steps = killed_in(stop, monkeypatch)
    assert command(*two).code == 143
    run = f"runs/x/{(stop - 1) // 6}"
    done = command(*two, "--resume") if how == "--resume" else command("fit", "--resume", run)
    assert done.code == 0, done.err
    assert len(steps) == 12
    assert sorted(path.name for path in Path("runs/x").iterdir()) == ["0", "1"]
    assert same(weights("x/1"), weights("x/1", runs))
    assert "standard deviation" in done.out


def test_finished_folds_are_kept_and_not_mixed_with_other_settings(whole: Callable, command) -> None:
    shutil.copytree(whole(3)[0], "runs")
    shutil.rmtree("runs/x/1")
    for path in Path("runs/x/2").glob("folds.*"):
        path.unlink()
    other = command(*FOLDS, "--resume", "--model.learning_rate", "1e-4")
    assert (other.code, other.error) == (2, "error: resume: model.learning_rate is 0.0001 here, and was 0.002 in the "
                                            "finished fold runs/x/2; give the flags of its start, or leave out "
                                            "--resume")  # fmt: skip
    for flags, said in (
        (["--model.mix", "MixUp"], "model.mix is longseq.training.MixUp here, and was None"),
        (["--model.betas", "[0.8, 0.999]"], "model.betas is [0.8, 0.999] here, and was None"),
        (["--trainer.callbacks+=DeviceStatsMonitor"], "trainer.callbacks is ["),
    ):
        other = command(*FOLDS, "--resume", *flags)
        assert (other.code, other.error[: len(said) + 15]) == (2, f"error: resume: {said}"), other.err
    assert "fold 2 of 3" in command(*FOLDS, "--resume").out
    longer = command("fit", "--resume", "runs/x/0", "--trainer.max_epochs", "3")
    assert (longer.code, longer.error[:42]) == (2, "error: resume: trainer.max_epochs is 3 here"[:42])
    again = command(*FOLDS, "--resume")  # all are finished
    assert again.code == 0 and "fold 2" not in again.out and "standard deviation" in again.out
    assert sorted(path.name for path in Path("runs/x").iterdir()) == ["0", "2", "3"]


@pytest.mark.thorough
def test_two_processes_train_the_folds_together(tmp_path: Path) -> None:
    two = ["--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.strategy", "ddp"]
    done = forked.run(ROOT / "train.py", *FIT, "--folds", "2", *two, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("standard deviation") == 1
    assert sorted(path.name for path in (tmp_path / "runs/x").iterdir()) == ["0", "1"]


def test_no_patient_is_in_two_splits_of_any_fold_and_each_is_tested_once(command, tmp_path: Path) -> None:
    for patient in range(9):
        for number in range(4):
            path = tmp_path / "x" / ("ill" if patient % 2 else "well") / f"patient{patient}_{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (4, 4), 20 * patient + number).save(path)
    config = ["--config", str(ROOT / "configs/image/folder.yaml"), "--data.root", str(tmp_path / "x"), "--data.size=4"]
    groups = ["--data.groups", "patient[0-9]+", "--data.val_fraction", "0.3", "--data.augment", "[]"]
    groups += ["--model.encoder.stem", "null", "--model.encoder.patch_size", "1"]
    done = command("fit", *config, *SMALL, *groups, "--folds", "3", "--trainer.logger", "false")
    assert done.code == 0, done.err
    tested = []
    for run in range(3):
        rows = rows_of(f"runs/x/{run}/splits.csv")
        assert len(rows) == 36
        places = {(row["group"], row["split"]) for row in rows}
        assert len(places) == 9 and {split for _, split in places} == {"train", "val", "test"}
        tested += [group for group, split in places if split == "test"]
    assert sorted(tested) == [f"patient{number}" for number in range(9)]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--folds", "1"], "error: folds: must be in 2..1000, got 1; 5 is usual"),
        (["--folds", "3", "--grow", "4:1,8:1"], "error: folds: not together with --grow; give one of the two"),
        (["--folds", "300"], "error: data.folds: 300 folds of 1438 files or groups, 146 samples in the largest class; "
                             "ask for fewer folds"),
        (["--folds", "3", "--data.fold", "2", "--ckpt_path", "CKPT"], "error: folds: starts from nothing or from "),
    ],
)  # fmt: skip
def test_a_cross_validation_that_cannot_be_is_one_line(flags: list[str], said: str, command) -> None:
    if "CKPT" in flags:
        assert command(*FIT).code == 0
        flags = [*flags[:-1], "runs/x/0/last.ckpt"]
    done = command(*FIT, *flags)
    assert done.error[: len(said)] == said
    assert done.code in (2, 3)
