"""Several processes with different samples train as one process with all samples would."""

from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor


def data_rank(trainer: pl.Trainer) -> int:
    """The number of this process among those that have different samples."""
    return getattr(trainer.strategy, "distributed_sampler_kwargs", {"rank": 0})["rank"]


def data_group(trainer: pl.Trainer) -> Any:
    """The processes that have different samples; None for all."""
    return getattr(trainer.strategy, "data_group", None)


def copies(trainer: pl.Trainer) -> int:
    """How many processes have the same samples."""
    return getattr(trainer.strategy, "tokens", 1)


def shared_loss(
    loss: Float[Tensor, ""], weight: Float[Tensor, ""], trainer: pl.Trainer
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The loss to return from a training step, and the loss of the whole batch for logs.

    Strategies average gradients over processes. Processes may differ in the number of samples, as in the last batch of
    an epoch, and in their weights. So the loss of a process is multiplied by its share of all weights and by the number
    of processes. Then the average is the gradient of the whole batch's loss.

    Args:
        loss: The mean over the samples of this process.
        weight: The divisor of that mean.
        trainer: The trainer.
    """
    if trainer.world_size == 1:
        return loss, loss.detach()
    exact = torch.promote_types(loss.dtype, torch.float32)
    own = weight.to(exact)
    sums = torch.stack([loss.detach().to(exact) * own, own])
    dist.all_reduce(sums, group=data_group(trainer))
    total, weights = sums
    return loss * (own * dist.get_world_size(data_group(trainer)) / weights).to(loss), (total / weights).to(loss)


def last_step_factor(trainer: pl.Trainer, batch_idx: int) -> float:
    """The factor for the loss of a batch whose gradients are accumulated. Lightning divides the loss by the batches of
    a step, but the last step of an epoch may have fewer batches."""
    batches = trainer.accumulate_grad_batches
    first = batch_idx - batch_idx % batches  # of this step
    return batches / min(batches, trainer.num_training_batches - first)


def is_spare_batch(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Whether this process has a training batch only because others have one; its samples do not count."""
    sampler: Any = getattr(trainer.train_dataloader, "sampler", None)
    return hasattr(sampler, "is_spare") and sampler.is_spare(batch_idx)
