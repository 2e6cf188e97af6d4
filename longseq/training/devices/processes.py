"""Several processes with samples of their own train as one process does with all of them."""

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
    """The loss to return from a training step, and the loss of the whole batch, for logs.

    Strategies average gradients over processes. Their samples may differ in number, as in the last batch of an epoch,
    and in weight. So each process's loss is multiplied by its share of all weights, times the number of processes: then
    that average is the gradient of the whole batch's loss.

    Args:
        loss: The mean over the samples of this process.
        weight: By what the sum over these samples was divided.
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
    """By what to multiply the loss of a batch whose gradients are accumulated. Lightning divides it by the batches of a
    step; but the last step of an epoch may have fewer."""
    batches = trainer.accumulate_grad_batches
    first = batch_idx - batch_idx % batches  # of this step
    return batches / min(batches, trainer.num_training_batches - first)


def is_spare_batch(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Whether a training batch is only there because other processes have one: its samples do not count."""
    sampler: Any = getattr(trainer.train_dataloader, "sampler", None)
    return hasattr(sampler, "is_spare") and sampler.is_spare(batch_idx)
