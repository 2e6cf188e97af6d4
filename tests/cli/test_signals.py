"""SIGTERM ends every command with code 143 and Ctrl-C with 130, whatever the command is doing."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from PIL import Image

import datamodules
from longseq.cli import settings
from longseq.training import Classifier, classifier
from longseq.training.recovery import Sentinel

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "configs/image/digits.yaml")
FIT = [
    "fit", "--config", DIGITS, "--model.encoder.dim", "8", "--model.encoder.depth", "1", "--trainer.max_steps", "2",
    "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1", "--trainer.enable_progress_bar", "false",
]  # fmt: skip
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


@pytest.fixture(autouse=True)
def handlers_of_its_own() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in CODES}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes background jobs ignore SIGINT
    yield
    for number, handler in before.items():
        signal.signal(number, handler)  # Lightning leaves SIGINT ignored after a Ctrl-C


@pytest.fixture(autouse=True)
def cache_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Figures that an earlier test has kept would not be computed, and no signal sent."""
    monkeypatch.setenv("LONGSEQ_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    forked.run(ROOT / "train.py", *FIT, cwd=folder).check_returncode()
    Image.new("L", (8, 8)).save(folder / "image.png")
    return folder / "runs/digits/0/last.ckpt"


def sends(number: int, then: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any, **keywords: Any) -> Any:
        os.kill(os.getpid(), number)
        return then(*arguments, **keywords)

    return called


MOMENTS = {
    "fit, while the parts are built": (FIT, settings, "refuse_missing_devices"),
    "fit, while the data is set up": (FIT, datamodules.Digits, "load"),
    "fit, while the model starts from the data": (FIT, classifier, "start_from_data"),
    "fit, in the check of the validation, behind Lightning's handler": (FIT, Classifier, "validation_step"),
    "fit, before the first step": (FIT, Sentinel, "on_train_start"),
    "fit, in the test": (FIT, Classifier, "test_step"),
    "test": (["test", "--ckpt_path", "CHECKPOINT"], Classifier, "test_step"),
    "predict": (["predict", "--ckpt_path", "CHECKPOINT", "--input", "IMAGE"], Classifier, "predict_step"),
    "check": (["check", "--data", "Digits"], datamodules.Digits, "load"),
    "stats": (["stats", "--data", "Digits"], datamodules.Digits, "figures"),
    "a report": (["spectrum", "--ckpt_path", "CHECKPOINT"], datamodules.Digits, "load"),
}


# longseq's SIGTERM is a KeyboardInterrupt too: Ctrl-C is tried where another library could treat it in another way
INTERRUPTED = [moment for moment in MOMENTS if moment.endswith(("built", "handler", "report")) or moment == "test"]


@pytest.mark.parametrize(
    ("number", "moment"),
    [*((signal.SIGTERM, moment) for moment in MOMENTS), *((signal.SIGINT, moment) for moment in INTERRUPTED)],
)
def test_a_signal_ends_a_command_at_any_moment(
    number: signal.Signals, moment: str, command: Callable, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, kind, name = MOMENTS[moment]
    given = {"CHECKPOINT": checkpoint, "IMAGE": checkpoint.parents[3] / "image.png"}
    monkeypatch.setattr(kind, name, sends(number, getattr(kind, name)))
    done = command(*(given.get(argument, argument) for argument in arguments))
    assert done.code == CODES[number], done.err
    assert done.error == f"{number.name}: stopped; start it again (a training with --resume)"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_end"])
def test_a_signal_in_a_training_is_answered_when_it_is_saved(
    hook: str, command: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a signal that comes after the last epoch was saved and before the training ends."""
    with monkeypatch.context() as patch:
        patch.setattr(Sentinel, hook, sends(signal.SIGTERM, getattr(Sentinel, hook)))
        done = command(*FIT)
    assert done.code == 143, done.err
    assert re.match(r"SIGTERM: saved runs/digits/0/last.ckpt after step \d; go on with --resume", done.error)
    assert command("fit", "--resume", "runs/digits/0").code == 0


def test_a_signal_that_comes_where_python_goes_on_ends_the_command_too(
    command: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finalizer:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)  # Python prints an exception from __del__ and goes on

    monkeypatch.setattr(datamodules.Digits, "figures", lambda *_: Finalizer() and {})
    done = command("stats", "--data", "Digits")
    assert done.code == 143
    assert done.err.strip().endswith("SIGTERM: stopped; start it again (a training with --resume)")
