"""The only interface of Lightning that a data module uses beyond the documented ones; longseq/compat has longseq's."""

from typing import Any


def position_in_training(trainer: Any) -> tuple[int, int]:
    """The epoch that a training is in, and how many of its batches are done; the next epoch and 0 at an epoch's end."""
    epoch: int = trainer.current_epoch
    batches: int = trainer.fit_loop.epoch_loop.batch_progress.current.processed
    return (epoch + 1, 0) if batches >= trainer.num_training_batches else (epoch, batches)
