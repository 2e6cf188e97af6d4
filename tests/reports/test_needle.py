"""Accuracy against duration: the figures of the table, the windows, and what is refused."""

import csv
import importlib
from pathlib import Path

import pytest
import torch
from small_sets import SMALL

from datamodules import Needles
from longseq.arguments import SettingError
from longseq.reports.interval import wilson
from longseq.reports.needle import _false_alarms, answer, draw, threshold
from longseq.tasks import Masked, SingleLabel

module = importlib.import_module("longseq.reports.needle")

FIT = ["fit", "--config", "audio/needles", "--data.num_train", "20", "--data.num_test", "10", "--data.seconds", "3",
       "--data.shortest", "2.5", "--data.batch_size", "10", "--model.encoder.dim", "16", "--model.encoder.depth", "1",
       "--trainer.max_epochs", "1", "--trainer.accelerator", "cpu"]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("needles")
    with pytest.MonkeyPatch.context() as patch:
        SMALL[Needles](folder, patch)
    return folder


@pytest.fixture(scope="module")
def checkpoint(root: Path) -> Path:
    from longseq.cli import main

    main([*FIT, "--data.root", str(root), "--trainer.default_root_dir", str(root)])
    return root / "runs/needles/0/best.ckpt"


def table(folder: Path) -> list[dict[str, str]]:
    with open(folder / "table.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_model_that_predicts_no_classes_is_refused(checkpoint: Path, monkeypatch) -> None:
    model, data = module.model_and_data(str(checkpoint))
    model.task = Masked()
    monkeypatch.setattr(module, "model_and_data", lambda *_: (model, data))
    with pytest.raises(SettingError, match=r"Masked predicts no classes; train from it"):
        module.needle(str(checkpoint), seconds=[3.0], trials=1)


def test_the_table_has_a_row_for_each_duration_and_way_of_hearing(
    command, checkpoint: Path, monkeypatch, tmp_path: Path
) -> None:
    drawn = []
    monkeypatch.setattr(module, "draw", lambda *rows: drawn.append(draw(*rows)) or drawn[-1])
    flags = ["--seconds", "20", "3", "--trials", "10", "--window", "2", "--out", tmp_path]
    done = command("needle", "--ckpt_path", checkpoint, *flags)
    assert done.code == 0, done.err
    rows = table(tmp_path)
    assert [(row["seconds"], row["heard"], row["tokens"], row["trials"]) for row in rows] == [
        ("3", "as one sequence", "301", "10"),
        ("3", "in windows of 2 s", "301", "10"),
        ("20", "as one sequence", "2001", "10"),
        ("20", "in windows of 2 s", "2001", "10"),
    ]
    for row in rows:
        low, high = map(float, row["95 % interval"].split(" to "))
        assert float(row["accuracy"]) == int(row["right"]) / 10 and low <= float(row["accuracy"]) <= high
        assert float(row["seconds a pass"]) > 0 and float(row["peak GiB"]) > 0.1
    assert "Verma(k=None" in (tmp_path / "table.md").read_text()
    with open(tmp_path / "trials.csv", newline="") as file:
        trials = list(csv.DictReader(file))
    for row in rows:
        of_way = [trial for trial in trials if (trial["seconds"], trial["heard"]) == (row["seconds"], row["heard"])]
        assert [trial["trial"] for trial in of_way] == [str(number) for number in range(10)]
        assert [trial["class"] for trial in of_way] == list("0123456789")  # every digit equally often
        assert sum(trial["class"] == trial["answer"] for trial in of_way) == int(row["right"])
    assert (tmp_path / "needle.png").read_bytes().startswith(b"\x89PNG")
    assert drawn[0].axes[0].get_title("left") == "Needles: digit, 15 dB"
    whole, windows, chance = drawn[0].axes[0].lines
    for line, first in ((whole, 0), (windows, 1)):
        assert list(line.get_xdata()) == [3, 20]
        assert list(line.get_ydata()) == [float(row["accuracy"]) for row in rows[first::2]]
    assert [line.get_label() for line in (whole, windows)] == ["heard as one sequence", "heard in windows of 2 s"]
    assert set(chance.get_ydata()) == {0.1}
    # without windows the model hears the same
    flags = ["--seconds", "3", "--trials", "10", "--out", tmp_path]
    assert command("needle", "--ckpt_path", checkpoint, *flags).code == 0
    assert [row["right"] for row in table(tmp_path)] == [rows[0]["right"]]


def test_a_model_of_bounded_clips_is_refused_and_hears_windows(command, root: Path, tmp_path: Path) -> None:
    change = ["--model.encoder.any_length", "false", "--trainer.default_root_dir", tmp_path]
    assert command(*FIT, "--data.root", root, *change).code == 0
    flags = ["--ckpt_path", tmp_path / "runs/needles/0/best.ckpt", "--seconds", "9", "--trials", "3", "--out", tmp_path]
    done = command("needle", *flags)
    assert done.code == 2 and "clips of 3 s are its longest; give --window 3, or train with any_length" in done.err
    done = command("needle", *flags, "--window", "3")
    assert done.code == 0, done.err
    assert [row["heard"] for row in table(tmp_path)] == ["in windows of 3 s"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--trials", "0"], "trials: must be positive, got 0"),
        (["--seconds", "0", "5"], "seconds: must be positive, got 0"),
        (["--empty_hours", "0"], "empty_hours: must be positive, got 0"),
        (["--found", "1.2"], "found: must be in 0..1, more than 0, got 1.2"),
        (["--window", "-1"], "window: must be positive, got -1"),
    ],
)
def test_a_wrong_number_is_one_line(command, checkpoint: Path, flags: list[str], said: str) -> None:
    done = command("needle", "--ckpt_path", checkpoint, *flags)
    assert done.code == 2 and said in done.err and done.err.count("\n") == 1


def test_several_digits_are_trained_as_several_labels_and_have_no_single_answer(
    command, root: Path, tmp_path: Path
) -> None:
    several = ["--data.question", "digits", "--data.shortest", "3.5", "--data.seconds", "4"]
    done = command(
        *FIT, *several, "--model.task", "MultiLabel", "--data.root", root, "--trainer.default_root_dir", tmp_path
    )
    assert done.code == 0 and "average_precision" in (tmp_path / "runs/needles/0/metrics.json").read_text()
    done = command("needle", "--ckpt_path", tmp_path / "runs/needles/0/best.ckpt", "--out", tmp_path)
    assert done.code == 3 and "question: digits has recordings of several classes" in done.err
    assert done.err.count("\n") == 1


def test_no_duration_is_one_line(command) -> None:
    done = command("needle", "--ckpt_path", "no.ckpt", "--seconds", "[]")
    assert (done.code, done.error) == (
        2,
        "error: seconds: must hold one number or more, got []; the defaults are a start",
    )


def test_data_without_recordings_of_any_duration_is_refused(command, tmp_path: Path) -> None:
    small = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "1", "--model.encoder.dim", "16"]
    fitted = command("fit", "--config", "image/digits", *small, "--trainer.default_root_dir", tmp_path)
    assert fitted.code == 0, fitted.err
    done = command("needle", "--ckpt_path", tmp_path / "runs/digits/0/best.ckpt")
    assert done.code == 4 and "was trained on Digits" in done.err and done.err.count("\n") == 1


class Loudest:
    """Says class 1, as surely as the input is loud, where a loud sample is in it, and else class 0 with little."""

    task = SingleLabel()

    def __call__(self, inputs):
        loud = inputs["waveforms"].amax(1)
        return torch.stack([torch.full_like(loud, 0.4), loud], dim=1)


@pytest.mark.parametrize("place", [0, 39, 40, 99, 123])
@pytest.mark.parametrize("samples", [124, 130, 200])
def test_windows_leave_no_sample_out(place: int, samples: int) -> None:
    waveform = torch.zeros(samples)
    assert answer(Loudest(), waveform, 40) == 0
    waveform[place] = 0.9
    assert answer(Loudest(), waveform, 40) == 1


class Surest(Loudest):
    """Says class 0 where nothing is loud, with a probability of 0.999, and class 1 at the loud sample with 0.982."""

    def __call__(self, inputs):
        loud = inputs["waveforms"].amax(1) > 0.5
        return torch.where(loud[:, None], torch.tensor([6.0, 10.0]), torch.tensor([2.0, -5.0]))


def test_windows_are_combined_by_the_highest_score_and_not_by_the_highest_probability() -> None:
    waveform = torch.zeros(200)
    waveform[99] = 0.9
    assert answer(Surest(), waveform, 40) == 1


class Levels:
    """A validation split whose samples hold their loudest samples at these levels, all of class 1."""

    def __init__(self, *levels: float) -> None:
        self.levels, self.labels = levels, torch.ones(len(levels), dtype=torch.long)

    def __len__(self) -> int:
        return len(self.levels)

    def sample(self, index: int) -> torch.Tensor:
        return torch.full((100,), self.levels[index])

    def empty_recording(self, seconds: float, trial: int) -> torch.Tensor:
        """One loud sample, at 75 of 124: in the windows from 40, and from 60 on, of 40 samples."""
        waveform = torch.zeros(124)
        waveform[75] = self.levels[trial]
        return waveform


def test_nine_of_ten_of_the_validation_are_right_at_the_threshold() -> None:
    levels = [0.5 + 0.04 * number for number in range(10)]
    assert threshold(Loudest(), Levels(*levels), 40, "cpu") == pytest.approx(levels[1])
    assert threshold(Loudest(), Levels(*levels), None, "cpu") == pytest.approx(levels[1])
    assert threshold(Loudest(), Levels(*levels), None, "cpu", 0.6) == pytest.approx(levels[4])
    # the others are wrong: Loudest answers 0 below 0.4
    assert threshold(Loudest(), Levels(0.1, *levels[1:]), None, "cpu") == pytest.approx(levels[1])
    assert threshold(Loudest(), Levels(0.1, 0.2, *levels[2:]), None, "cpu") is None


def test_false_alarms_are_recordings_or_windows_without_digits_at_the_threshold_or_above() -> None:
    data = Levels(0.9, 0.1, 0.7, 0.1)  # four recordings of 1,800 s
    assert _false_alarms(Loudest(), data, 1800.0, 2.0, None, 0.7 - 1e-6, "cpu") == ["0.700", 2, "2", "1"]
    assert _false_alarms(Loudest(), data, 1800.0, 2.0, 40, 0.7 - 1e-6, "cpu") == ["0.700", 4, "2", "2"]
    assert _false_alarms(Loudest(), data, 1800.0, 1.2, None, 0.8, "cpu") == ["0.800", 1, "1.5", "0.667"]
    assert _false_alarms(Loudest(), data, 1800.0, 2.0, None, None, "cpu") == ["none", "", "2", ""]


def test_needle_reports_false_alarms_of_recordings_and_of_windows(
    checkpoint: Path, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "threshold", lambda *_: -100.0)  # so that everything is an alarm
    module.needle(str(checkpoint), seconds=[20.0], trials=1, window=2, empty_hours=0.02, out=str(tmp_path))
    for row, alarms in zip(table(tmp_path), (4, 4 * 19), strict=True):
        assert row["threshold"] == "-100.000" and int(row["false alarms"]) == alarms
        assert float(row["hours without digits"]) == pytest.approx(80 / 3600, rel=1e-4)
        assert float(row["false alarms an hour"]) == pytest.approx(alarms * 45, rel=1e-2)


def test_questions_about_several_digits_have_no_false_alarms(checkpoint: Path, monkeypatch, tmp_path: Path) -> None:
    model, data = module.model_and_data(str(checkpoint))
    data.question = "same"
    monkeypatch.setattr(module, "model_and_data", lambda *_: (model, data))
    with pytest.raises(ValueError, match=r"^empty_hours must be left out for the question same; only digit has"):
        module.needle(str(checkpoint), seconds=[3.0], trials=1, empty_hours=1.0, out=str(tmp_path))


def test_the_interval_is_wilsons() -> None:
    # Newcombe (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29
    for right, trials, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson(right, trials) == pytest.approx((low, high), abs=2e-4)
