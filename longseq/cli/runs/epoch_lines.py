"""What a training prints: a line after each epoch, and the loss and the time left next to the progress bar."""

import math
import time
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
from torch import Tensor
from tqdm import tqdm

from longseq.compat.lightning import callbacks_of, epoch_of, show_beside_bar
from longseq.training.timed import Timed

if TYPE_CHECKING:
    from longseq.cli.runs.callbacks import BestCheckpoint

_clock = time.monotonic


class EpochLines(pl.Callback):
    """Print a line after each epoch: the mean loss of its batches, the task's figure of the last validation, the best
    figure with its epoch, and the time that is left.

    The line is printed when the next epoch starts, because the checkpoint of the best epoch is chosen before that.

    Args:
        best: Chooses the best epoch.
    """

    def __init__(self, best: "BestCheckpoint") -> None:
        super().__init__()
        self._best = best
        self._began, self._first_step = 0.0, 0  # of this process
        self._loss: Tensor | float = 0.0  # sum over the batches of the epoch; read from the device once an epoch
        self._batches = 0
        self._shown: dict[str, str] = {}  # beside the bar
        self._waiting: str | None = None  # a line that is not printed yet, without the best figure and the time
        self._is_validated = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began, self._first_step = _clock(), trainer.global_step
        show_beside_bar(trainer, lambda: self._shown | _named("left", _duration(self._left(trainer))))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._loss, self._batches = self._loss + outputs["loss"].detach().float(), self._batches + 1
        log_every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if log_every and trainer.global_step % log_every == 0:  # the host waits for the device there anyway
            self._shown["loss"] = _number(float(outputs["loss"]))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._is_validated = not trainer.sanity_checking

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._print(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loss, self._loss = float(self._loss) / max(self._batches, 1), 0.0
        self._batches, self._shown["loss"] = 0, _number(loss)
        figure = trainer.callback_metrics.get(str(self._best.monitor)) if self._is_validated else None
        self._is_validated = False
        parts = [
            f"epoch {epoch_of(trainer)}",
            f"loss {_number(loss)}",
            *([] if figure is None else [f"val {_number(figure)}"]),
        ]
        self._waiting = "  ".join(parts)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._print(trainer)

    def _print(self, trainer: pl.Trainer) -> None:
        line, self._waiting = self._waiting, None
        if line is None or not trainer.is_global_zero:
            return
        best = self._best.best_model_score
        if best is not None:
            line += f"  best {_number(best)}" + ("" if self._best.epoch is None else f" ({self._best.epoch})")
        left = _duration(self._left(trainer))
        timed = callbacks_of(trainer, Timed)
        if left:
            line += f"  {left} left" + (f" of {timed[0].minutes:g} min" if timed else "")
        tqdm.write(line)  # above a bar, if there is one

    def _left(self, trainer: pl.Trainer) -> float:
        """The seconds until the training ends; infinite if that is unknown."""
        timed = callbacks_of(trainer, Timed)
        if timed:
            return 60 * timed[0].minutes - timed[0].seconds
        ends = [trainer.max_steps] if trainer.max_steps > 0 else []
        if trainer.max_epochs is not None and trainer.max_epochs > 0:
            steps_of_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
            ends.append(trainer.max_epochs * steps_of_epoch)
        done = trainer.global_step - self._first_step
        if not ends or not done:
            return math.inf
        return (min(ends) - trainer.global_step) / done * (_clock() - self._began)


def _named(name: str, text: str) -> dict[str, str]:
    return {name: text} if text else {}


def _number(value: Tensor | float) -> str:
    value = float(value)
    if 0 < abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) <= 1 else f"{value:.2f}"


def _duration(seconds: float) -> str:
    """A time in its largest suitable unit; "" if it is over or unknown."""
    if not 1 <= seconds < math.inf:
        return ""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
