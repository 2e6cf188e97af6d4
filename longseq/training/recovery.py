"""Save regularly and stop safely, so that a training can resume as if it had never stopped."""

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.trainer.states import TrainerFn

from longseq.arguments import require_positive
from longseq.compat.lightning import (
    count_from_what_is_validated,
    is_accumulating,
    is_followed_by_validation,
    put_before_validation,
    resume_exactly,
    stops_early,
)
from longseq.training.classifier import Classifier
from longseq.training.divergence import refuse_bad_weights
from longseq.training.signals import ENDING, answer, end_only_if


class Stopped(Exception):  # noqa: N818 (it is not an error)
    """A signal has stopped the training, after a checkpoint was saved."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Sentinel(Checkpoint):  # a Checkpoint, because Lightning runs those after all callbacks that change what is saved
    """Save the last checkpoint; after each step all ranks decide together whether to stop.

    After SIGTERM, SIGINT or SIGHUP the current step or validation batch is finished, the last checkpoint is saved, and
    Stopped is raised; a second SIGINT stops at once. The checkpoint is also saved at the end of every epoch and every
    few minutes in between, but only between optimizer steps, because a checkpoint holds no accumulated gradients.

    Args:
        last: Path of the last checkpoint.
        minutes: Longest time between two checkpoints.
    """

    def __init__(self, last: Path, minutes: float) -> None:
        super().__init__()
        require_positive("10 loses ten minutes at worst", checkpoint_minutes=minutes)
        self.last, self.minutes = last, minutes
        self._saved_at = 0.0
        self._received = 0  # the number of the signal that arrived
        self._ends_within_epoch = False  # whether max_steps or max_time ends the training at this step
        self._stopping = 0  # the signal for which the ranks agreed to stop
        self._handlers: dict[int, Any] = {}
        self._group: Any = None
        self._validation_is_to_come = False
        self._shared_batches = 0  # validation batches that every rank has
        self._is_over = False  # whether a callback has ended the training

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        resume_exactly(trainer)
        # whoever resumes a training that was tested wants it to go on
        was_tested = trainer.strategy.broadcast(self.last.with_name("metrics.json").exists())
        trainer.should_stop = trainer.should_stop or (self._is_over and not was_tested)

    def state_dict(self) -> dict[str, Any]:
        return {"is_over": self._is_over}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._is_over = state_dict.get("is_over", False)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        self._ends_within_epoch = trainer.global_step == trainer.max_steps and not trainer.is_last_batch
        pl_module.bad_steps.of_all_ranks = self._of_all_ranks
        self._saved_at = time.monotonic()
        if trainer.world_size > 1:
            self._group = dist.new_group(backend="gloo")  # ranks agree on the CPU, so nobody waits for a device
        if threading.current_thread() is threading.main_thread():
            end_only_if(self._is_second_interrupt)
            for number in ENDING:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
                    self._handlers[number] = signal.signal(number, self._receive)

    def _is_second_interrupt(self, unanswered: bytes) -> bool:
        return signal.SIGINT in unanswered and (self._received > 0 or len(unanswered) > 1)

    def _receive(self, number: int, frame: Any) -> None:
        answer()
        if self._received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = number

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Classifier, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_accumulating(trainer):
            return
        received, is_due = self._agree(self._received, time.monotonic() - self._saved_at > 60 * self.minutes)
        is_last = trainer.should_stop or trainer.global_step == trainer.max_steps
        self._ends_within_epoch = is_last and not trainer.is_last_batch
        if received or is_due or self._ends_within_epoch:
            self._save(trainer)
        self._stopping = received  # stop at the next hook, after this step's values are logged

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        """Cancel a stop that min_epochs or min_steps has delayed. Callbacks decide again, as in a resumed training.
        Lightning would stop as soon as it may, even if the metric has improved since. A training that is over, and is
        resumed only for its last validation, stays stopped."""
        trainer.should_stop = trainer.global_step == trainer.max_steps

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._stop(trainer)

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._stop(trainer)
        count_from_what_is_validated(trainer)
        # the smallest number of all ranks: a rank with one batch more would wait for the others for ever
        own = min(sum(trainer.num_val_batches), sys.maxsize)  # infinite if a loader has no length
        self._shared_batches = -self._agree(-int(own), False)[0]

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._is_over = stops_early(trainer)
        if not self._ends_within_epoch:  # Lightning would count a part of an epoch as a whole one
            trainer.save_checkpoint(self.last)
        self._stop(trainer)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Classifier, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING or batch_idx >= self._shared_batches:
            return
        received = self._agree(self._received, False)[0]
        if received:
            self._save(trainer)
            self._stopping = received
            self._stop(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        """Save the results of the last validation too, for a run that is killed during its test."""
        if self._ends_within_epoch and trainer.state.fn == TrainerFn.FITTING:
            trainer.save_checkpoint(self.last)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Classifier, checkpoint: dict[str, Any]) -> None:
        self._saved_at = time.monotonic()
        pl_module.bad_steps.check(trainer)
        refuse_bad_weights(trainer, pl_module)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.flush()  # so that the curves reach at least to the checkpoint
        if self._validation_is_to_come:
            put_before_validation(checkpoint["loops"]["fit_loop"])

    def _agree(self, received: int, is_due: bool) -> tuple[int, bool]:
        """The highest signal of all ranks, and whether any of them must save now."""
        if self._group is None:
            return received, is_due
        flags = torch.tensor([received, int(is_due)])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        return int(flags[0]), bool(flags[1])

    def _of_all_ranks(self, names: list[str]) -> list[str]:
        if self._group is None:
            return names
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, names, group=self._group)
        return [name for of_rank in gathered for name in of_rank]

    def _save(self, trainer: pl.Trainer) -> None:
        self._validation_is_to_come = trainer.validating or is_followed_by_validation(trainer)
        try:
            trainer.save_checkpoint(self.last)
        finally:
            self._validation_is_to_come = False

    def _stop(self, trainer: pl.Trainer) -> None:
        if not self._stopping:
            return
        name = signal.Signals(self._stopping).name
        raise Stopped(
            f"{name}: saved {self.last} after step {trainer.global_step}; continue with --resume {self.last.parent}",
            128 + self._stopping,
        )

    def on_train_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        self._hand_back()
        self._stopping = self._agree(self._received, False)[0]  # for a signal after the last epoch was saved
        self._stop(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: Classifier, exception: BaseException) -> None:
        self._hand_back()

    def _hand_back(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        end_only_if(None)
