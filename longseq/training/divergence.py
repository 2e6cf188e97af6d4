"""Steps whose loss is not finite: they are left out if the user allows it; else the next check ends the training."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor, nn

from longseq.compat.lightning import is_finding_learning_rate


class DivergenceError(Exception):
    """The loss or a weight is no longer finite; the message names the step, and what to change."""

    exit_code = 5


class BadSteps:
    """Finds the steps whose loss is not finite on some rank.

    If no step may be left out, the host does not wait for each loss. The device notes the first bad loss, and ``check``
    reads it at logged steps and before validations and checkpoints. If some may be left out, the host waits in every
    step, because it must know the loss before the optimizer's step. If gradients are accumulated, one bad batch makes
    the whole step bad.

    Attributes:
        allowed: How many bad steps in a row may be left out.
        of_all_ranks: Joins the lists of all ranks.
    """

    def __init__(self) -> None:
        self.allowed = 0
        self.of_all_ranks: Callable[[list[str]], list[str]] = list
        self._step, self._last_bad, self._in_a_row = 0, -1, 0
        self._unchecked: list[_Batch] = []  # since the last check
        # minus the index of the first bad loss of all ranks, and of this one; -_MOST or less if there is none
        self._first: Tensor | None = None

    @property
    def is_bad(self) -> bool:
        """Whether the last step is left out, because a loss was not finite."""
        return self._step == self._last_bad

    def count(self, loss: Tensor, of_all: Tensor, trainer: pl.Trainer, batch_idx: int) -> bool:
        """Return whether the step is left out. All ranks return the same.

        Args:
            loss: The loss of this rank.
            of_all: The mean of all ranks' losses.
            trainer: The trainer.
            batch_idx: The number of the batch in its epoch.

        Raises:
            DivergenceError: If no more steps may be left out.
        """
        if is_finding_learning_rate(trainer):  # the search tries too high rates, and then restores the weights
            return False
        batch = _Batch(trainer.global_step, batch_idx, _rate(trainer))
        if not self.allowed:
            self._note(loss.detach(), of_all, batch)
            return False
        self._step = batch.step
        if not of_all.isfinite() and not self.is_bad:
            self._in_a_row = self._in_a_row + 1 if self._last_bad == batch.step - 1 else 1
            self._last_bad = batch.step
            if self._in_a_row > self.allowed:
                names = self.of_all_ranks([] if loss.isfinite() else _samples_of(trainer, batch_idx))
                raise diverged("the loss", batch.step, batch.rate, names)
            rank_zero_warn(f"step {batch.step} left out: its loss is not finite")
        return self.is_bad

    def _note(self, loss: Tensor, of_all: Tensor, batch: "_Batch") -> None:
        # minus the index, so that the first bad loss is the maximum; a finite loss is below all
        this = torch.stack([of_all, loss]).isfinite().float() * -_MOST - len(self._unchecked)
        self._first = this if self._first is None else torch.maximum(self._first, this)
        self._unchecked.append(batch)

    def check(self, trainer: pl.Trainer) -> None:
        """Read from the device whether any loss since the last check was bad. All ranks call this after the same steps.

        Raises:
            DivergenceError: If a loss was not finite.
        """
        if not self._unchecked:
            return
        assert self._first is not None
        batches = self._unchecked
        first, own = map(int, self._first.tolist())
        self._unchecked, self._first = [], None
        if first <= -_MOST:
            return
        batch = batches[-first]
        names = self.of_all_ranks(_samples_of(trainer, batch.number) if own == first else [])
        raise diverged("the loss", batch.step, batch.rate, names)

    def forget(self) -> None:
        """Drop the losses that were not checked: they belong to an interrupted training."""
        self._unchecked, self._first = [], None
        self._step, self._last_bad, self._in_a_row = 0, -1, 0


_MOST = 2.0**24  # batches between two checks: up to this number float32 counts exactly


class _Batch(NamedTuple):
    """A training batch: its optimizer step, its number in the epoch, and its learning rate."""

    step: int
    number: int
    rate: float


def _rate(trainer: pl.Trainer) -> float:
    (optimizer,) = trainer.optimizers
    return optimizer.param_groups[0]["lr"]


def diverged(what: str, step: int, rate: float, samples: Sequence[str] = ()) -> DivergenceError:
    """The error for a value that is no longer finite."""
    where = f"step {step}, learning rate {rate:.3g}"
    if samples:
        where += ", training samples " + ", ".join(samples)
    return DivergenceError(
        f"diverged: {what} is no longer finite at {where}; lower model.learning_rate, raise "
        "model.warmup_fraction, clip with --trainer.gradient_clip_val 1, or leave out a few such steps with "
        "--skip_bad_steps 3. If a checkpoint was saved, its weights are finite: --resume continues from it"
    )


def refuse_bad_weights(trainer: pl.Trainer, model: nn.Module) -> None:
    """Check all weights before they are saved.

    Raises:
        DivergenceError: If one is not finite.
    """
    if not all(weight.isfinite().all() for weight in model.parameters()):
        raise diverged("a weight", trainer.global_step, _rate(trainer))


def _samples_of(trainer: pl.Trainer, batch_idx: int) -> list[str]:
    """The names of a training batch's samples, if the data loader knows them."""
    loader: Any = trainer.train_dataloader
    if not hasattr(getattr(loader, "sampler", None), "batch"):
        return []
    names = getattr(loader.dataset, "names", None)
    return [str(names[i] if names else i) for i in loader.sampler.batch(batch_idx)]
