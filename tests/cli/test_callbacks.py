"""Lightning's callbacks, added to a training by --trainer.callbacks+=: every callback does what its name promises."""

import json
import math
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.callbacks import EarlyStopping
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from longseq.files.storage import read_whole
from longseq.training import Classifier
from longseq.training.recovery import Sentinel

ROOT = Path(__file__).parents[2]
BATCHES = 4  # in an epoch
FIT = ["fit", "--config", ROOT / "configs/image/digits.yaml", "--experiment", "x", "--model.encoder.dim", "8"]
FIT += ["--model.encoder.depth", "1", "--model.encoder.drop_path", "0", "--trainer.enable_progress_bar", "false"]
FIT += ["--trainer.limit_train_batches", str(BATCHES), "--trainer.limit_val_batches", "1", "--trainer.max_epochs", "4"]
FIT += ["--trainer.limit_test_batches", "1"]
UNLOGGED = [*FIT, "--trainer.logger", "false"]  # drawing the pictures takes half of the time


class Step:
    """The state at the start of a training step: the learning rates, the batch size and the weights."""

    def __init__(self, model: Classifier, labels: Tensor) -> None:
        self.rates = [group["lr"] for group in model.trainer.optimizers[0].param_groups]
        self.size = len(labels)
        self.weights = {name: weight.detach().clone().double() for name, weight in model.named_parameters()}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps of a training, in order, without the trial steps in which a callback searches for a setting."""
    met: list[Step] = []
    step = Classifier.training_step

    def watched(self: Classifier, batch: Any, batch_idx: int) -> Tensor:
        if any(isinstance(callback, Sentinel) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            met.append(Step(self, batch[1]))
        return step(self, batch, batch_idx)

    monkeypatch.setattr(Classifier, "training_step", watched)
    return met


def added(name: str, **arguments: object) -> list[object]:
    flags: list[object] = [f"--trainer.callbacks+={name}"]
    for argument, value in arguments.items():
        flags += [f"--trainer.callbacks.{argument}", value]
    return flags


def ended(run: str, name: str = "last") -> dict[str, Any]:
    return read_whole(Path(f"runs/{run}/{name}.ckpt"))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def course(peak: float, num_steps: int) -> list[float]:
    """The README's schedule: the rate rises linearly over a tenth of the steps, then falls as half a cosine."""
    rise = max(1, round(num_steps / 10))
    fall = num_steps - rise
    factors = [(step + 1) / rise for step in range(rise)]
    return [peak * factor for factor in factors + [(1 + math.cos(math.pi * i / fall)) / 2 for i in range(fall)]]


def test_a_training_runs_at_the_learning_rate_that_learning_rate_finder_suggests(command: Callable, steps: list[Step]):
    finder = added("LearningRateFinder", num_training_steps=15, min_lr=1e-5, max_lr=1e-1)
    done = command(*UNLOGGED, *finder)
    assert done.code == 0, done.err
    found = ended("x/0")["hyper_parameters"]["learning_rate"]
    assert 1e-5 < found < 1e-1 and found != 2e-3
    assert [step.rates[0] for step in steps] == pytest.approx(course(found, 4 * BATCHES))
    assert not list(Path().glob(".lr_find*")), "the finder's checkpoint is left behind"
    # the search must change nothing else: not the weights, the order of the data or the optimizer
    assert command(*UNLOGGED, "--model.learning_rate", found).code == 0
    assert same(ended("x/0")["state_dict"], ended("x/1")["state_dict"])


def test_learning_rate_finder_goes_beyond_the_rates_that_a_training_bears(command: Callable, steps: list[Step]):
    finder = added("LearningRateFinder", num_training_steps=15, max_lr=1e30, early_stop_threshold="null")
    assert command(*UNLOGGED, *finder, "--model.optimizer", "sgd").code in (0, 5)
    assert steps, "a loss that is not finite ended the search and the training with it"


def test_batch_size_finder_trains_with_the_largest_batch_that_fits(
    command: Callable, steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Classifier.training_step

    def at_most_20(self: Classifier, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[1]) > 20:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(Classifier, "training_step", at_most_20)
    assert command(*UNLOGGED, *added("BatchSizeFinder", steps_per_trial=1)).code == 0
    assert [step.size for step in steps] == [16] * 4 * BATCHES
    assert [step.rates[0] for step in steps] == pytest.approx(course(2e-3, 4 * BATCHES))
    assert ended("x/0")["data"]["init_args"]["batch_size"] == 16
    assert command(*UNLOGGED, "--data.batch_size", "16").code == 0
    assert same(ended("x/0")["state_dict"], ended("x/1")["state_dict"])


def test_the_learning_rates_course_is_as_long_as_the_training_at_the_batch_size_found(
    command: Callable, steps: list[Step]
) -> None:
    """1,294 images make 21 batches of 64, or one batch that holds all of them."""
    whole = ["--trainer.limit_train_batches", "1.0", "--trainer.max_epochs", "6"]
    assert command(*UNLOGGED, *whole, *added("BatchSizeFinder", steps_per_trial=1, init_val=1024)).code == 0
    assert [step.rates[0] for step in steps] == pytest.approx(course(2e-3, 6 * math.ceil(1294 / steps[0].size)))


def test_a_scheduler_of_torch_goes_by_the_epochs_and_the_rate_that_finders_leave(
    command: Callable, steps: list[Step]
) -> None:
    halving = ["--model.schedule", "{scheduler: StepLR, step_size: 1, gamma: 0.5}"]
    whole = ["--trainer.limit_train_batches", "1.0", "--trainer.max_epochs", "3"]
    assert command(*UNLOGGED, *whole, *halving, *added("BatchSizeFinder", steps_per_trial=1, init_val=512)).code == 0
    batches = math.ceil(1294 / steps[0].size)
    expected = [2e-3 * 0.5**epoch for epoch in range(3) for _ in range(batches)]
    assert [step.rates[0] for step in steps] == pytest.approx(expected)
    steps.clear()
    finder = added("LearningRateFinder", num_training_steps=15, min_lr=1e-5, max_lr=1e-1)
    assert command(*UNLOGGED, *halving, *finder, "--model.layer_decay", "0.5").code == 0
    found = ended("x/1")["hyper_parameters"]["learning_rate"]
    assert max(steps[0].rates) == pytest.approx(found) and min(steps[0].rates) < found
    assert max(steps[-1].rates) == pytest.approx(found * 0.5**3)


def test_backbone_finetuning_trains_the_head_first_and_the_encoder_later(command: Callable, steps: list[Step]) -> None:
    finetuning = added("BackboneFinetuning", unfreeze_backbone_at_epoch=2, backbone_initial_lr=1e-4)
    assert command(*UNLOGGED, *finetuning).code == 0
    first, at_epoch_2, last = steps[0].weights, steps[2 * BATCHES].weights, ended("x/0")["state_dict"]
    for name in first:
        is_head = name.startswith("head.")
        assert torch.equal(first[name], at_epoch_2[name]) != is_head, name
        assert not torch.equal(at_epoch_2[name].float(), last[name]) or "project" in name, name
    rates = [step.rates for step in steps]
    assert [of_step[0] for of_step in rates] == pytest.approx(course(2e-3, 4 * BATCHES))
    assert [of_step[-1] for of_step in rates[2 * BATCHES : 3 * BATCHES]] == pytest.approx([1e-4] * BATCHES)
    assert [of_step[-1] for of_step in rates[3 * BATCHES :]] == pytest.approx([2e-4] * BATCHES)  # doubled every epoch


def test_early_stopping_stops_after_as_many_validations_as_its_patience(command: Callable, steps: list[Step]) -> None:
    stopping = added("EarlyStopping", monitor="val/loss", min_delta=100, patience=1)
    done = command(*UNLOGGED, *stopping)
    assert done.code == 0, done.err
    assert len(steps) == 2 * BATCHES
    assert Path("runs/x/0/metrics.json").is_file() and "test accuracy" in done.out


def test_a_training_that_a_callback_has_ended_is_not_continued_if_it_was_killed_in_its_test(
    command: Callable, steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping = added("EarlyStopping", monitor="val/loss", min_delta=100, patience=1)

    def kill(*_: object, **__: object) -> None:
        raise SystemExit(137)

    with monkeypatch.context() as patched:
        patched.setattr(pl.Trainer, "test", kill)
        assert command(*UNLOGGED, *stopping).code == 137
    assert len(steps) == 2 * BATCHES and not Path("runs/x/0/metrics.json").exists()
    done = command(*UNLOGGED, *stopping, "--resume")
    assert done.code == 0, done.err
    assert len(steps) == 2 * BATCHES and "test accuracy" in done.out
    assert command(*UNLOGGED, *stopping, "--resume", "runs/x/0").code == 0  # of a finished training, on purpose
    assert len(steps) > 2 * BATCHES


def test_a_figure_that_is_better_again_before_min_epochs_stops_no_training(
    command: Callable, steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worse in the second epoch, and better in all others: with a patience of 1 only the second could stop it."""
    losses = iter([2.0, 3.0, 1.0, 0.5])
    check = EarlyStopping._evaluate_stopping_criteria
    monkeypatch.setattr(
        EarlyStopping, "_evaluate_stopping_criteria", lambda self, _: check(self, torch.tensor(next(losses)))
    )
    stopping = added("EarlyStopping", monitor="val/loss", patience=1)
    done = command(*UNLOGGED, *stopping, "--trainer.min_epochs", "3")
    assert done.code == 0, done.err
    assert len(steps) == 4 * BATCHES


def test_timer_stops_a_training_when_its_time_is_over(
    command: Callable, steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytorch_lightning.callbacks.timer.Timer.time_elapsed", lambda *_: 20.0 * len(steps))
    done = command(*UNLOGGED, *added("Timer", duration="00:00:01:30"))
    assert done.code == 0, done.err
    assert len(steps) == 5  # the patched clock counts 20 seconds a step, so 100 seconds
    assert "test accuracy" in done.out


def test_weights_averaged_over_steps_are_those_validated_saved_and_tested(command: Callable, steps: list[Step]) -> None:
    done = command(*UNLOGGED, *added("EMAWeightAveraging", decay=0.5), "--trainer.max_epochs", "2")
    assert done.code == 0, done.err
    last = ended("x/0")
    states = [step.weights for step in steps[1:]] + [last["current_model_state"]]  # the weights after every step
    for name, expected in states[0].items():
        for state in states[1:]:
            expected = 0.5 * expected + 0.5 * state[name].double()
        torch.testing.assert_close(last["state_dict"][name].double(), expected, rtol=1e-5, atol=1e-6)
    as_tested(command, done.out, "best")


def test_until_averages_begin_the_trained_weights_are_validated_saved_and_tested(command: Callable) -> None:
    short = [*UNLOGGED, "--trainer.max_epochs", "2"]
    with pytest.warns(UserWarning, match="EMAWeightAveraging has averaged nothing"):
        done = command(*short, *added("EMAWeightAveraging", update_starting_at_step=100_000))
    assert done.code == 0, done.err
    assert command(*short).code == 0
    for name in ("best", "last"):
        assert same(ended("x/0", name)["state_dict"], ended("x/1", name)["state_dict"])
    late, without = (json.loads(Path(f"runs/x/{run}/metrics.json").read_text()) for run in (0, 1))
    assert late == without


LATE_OR_SELDOM = [
    ({"update_starting_at_step": 5}, [5, 6, 7]),
    ({"update_every_n_steps": 3}, [0, 3, 6]),
    ({"update_every_n_steps": 0, "update_starting_at_epoch": 0}, [3, 7]),
]


@pytest.mark.parametrize(("arguments", "updates"), LATE_OR_SELDOM)
def test_averages_that_begin_late_or_are_updated_seldom_are_of_the_steps_that_were_asked_for(
    arguments: dict[str, int], updates: list[int], command: Callable, steps: list[Step]
) -> None:
    done = command(*UNLOGGED, *added("EMAWeightAveraging", decay=0.5, **arguments), "--trainer.max_epochs", "2")
    assert done.code == 0, done.err
    last = ended("x/0")
    after = [step.weights for step in steps[1:]] + [last["current_model_state"]]
    for name in after[0]:
        expected = after[updates[0]][name].double()  # the first update takes the weights as they are
        for update in updates[1:]:
            expected = 0.5 * expected + 0.5 * after[update][name].double()
        torch.testing.assert_close(last["state_dict"][name].double(), expected, rtol=1e-5, atol=1e-6)


def test_stochastic_weight_averaging_tests_and_saves_the_average(command: Callable, steps: list[Step]) -> None:
    done = command(*UNLOGGED, *added("StochasticWeightAveraging", swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=1))
    assert done.code == 0, done.err
    averaged = ended("x/0", "averaged")["state_dict"]
    starts = [steps[epoch * BATCHES].weights for epoch in (1, 2, 3)]  # from the second epoch on
    for name in starts[0]:
        mean = torch.stack([at[name] for at in starts]).mean(0)
        torch.testing.assert_close(averaged[name].double(), mean, rtol=1e-5, atol=1e-6)
    assert [step.rates[0] for step in steps[2 * BATCHES :]] == pytest.approx([0.01] * 2 * BATCHES)
    as_tested(command, done.out, "averaged")
    figure = json.loads(Path("runs/x/0/metrics.json").read_text())["val/accuracy"]
    validated = command("validate", "--ckpt_path", "runs/x/0/averaged.ckpt", "--trainer.limit_val_batches", "1").out
    assert f"val accuracy:   {figure:.4f}" in validated


def as_tested(command: Callable, fitted: str, name: str) -> None:
    """A test of the checkpoint prints the same accuracy as the end of the fit."""
    figure = re.search(r"test accuracy: +([\d.]+)", fitted)
    tested = command("test", "--ckpt_path", f"runs/x/0/{name}.ckpt", "--trainer.limit_test_batches", "1").out
    assert figure and f"test accuracy:  {figure[1]}" in tested, (fitted, tested)
    assert f"{name}.ckpt" in fitted


CALLBACKS = [
    ("LearningRateFinder", {"num_training_steps": 15, "min_lr": 1e-5, "max_lr": 1e-1}),
    ("LearningRateFinder", {"num_training_steps": 15, "min_lr": 1e-5, "max_lr": 1e-1, "mode": "linear"}),
    ("BatchSizeFinder", {"steps_per_trial": 1, "max_trials": 3}),
    ("BatchSizeFinder", {"steps_per_trial": 1, "max_trials": 3, "mode": "binsearch", "init_val": 3}),
    ("BackboneFinetuning", {"unfreeze_backbone_at_epoch": 1}),
    ("BackboneFinetuning", {"unfreeze_backbone_at_epoch": 3, "should_align": "false", "initial_denom_lr": 5}),
    ("BackboneFinetuning", {"unfreeze_backbone_at_epoch": 100}),
    ("StochasticWeightAveraging", {"swa_lrs": 0.01, "swa_epoch_start": 2}),
    ("StochasticWeightAveraging", {"swa_lrs": 0.01, "swa_epoch_start": 0.7, "annealing_strategy": "linear"}),
    ("EMAWeightAveraging", {"decay": 0.5}),
    ("EMAWeightAveraging", {"decay": 0.5, "use_buffers": "false", "update_every_n_steps": 3}),
    ("EMAWeightAveraging", {"decay": 0.5, "update_every_n_steps": 0, "update_starting_at_epoch": 1}),
    ("EMAWeightAveraging", {"decay": 0.5, "update_starting_at_step": 100_000}),
    ("QuantizationAwareTraining", {"noise": 0.5}),
    ("EarlyStopping", {"monitor": "val/loss", "min_delta": 100, "patience": 2}),
    ("EarlyStopping", {"monitor": "val/loss", "min_delta": 100, "patience": 2, "check_on_train_epoch_end": "true"}),
]
ALWAYS = (9, 13, 14)
PLACES = {"training": 2 * BATCHES + 2, "validation": 4}  # after so many batches of each


@pytest.mark.parametrize(
    ("name", "arguments", "place"),
    [
        pytest.param(*each, place, marks=[] if number in ALWAYS else pytest.mark.thorough)
        for number, each in enumerate(CALLBACKS)
        for place in PLACES
    ],
)
def test_a_stopped_training_with_a_callback_goes_on_as_if_it_had_never_stopped(
    name: str, arguments: dict, place: str, command: Callable, steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = [*UNLOGGED, "--trainer.limit_val_batches", "2", *added(name, **arguments)]
    assert command(*fit).code == 0
    whole, rates = ended("x/0"), [step.rates for step in steps]
    steps.clear()
    hook, batches, stops = f"{place}_step", [0], [PLACES[place]]
    step = getattr(Classifier, hook)

    def stopped(self: Classifier, batch: Any, batch_idx: int) -> Any:
        result = step(self, batch, batch_idx)
        if any(isinstance(callback, Sentinel) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            batches[0] += self.trainer.state.fn == "fit" and not self.trainer.sanity_checking
            if batches[0] in stops:
                os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(Classifier, hook, stopped)
    assert command(*fit).code == 143
    stops.clear()
    done = command(*fit, "--resume")
    assert done.code == 0, done.err
    assert [step.rates for step in steps] == rates
    again = ended("x/1")
    for weights in ("state_dict", "current_model_state"):
        assert same(whole.get(weights, {}), again.get(weights, {}))
    assert whole["hyper_parameters"] == again["hyper_parameters"]
    assert same(ended("x/0", "best")["state_dict"], ended("x/1", "best")["state_dict"])


def test_a_callback_takes_an_argument_that_is_a_dataclass_and_a_resumed_training_has_it_too(command: Callable) -> None:
    """The theme of the bar is one; only one of its fields is given."""
    short = [*UNLOGGED, "--trainer.enable_progress_bar", "true", "--trainer.max_epochs", "1"]
    done = command(*short, *added("RichProgressBar"))
    assert done.code == 0, done.err
    done = command(*short, *added("RichProgressBar", **{"theme.progress_bar": "green"}))
    assert done.code == 0, done.err
    done = command("fit", "--resume", "runs/x/1", "--trainer.max_epochs", "2")
    assert done.code == 0, done.err
    (bar,) = yaml.safe_load(Path("runs/x/1/config.yaml").read_text())["trainer"]["callbacks"]
    assert bar["init_args"]["theme"]["progress_bar"] == "green"
    done = command(*short, *added("RichProgressBar", **{"theme.colour": "green"}))
    assert (done.code, "theme.colour: no such option" in done.error) == (2, True), done.err


def test_a_figure_in_a_checkpoints_name_makes_no_folder(command: Callable) -> None:
    saving = added("ModelCheckpoint", monitor="val/loss", dirpath="kept", filename="{epoch}-{val/loss:.2f}")
    done = command(*UNLOGGED, *saving, "--trainer.max_epochs", "1")
    assert done.code == 0, done.err
    loss = json.loads(Path("runs/x/0/metrics.json").read_text())["val/loss"]
    assert [path.name for path in Path("kept").iterdir() if path.suffix == ".ckpt"] == [
        f"epoch=0-val_loss={loss:.2f}.ckpt"
    ]
    assert not any(path.is_dir() for path in Path("kept").iterdir())


def test_inputs_are_shown_once_in_an_experiment_for_the_same_data(command) -> None:
    short = [*FIT, "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "1"]
    for flags in ([], ["--data.seed", "1"], ["--data.size", "4"]):
        assert command(*short, *flags).code == 0
    shown = {}
    for folder in Path("runs").glob("*/*/*-seed*"):
        tags = EventAccumulator(str(folder), {"images": 1}).Reload().Tags()["images"]
        shown[str(folder.parent)] = "inputs/samples" in tags
    assert shown == {"runs/x/0": True, "runs/x/1": False, "runs/x/2": True}
