"""Several processes, each with samples of its own, train as one process would with all samples."""

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor


def data_rank(trainer: pl.Trainer) -> int:
    """The index of this process among those that have different samples."""
    return getattr(trainer.strategy, "distributed_sampler_kwargs", {"rank": 0})["rank"]


def data_group(trainer: pl.Trainer) -> Any:
    """The processes that have different samples; None for all."""
    return getattr(trainer.strategy, "data_group", None)


def copies(trainer: pl.Trainer) -> int:
    """How many processes have the same samples."""
    return getattr(trainer.strategy, "tokens", 1)


class Loss(NamedTuple):
    """A part of the loss of a training batch: its share of the whole, its mean over the samples of this process, and by
    what the sum over these samples was divided."""

    share: float
    mean: Float[Tensor, ""]
    weight: Float[Tensor, ""]


def loss_of_step(losses: Sequence[Loss], trainer: pl.Trainer, batch_idx: int) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of this process, the loss to return from a training step, and the loss of the whole batch, for logs.

    Strategies average gradients over processes, whose samples may differ in number, as in the last batch of an epoch,
    and in weight. So the loss is multiplied by this process's share of all weights, and by the number of processes:
    then the average is the gradient of the whole batch's loss. If gradients are accumulated, Lightning divides the loss
    by the batches of a step, but the last step of an epoch may have fewer: its losses are multiplied by the ratio.
    """
    is_spare = is_spare_batch(trainer, batch_idx)
    parts = [(mean, *_shared(mean, 0 * weight if is_spare else weight, trainer)) for _, mean, weight in losses]
    own, returned, of_all = (
        reduce(torch.add, [loss.share * value for loss, value in zip(losses, values, strict=True)])
        for values in zip(*parts, strict=True)
    )
    accumulated = trainer.accumulate_grad_batches
    first = batch_idx - batch_idx % accumulated  # of this step
    return own, returned * (accumulated / min(accumulated, trainer.num_training_batches - first)), of_all


def _shared(mean: Tensor, weight: Tensor, trainer: pl.Trainer) -> tuple[Tensor, Tensor]:
    """The mean as this process must return it, and the mean over the samples of all processes."""
    if trainer.world_size == 1:
        return mean, mean.detach()
    exact = torch.promote_types(mean.dtype, torch.float32)
    own = weight.to(exact)
    sums = torch.stack([mean.detach().to(exact) * own, own])
    dist.all_reduce(sums, group=data_group(trainer))
    total, weights = sums
    return mean * (own * dist.get_world_size(data_group(trainer)) / weights).to(mean), (total / weights).to(mean)


def is_spare_batch(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Whether this process has a training batch only because others have one: its samples do not count."""
    sampler: Any = getattr(trainer.train_dataloader, "sampler", None)
    return hasattr(sampler, "is_spare") and sampler.is_spare(batch_idx)
