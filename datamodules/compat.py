"""The only undocumented interface of Lightning that data modules use; longseq/compat has longseq's."""

from typing import Any


def position_in_training(trainer: Any) -> tuple[int, int]:
    """The epoch of a training, and the number of its finished batches; at an epoch's end the next epoch, and 0."""
    epoch: int = trainer.current_epoch
    batches: int = trainer.fit_loop.epoch_loop.batch_progress.current.processed
    return (epoch + 1, 0) if batches >= trainer.num_training_batches else (epoch, batches)
