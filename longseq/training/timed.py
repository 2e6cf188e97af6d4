"""A training of a given number of minutes: its schedule follows the clock, and is complete when the time is over."""

import math
import time
from itertools import pairwise
from statistics import median
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist

from longseq.arguments import SettingError
from longseq.compat.lightning import is_accumulating
from longseq.compat.torch import seconds_of_compilations
from longseq.training.classifier import Classifier

clock = time.monotonic

# MixUp helps if the model sees each sample so often that it would memorise it; with fewer epochs it costs accuracy.
_EPOCHS_TO_MIX = 100
_MOST_VALIDATIONS = 20
_MEASURED_STEPS = 8  # the first one allocates; some may be slower than others, such as those that record CUDA graphs
_AFTERWARDS = 4.0  # seconds for the last plots and the model card


class Timed(pl.Callback):
    """End a training and its test a given number of minutes after the command began, with a complete schedule.

    The learning rate follows the time, not the steps. The first steps give an estimate of the number of epochs. It
    decides how often the training validates, and whether it mixes samples (only with 100 epochs or more). A resumed
    training has the minutes that are left. Two such trainings have different results: the machine's speed varies.

    Args:
        minutes: From the beginning of the command to its end.
        began: When it began, on time.monotonic's clock.
    """

    def __init__(self, minutes: float, began: float) -> None:
        super().__init__()
        self.minutes = minutes
        self._began = began
        self._evaluation = 0.0  # seconds that the last validation took
        self._of_sample = 0.0  # seconds that a sample takes without gradients
        self._validating = 0.0  # seconds of all validations
        self._total = 1.0  # seconds of the schedule
        self._samples = (1, 0)  # of the validation split and of the test split
        self._epochs: float | None = None  # the estimated number; None until there is one
        self._is_mixed = True
        self._mix: Any = None
        self._progress = 0.0
        self._steps: list[float] = []  # when the first steps began, on the clock of steps without validations
        self._last = 0.0  # when the last step began, on the clock of steps
        self._validation_began = 0.0
        self._compiled = 0.0  # seconds of compilations before the last step
        self._compilation = 0.0  # seconds that the longest compilation of a step took
        self._has_validated = False  # in this process
        self._group: Any = None

    @property
    def seconds(self) -> float:
        """How long the training has taken, including the time before a resume."""
        return clock() - self._began

    @property
    def _of_steps(self) -> float:
        """The clock of steps, which stops while torch compiles: later steps and validations seldom compile."""
        return self.seconds - seconds_of_compilations()

    def progress(self) -> float:
        """The share of the schedule that is done, from 0 to 1."""
        return self._progress

    def setup(self, trainer: pl.Trainer, pl_module: Classifier, stage: str) -> None:
        if stage != "fit":
            return
        if not isinstance(pl_module.schedule, str):
            what = f"must be a name, got {pl_module.schedule}, which counts steps"
            raise SettingError(f"model.schedule: {what}; choose cosine, or leave --minutes out")
        pl_module.progress = self.progress
        self._mix = pl_module.mix

    def on_train_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        if trainer.world_size > 1:
            self._group = dist.new_group(backend="gloo")  # ranks agree on the CPU, so nobody waits for a device
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        splits = data.splits()
        self._samples = max(len(splits["val"]), 1), len(splits["test"])
        if self._epochs is None:
            pl_module.mix = None
        else:
            self._apply_plan(trainer, pl_module)
        self._last, self._compiled = 0.0, seconds_of_compilations()
        self._measure()
        if self._progress == 1 and trainer.global_step:  # only the last validation or the test is missing
            self._end(trainer)

    def _of_slowest(self, value: float) -> float:
        """The highest value of all ranks. With different values, ranks would have different learning rates, and would
        wait for each other in different validations."""
        if self._group is None:
            return value
        shared = torch.tensor(value)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group)
        return float(shared)

    def _measure(self) -> None:
        """Update the progress from the clock."""
        now, of_steps, compiled = self.seconds, self._of_steps, seconds_of_compilations()
        step = of_steps - self._last if self._last else 0.0
        self._compilation = max(self._compilation, compiled - self._compiled)
        self._last, self._compiled = of_steps, compiled
        tested = self._evaluation + max(self._samples[1] - self._samples[0], 0) * self._of_sample
        left = _AFTERWARDS + self._evaluation + tested
        if not self._has_validated:  # the first validation compiles too, and not longer than a step with its gradients
            left += self._compilation
        self._total = max(60 * self.minutes - left, 1e-9)
        done = self._of_slowest((now + step) / self._total)  # at the end of the step
        self._progress = min(max(done, 0.0), 1.0)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Classifier, batch: Any, batch_idx: int) -> None:
        self._measure()
        if self._epochs is None:
            self._steps.append(self._last - self._validating)
            if len(self._steps) > _MEASURED_STEPS or self._progress == 1:
                self._plan(trainer, pl_module)

    def _plan(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        """Estimate the number of epochs, and decide what depends on it."""
        measured = [later - earlier for earlier, later in pairwise(self._steps[1:])]
        of_batch = median(measured) if measured else 0.0
        batches = math.inf if of_batch <= 0 else (1 - self._progress) * self._total / of_batch
        self._epochs = self._of_slowest(batches / max(trainer.num_training_batches, 1))
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        # not batch_size, because batches may have fewer samples
        loader: Any = trainer.train_dataloader
        of_all_ranks = len(data.splits()["train"]) / max(len(loader), 1)
        self._of_sample = of_batch / (2 * of_all_ranks)
        self._evaluation = self._evaluation or self._samples[0] * self._of_sample
        self._is_mixed = self._epochs >= _EPOCHS_TO_MIX
        self._apply_plan(trainer, pl_module)
        if trainer.is_global_zero and math.isfinite(self._epochs):
            mixing = "" if self._mix is None or self._is_mixed else f"; too few for {type(self._mix).__name__}"
            print(f"minutes     {self.minutes:g}: about {_round(self._epochs)} epochs{mixing}")

    def _apply_plan(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        pl_module.mix = self._mix if self._is_mixed else None
        epochs = self._epochs or 0.0
        if math.isfinite(epochs) and trainer.check_val_every_n_epoch is not None:
            trainer.check_val_every_n_epoch = max(math.ceil(epochs / _MOST_VALIDATIONS), 1)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Classifier, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._progress == 1 and not is_accumulating(trainer):
            self._end(trainer)

    def summary(self, trainer: pl.Trainer) -> str:
        """The number of steps and epochs, as a sentence."""
        mixing = "" if self._mix is None or self._is_mixed else f", without {type(self._mix).__name__}"
        epochs = _round(epochs_done(trainer))
        return f"In these {self.minutes:g} minutes it had {trainer.global_step:,} steps, {epochs} epochs{mixing}."

    def _end(self, trainer: pl.Trainer) -> None:
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step
        if trainer.check_val_every_n_epoch is not None:
            trainer.check_val_every_n_epoch = 1
        trainer.should_stop = True  # otherwise Lightning would not validate in the middle of an epoch

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        self._validation_began = self._of_steps

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        self._has_validated = True
        if not trainer.sanity_checking:
            self._evaluation = self._of_steps - self._validation_began
            self._validating += self._evaluation
            self._last = self._of_steps  # a validation is no step

    def state_dict(self) -> dict[str, Any]:
        plan = {"epochs": self._epochs, "is_mixed": self._is_mixed}
        return {"seconds": self.seconds, "evaluation": self._evaluation, "of_sample": self._of_sample, **plan}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._began -= state_dict["seconds"]
        self._evaluation, self._of_sample = state_dict["evaluation"], state_dict["of_sample"]
        self._epochs, self._is_mixed = state_dict["epochs"], state_dict["is_mixed"]


def epochs_done(trainer: pl.Trainer) -> float:
    """The number of epochs that a training has had, with the part of an epoch in which it ended."""
    return trainer.global_step / max(trainer.num_training_batches / trainer.accumulate_grad_batches, 1)


def _round(epochs: float) -> str:
    return f"{epochs:.1f}" if epochs < 10 else f"{epochs:.0f}"
