"""Steps whose loss is not finite: left out if the user allows it; otherwise the training ends."""

from collections.abc import Callable, Sequence
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from longseq.compat.lightning import is_finding_learning_rate


class DivergenceError(Exception):
    """The loss or a weight is not finite any more; the message says where, and what to change."""

    exit_code = 5


class BadSteps:
    """Counts the steps in a row whose loss is not finite on some rank.

    Attributes:
        allowed: How many such steps in a row may be left out.
        of_all_ranks: Joins the lists of all ranks.
    """

    def __init__(self) -> None:
        self.allowed = 0
        self.of_all_ranks: Callable[[list[str]], list[str]] = list
        self._in_a_row = 0

    @property
    def is_bad(self) -> bool:
        """Whether the loss of the last step was not finite."""
        return self._in_a_row > 0

    def count(self, loss: Tensor, of_all: Tensor, trainer: pl.Trainer, batch_idx: int) -> bool:
        """Return whether the step is left out, which is the same on all ranks.

        Args:
            loss: The loss of this rank.
            of_all: The mean of all ranks' losses.
            trainer: The trainer.
            batch_idx: The number of the batch in its epoch.

        Raises:
            DivergenceError: If no more steps may be left out.
        """
        # LearningRateFinder tries rates that are too high for a training, and restores the weights afterwards
        if of_all.isfinite() or is_finding_learning_rate(trainer):
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        if self._in_a_row > self.allowed:
            names = [] if loss.isfinite() else _samples_of(trainer, batch_idx)
            raise diverged("the loss", trainer, self.of_all_ranks(names))
        rank_zero_warn(f"step {trainer.global_step} left out: its loss is not finite")
        return True


def diverged(what: str, trainer: pl.Trainer, samples: Sequence[str] = ()) -> DivergenceError:
    """The error to raise when something is not finite any more."""
    (optimizer,) = trainer.optimizers
    where = f"step {trainer.global_step}, learning rate {optimizer.param_groups[0]['lr']:.3g}"
    if samples:
        where += ", training samples " + ", ".join(samples)
    return DivergenceError(
        f"diverged: {what} is not finite any more at {where}; lower model.learning_rate, raise "
        "model.warmup_fraction, clip with --trainer.gradient_clip_val 1, or leave out a few such steps with "
        "--skip_bad_steps 3. If a checkpoint was saved, its weights are finite: --resume goes on from it"
    )


def _samples_of(trainer: pl.Trainer, batch_idx: int) -> list[str]:
    """The names of a training batch's samples, if the data loader knows them."""
    loader: Any = trainer.train_dataloader
    if not hasattr(getattr(loader, "sampler", None), "batch"):
        return []
    names = getattr(loader.dataset, "names", None)
    return [str(names[i] if names else i) for i in loader.sampler.batch(batch_idx)]
