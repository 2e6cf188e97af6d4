"""Trainings whose end is a time, with a clock that only the tests move: a step takes a second."""

import json
import re
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from several_runs import killed_in

from longseq.cli import before_torch
from longseq.files.storage import read_whole
from longseq.training import Classifier, timed
from longseq.training.mix import MixUp

ROOT = Path(__file__).parents[2]
SMALL = ["--model.encoder.dim", "8", "--model.encoder.depth", "1", "--trainer.logger", "false", "--experiment", "x"]
FIT = ["fit", "--config", str(ROOT / "configs/image/digits.yaml"), *SMALL]
STEP, VALIDATION, TEST = 1.0, 0.5, 0.25  # seconds of a batch


class Course:
    """What happens in a training.

    Attributes:
        rates: The learning rate of each step.
        validated: The steps after which there was a validation.
        compiling: Seconds that torch compiles in a step, by its number, from 1.
        recording: Seconds more that a step takes, such as to record a CUDA graph.
        compiling_validation: Seconds that torch compiles in the first validation.
    """

    def __init__(self) -> None:
        self.passed = 0.0
        self.compiled = 0.0
        self.compiling: dict[int, float] = {}
        self.recording: dict[int, float] = {}
        self.compiling_validation = 0.0
        self.rates: list[float] = []
        self.validated: list[int] = []


@pytest.fixture
def course(monkeypatch: pytest.MonkeyPatch) -> Course:
    began, seen = time.monotonic(), Course()
    monkeypatch.setattr(timed, "clock", lambda: began + seen.passed)
    monkeypatch.setattr(timed, "seconds_of_compilations", lambda: seen.compiled)
    # also where a command begins: on a busy machine seconds lie between two commands of a test
    monkeypatch.setattr(before_torch, "time", SimpleNamespace(monotonic=lambda: began))
    for name, seconds in (("training_step", STEP), ("validation_step", VALIDATION), ("test_step", TEST)):
        monkeypatch.setattr(Classifier, name, _slow(getattr(Classifier, name), seconds, seen))
    return seen


def _slow(step: Callable[..., Any], seconds: float, seen: Course) -> Callable[..., Any]:
    def slow(self: Classifier, batch: Any, batch_idx: int) -> Any:
        if not self.trainer.sanity_checking:
            seen.passed += seconds
        compiling = 0.0
        if self.trainer.training and seconds == STEP:
            step_number = len(seen.rates) + 1
            compiling = seen.compiling.get(step_number, 0.0)
            seen.passed += seen.recording.get(step_number, 0.0)
            seen.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        elif self.trainer.validating and self.trainer.global_step not in seen.validated:
            compiling = 0.0 if seen.validated else seen.compiling_validation
            seen.validated.append(self.trainer.global_step)
        seen.passed, seen.compiled = seen.passed + compiling, seen.compiled + compiling
        return step(self, batch, batch_idx)

    return slow


def test_a_training_of_minutes_ends_on_time_with_its_schedule_completed_and_its_last_step_validated(
    course: Course, command: Callable[..., Any]
) -> None:
    assert command(*FIT, "--minutes", "2", "--model.learning_rate", "1e-3").code == 0
    assert 115 < course.passed <= 120
    peak = course.rates.index(max(course.rates))
    assert course.rates[peak] == pytest.approx(1e-3, rel=0.05)
    assert course.rates[: peak + 1] == sorted(course.rates[: peak + 1])
    assert all(later <= 1.001 * rate for rate, later in pairwise(course.rates[peak:]))
    assert course.rates[-1] < 0.005 * 1e-3
    assert course.validated[-1] == len(course.rates) == read_whole(Path("runs/x/0/last.ckpt"))["global_step"]
    assert "val/accuracy" in json.loads(Path("runs/x/0/metrics.json").read_text())
    card = Path("runs/x/0/README.md").read_text()
    assert f"In these 2 minutes it had {len(course.rates)} steps, {len(course.rates) / 21:.1f} epochs." in card


def test_a_long_training_validates_20_times_at_most(course: Course, command: Callable[..., Any]) -> None:
    flags = ["--trainer.limit_train_batches", "1", "--trainer.limit_val_batches", "1"]
    assert command(*FIT, *flags, "--trainer.limit_test_batches", "1", "--minutes", "3").code == 0
    assert len(course.rates) > 150
    assert 15 <= len(course.validated) <= 28  # the 8 before the plan too


@pytest.mark.parametrize(("minutes", "is_mixed"), [("1", False), ("3", True)])
def test_samples_are_mixed_only_in_a_training_of_a_hundred_epochs_or_more(
    minutes: str, is_mixed: bool, course: Course, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed: list[int] = []
    plain = MixUp.__call__
    monkeypatch.setattr(MixUp, "__call__", lambda self, *batch: mixed.append(len(course.rates)) or plain(self, *batch))
    flags = ["--trainer.limit_train_batches", "1", "--trainer.limit_val_batches", "1"]
    flags += ["--trainer.limit_test_batches", "1", "--model.mix", "longseq.training.MixUp", "--minutes", minutes]
    result = command(*FIT, *flags)
    assert result.code == 0
    assert ("too few for MixUp" in result.out) is not is_mixed
    assert (len(mixed) > 100) is is_mixed
    assert not is_mixed or mixed == list(range(mixed[0], len(course.rates) + 1))  # from the plan on, in every step


@pytest.mark.parametrize("compiled", [True, False])
def test_the_epochs_are_estimated_from_steps_that_do_not_compile(
    compiled: bool, course: Course, command: Callable[..., Any]
) -> None:
    """Clips of several lengths compile in many of the first steps, and CUDA graphs are recorded in a few."""
    if compiled:
        course.compiling = {step: 20.0 for step in (1, 3, 4, 6, 7, 8)}
    else:
        course.recording = {step: 20.0 for step in (1, 4, 6)}
    result = command(*FIT, "--minutes", "8")
    assert result.code == 0
    estimated = float(re.search(r"minutes     8: about (\S+) epochs", result.out)[1])  # type: ignore[index]
    assert estimated == pytest.approx(len(course.rates) / 21, rel=0.15)


def test_a_first_validation_that_compiles_does_not_end_a_training(course: Course, command: Callable[..., Any]) -> None:
    course.compiling_validation = 45.0  # twice as much for the last validation and the test would leave no time
    assert command(*FIT, "--minutes", "2").code == 0
    assert 115 < course.passed <= 120
    assert len(course.rates) > 50 and len(course.validated) > 1


def test_a_step_that_compiles_is_not_taken_for_the_length_of_the_next_one(
    course: Course, command: Callable[..., Any]
) -> None:
    course.compiling = {60: 30.0}
    assert command(*FIT, "--minutes", "2").code == 0
    assert 113 < course.passed <= 120


def test_a_training_whose_only_validation_compiles_ends_on_time(course: Course, command: Callable[..., Any]) -> None:
    course.compiling, course.compiling_validation = {1: 25.0}, 20.0
    assert command(*FIT, "--minutes", "1.1", "--trainer.num_sanity_val_steps", "0").code == 0
    assert len(course.validated) == 1
    assert course.passed <= 66


def test_a_resumed_training_has_the_minutes_that_are_left(
    course: Course, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        killed_in(50, patch)
        assert command(*FIT, "--minutes", "2").code == 143
    before, rate = course.passed, course.rates[-1]
    course.passed = 0.0  # the clock of the second command
    assert command(*FIT, "--minutes", "2", "--resume").code == 0
    assert course.rates[50] == pytest.approx(rate, rel=0.05)
    assert 115 < before + course.passed <= 120
    assert course.rates[-1] < 0.005 * max(course.rates)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_training_that_was_killed_in_its_test_is_not_trained_further(
    course: Course, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "test_step", _interrupt)
        assert command(*FIT, "--minutes", "1").code == 130
    steps = len(course.rates)
    assert command(*FIT, "--minutes", "1", "--resume").code == 0
    assert len(course.rates) == steps
    assert "test/accuracy" in json.loads(Path("runs/x/0/metrics.json").read_text())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--minutes", "0"], "error: minutes: must be positive and at most a million, got 0.0; 10 is a start"),
        (["--minutes", "1", "--grow", "4:1,8:1"], "error: minutes: not together with --grow"),
        (["--minutes", "1", "--trainer.min_epochs", "3"], "error: trainer.min_epochs: not together with --minutes"),
        (
            ["--minutes", "1", "--model.schedule", "{scheduler: StepLR, step_size: 10}"],
            "error: model.schedule: must be",
        ),
    ],
)
def test_what_counts_epochs_does_not_go_with_minutes(flags: list[str], said: str, command: Callable[..., Any]) -> None:
    result = command(*FIT, *flags)
    assert result.code == 2
    assert result.err.startswith(said)
    assert result.err.count("\n") == 1


def test_a_training_whose_minutes_are_over_before_its_first_step_has_one_step(
    course: Course, command: Callable[..., Any]
) -> None:
    course.passed = 100.0
    assert command(*FIT, "--minutes", "1").code == 0
    assert len(course.rates) == 1
    assert Path("runs/x/0/best.ckpt").exists()


@pytest.mark.thorough
def test_two_processes_end_together(train_py: Callable[..., Any], tmp_path: Path) -> None:
    done = train_py(*FIT, "--minutes", "0.4", "--trainer.devices", "2", "--trainer.strategy", "ddp")
    assert done.returncode == 0 and "test accuracy: " in done.stdout
    assert done.stdout.count("minutes     0.4: about ") == 1
