"""What a simple model reaches on the splits of a training."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import numpy as np
import pytest
import torch
import yaml
from jsonargparse import Namespace
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from datamodules import Digits, Vowels
from datamodules.errors import DataError
from datamodules.inputs import InputSpec
from longseq.cli import main
from longseq.cli.runs.train_and_test import say_if_near_chance
from longseq.reports import baseline
from longseq.reports.baseline import BaselineError, fit_baseline
from longseq.tasks import SingleLabel

ROOT = Path(__file__).parents[2]
TINY = ["--model.encoder.dim", "8", "--model.encoder.depth", "1", "--trainer.logger", "false", "--experiment", "x"]
FIT = ["fit", "--config", "image/digits", *TINY, "--trainer.max_epochs", "1"]


@pytest.fixture(autouse=True)
def baselines_are_fitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(forked.BASELINES, "1")
    monkeypatch.setenv("LONGSEQ_CACHE", str(tmp_path / "cache"))


class Split:
    """A split in memory that counts how often it is read."""

    def __init__(self, inputs: Any, labels: torch.Tensor) -> None:
        self.inputs, self.labels, self.reads = inputs, labels, 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> tuple[Any, torch.Tensor]:
        self.reads += 1
        return self.inputs[indices], self.labels[indices]


class Data:
    """The part of the contract of data that a baseline needs."""

    inputs = InputSpec("images", torch.uint8, (1, 8, 8), 0, 255)

    def __init__(self, **splits: Split) -> None:
        self._splits, self.kept = splits, {}

    @property
    def identity(self) -> dict[str, int | str]:
        return {f"{name} samples": len(split) for name, split in self._splits.items()}

    def splits(self) -> dict[str, Split]:
        return self._splits

    def remember(self, what: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if what not in self.kept:
            self.kept[what] = compute()
        return self.kept[what]


def random_split(num: int, num_classes: int = 2, seed: int = 0) -> Split:
    """Images of noise, whose mean brightness tells the class."""
    labels = torch.arange(num) % num_classes
    noise = torch.rand(num, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return Split((noise * 100 + 50 * labels[:, None, None, None]).to(torch.uint8), labels)


def random_data(num: int = 40) -> Data:
    return Data(train=random_split(num), val=random_split(20, seed=1), test=random_split(30, seed=2))


def test_the_digits_have_the_accuracies_of_models_that_see_all_their_pixels() -> None:
    """The oracle of the neighbours are distances, as they are defined."""
    data = Digits()
    data.setup()
    found = fit_baseline(data)
    train, val, test = (split.__getitems__(list(range(len(split)))) for split in data.splits().values())
    accuracies = []
    for inputs, labels in (val, test):
        distances = torch.cdist(inputs.flatten(1).double(), train[0].flatten(1).double())
        nearest = train[1][distances.topk(3, largest=False).indices]
        accuracies.append(float((nearest.mode(1).values == labels).double().mean()))
    assert found is not None and found.name == "3 nearest neighbours on 8 x 8 pixels"
    assert (found.val, found.test) == pytest.approx(accuracies, abs=0.01)  # where three differ, any may win
    assert found.val == 1.0 and found.test > 0.98  # the support vector machine has 0.993 in the validation
    assert load_digits().data.shape[0] == sum(map(len, data.splits().values()))


def test_vowels_have_about_the_accuracy_of_a_regression_on_their_statistics() -> None:
    """The oracle has statistics of its own: a spectrum by NumPy, and no mel filters."""
    data = Vowels()
    data.setup()
    found = fit_baseline(data)

    def statistics(split: Any) -> np.ndarray:
        waves = split.__getitems__(list(range(len(split))))[0]["waveforms"].numpy()
        frames = np.lib.stride_tricks.sliding_window_view(waves, 256, axis=1)[:, ::128] * np.hanning(256)
        logs = np.log(np.abs(np.fft.rfft(frames)) + 1e-3)
        return np.concatenate([logs.mean(1), logs.std(1)], 1)

    train, _, test = data.splits().values()
    oracle = make_pipeline(StandardScaler(), LogisticRegression(C=0.05)).fit(statistics(train), train.labels.numpy())
    assert found is not None and found.name.endswith("on log-mel statistics")
    assert found.test == pytest.approx(oracle.score(statistics(test), test.labels.numpy()), abs=0.1)


def test_silence_behind_a_sound_changes_nothing_that_is_seen_of_it() -> None:
    clip = torch.randn(1000)
    alone, padded = clip[None], torch.cat([clip, torch.zeros(2000)])[None]

    class Clips(Split):
        def __getitems__(self, indices: list[int]) -> tuple[Any, torch.Tensor]:
            return {"waveforms": self.inputs, "lengths": torch.tensor([1000])}, self.labels

    seen = [next(baseline.features(8000, Clips(each, torch.tensor([0])))) for each in (alone, padded)]
    torch.testing.assert_close(*seen)


def test_the_test_split_chooses_nothing() -> None:
    data, other = random_data(), random_data()
    test = other.splits()["test"]
    test.labels = 1 - test.labels
    found, of_other = fit_baseline(data), fit_baseline(other)
    assert found is not None and of_other is not None
    assert found[:2] == of_other[:2] and found.test == 1 - of_other.test


def test_with_more_than_ten_thousand_samples_none_is_read() -> None:
    data = random_data(9951)
    assert fit_baseline(data) is None
    assert all(split.reads == 0 for split in data.splits().values())
    assert sum(map(len, random_data(9950).splits().values())) == baseline.MOST


def test_the_same_splits_are_read_once_and_others_again() -> None:
    data = random_data()
    first = fit_baseline(data)
    reads = [split.reads for split in data.splits().values()]
    assert fit_baseline(data) == first
    assert [split.reads for split in data.splits().values()] == reads
    data.splits()["val"] = random_split(18)
    fit_baseline(data)
    assert data.splits()["test"].reads > reads[2]


def gone(*_: Any) -> Any:
    raise DataError("a.png: no such file; check the path")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda split: setattr(split, "labels", torch.zeros(len(split), dtype=torch.int64)), "are of one class"),
        (lambda split: setattr(split, "inputs", split.inputs.float().fill_(torch.nan)), "values that are not finite"),
        (lambda split: setattr(split, "inputs", torch.rand(len(split), 12, 50)), "neither sounds nor images"),
        (lambda split: setattr(split, "inputs", type("Gone", (), {"__getitem__": gone})()), "a.png: no such file"),
    ],
)
def test_where_no_model_can_be_fitted_the_error_says_why(fault: Callable, said: str) -> None:
    data = random_data()
    fault(data.splits()["train"])
    with pytest.raises(BaselineError, match=said):
        fit_baseline(data)


def test_inputs_that_are_read_slowly_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "_SECONDS", 0.0)
    with pytest.raises(BaselineError, match="reading the inputs takes more than 0 s"):
        fit_baseline(random_data())


def test_images_that_are_all_alike_and_few_images_have_a_baseline_too() -> None:
    data = random_data(2)
    for split in data.splits().values():
        split.inputs.fill_(7)
    found = fit_baseline(data)
    assert found is not None and found.test == 0.5


@pytest.mark.parametrize(
    ("labels", "accuracy", "epochs", "line"),
    [
        (list(range(10)) * 36, 0.1, 1, "near chance after 1 epoch; this recipe needs about 30"),
        (list(range(10)) * 36, 0.125, 2.54, "near chance after 2.5 epochs; this recipe needs about 30"),
        (list(range(10)) * 36, 0.1, 30, "near chance after 30 epochs; try more --minutes"),
        (list(range(10)) * 36, 0.2, 1, ""),  # of 360, 45 are within two deviations of 36, and 72 are not
        ([0] * 90 + [1] * 10, 0.9, 1, "near chance after 1 epoch; this recipe needs about 30"),
        ([0] * 50 + [1] * 50, 0.9, 1, ""),
        ([0] * 90 + [1] * 10, 0.7, 1, ""),  # classes with weights: it is not a model that always says 0
    ],
)
def test_near_chance_is_what_the_test_cannot_tell_from_always_saying_the_most_frequent_class(
    labels: list[int], accuracy: float, epochs: float, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = {f"limit_{split}_batches": 1.0 for split in ("train", "val", "test")}
    steps = {"global_step": round(100 * epochs), "num_training_batches": 100, "accumulate_grad_batches": 1}
    trainer: Any = SimpleNamespace(**limits, **steps)
    model: Any = SimpleNamespace(task=SingleLabel(), num_classes=10)
    data = SimpleNamespace(splits=lambda: {"test": Split(None, torch.tensor(labels))})
    settings = Namespace(grow=None, config=[ROOT / "configs/image/digits.yaml", ROOT / "configs/trainer/cpu.yaml"])
    say_if_near_chance(trainer, model, data, accuracy, settings)
    assert capsys.readouterr().out.strip() == line
    trainer.limit_train_batches = 2  # a trial of a few batches
    say_if_near_chance(trainer, model, data, accuracy, settings)
    assert capsys.readouterr().out == ""


def test_fit_prints_a_baseline_and_says_that_it_is_ahead(command, tmp_path: Path) -> None:
    done = command(*FIT)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("baseline: "))
    accuracy = float(lines[at - 3].removeprefix("test accuracy:"))
    assert lines[at - 1].strip() == "near chance after 1 epoch; this recipe needs about 30"
    form = r"baseline:      (0\.\d{4}) by 3 nearest neighbours on 8 x 8 pixels \(\d+\.\d s\)"
    (figure,) = re.fullmatch(form, lines[at]).groups()
    assert float(figure) > 0.98 > accuracy  # an epoch of this small model
    assert "it is ahead of the trained model; try more --minutes, pretrained weights" in lines[at + 1]
    assert lines[at + 2].startswith("checkpoint: ")
    run = tmp_path / "runs/x/0"
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["baseline/test/accuracy"] == pytest.approx(float(figure), abs=1e-4)
    card = (run / "README.md").read_text()
    assert f"has a test accuracy of {figure} (validation {metrics['baseline/val/accuracy']:.4f})." in card
    assert f"| baseline test accuracy | {figure} |" in card

    again = command("fit", "--resume", run)  # nothing is left to train; the card has the baseline again
    assert again.code == 0 and lines[at] in again.out, again.err
    assert "near chance after 1 epoch" in again.out
    assert json.loads((run / "metrics.json").read_text()) == metrics

    without = command(*FIT, "--baseline", "false")
    assert without.code == 0 and "baseline" not in without.out
    assert "baseline" not in (tmp_path / "runs/x/1/metrics.json").read_text()
    assert "Baseline:" not in (tmp_path / "runs/x/1/README.md").read_text()


@pytest.mark.parametrize(
    "flags",
    [
        ["--trainer.limit_test_batches", "0"],
        ["--trainer.limit_test_batches", "1"],
        ["--trainer.limit_train_batches", "0.5"],
        ["--model.task", "MultiLabel"],
        ["--model.task", "Masked"],
    ],
)
def test_a_part_of_the_splits_or_another_task_has_no_baseline(flags: list[str], command) -> None:
    done = command(*FIT, "--trainer.max_steps", "1", *flags)
    assert done.code == 0 and "baseline" not in done.out, done.err


def test_a_training_whose_baseline_cannot_be_fitted_has_ended_well(command, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(baseline, "_SECONDS", 0.0)
    done = command(*FIT, "--trainer.max_steps", "1")
    assert done.code == 0 and "baseline:      none: reading the inputs takes more than 0 s\n" in done.out, done.err
    assert "baseline" not in (tmp_path / "runs/x/0/metrics.json").read_text()


def test_a_model_that_is_ahead_gets_no_advice(command) -> None:
    done = command(*FIT, "--trainer.max_steps", "1", "--data.val_fraction", "0.99")
    assert "baseline: " in done.out, done.err
    worse = baseline.Baseline("chance", 0.0, 0.0, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longseq.cli.runs.train_and_test.fit_baseline", lambda *_: worse)
        done = command(*FIT, "--trainer.max_steps", "1")
    assert "0.0000 by chance (0.0 s)\ncheckpoint:" in done.out, done.err


def test_each_fold_has_its_baseline_and_the_table_their_mean(command, tmp_path: Path) -> None:
    done = command(*FIT, "--trainer.max_steps", "1", "--folds", "2")
    assert done.code == 0, done.err
    assert done.out.count("\nbaseline: ") == 2 and "| baseline test accuracy |" in done.out


def test_a_training_that_grows_has_one_baseline_at_its_last_size(command) -> None:
    done = command(*FIT, "--trainer.max_steps", "1", "--grow", "8:1,16:1")
    assert done.code == 0, done.err
    assert done.out.count("test accuracy:") == 2 and done.out.count("baseline: ") == 1
    assert "16 x 16 pixels" in done.out.split("test accuracy:")[2]


def test_the_runs_of_a_sweep_have_none(command, monkeypatch, tmp_path: Path) -> None:
    def run_python(option: str, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        main([*arguments])  # in this process
        return subprocess.CompletedProcess(arguments, 0)

    monkeypatch.setattr("longseq.reports.sweep.run_python", run_python)
    flags = ["--trainer.max_steps", "1", "--model.encoder.dim", "8", "--model.encoder.depth", "1"]
    done = command("sweep", "--config", "image/digits", "--grid", "model.encoder.attention.k=4", "--seeds", "1", *flags)
    assert done.code == 0, done.err
    (run,) = (tmp_path / "sweep/runs").glob("*/0")
    assert "test/accuracy" in (metrics := json.loads((run / "metrics.json").read_text()))
    assert not any(name.startswith("baseline") for name in metrics)
    assert yaml.safe_load((run / "config.yaml").read_text())["baseline"] is False
