"""The mean loss of an evaluation, over all samples of all ranks, and metrics that keep their precision."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection


class MeanLoss(Metric):
    """Sum of losses / number of samples. Every sample counts once, with any number of ranks and any size of batches.

    The sum is in float32, even for a model of lower precision. If any loss is not finite, neither is the mean.
    """

    total: Tensor
    num_samples: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float32), dist_reduce_fx="sum")
        self.add_state("num_samples", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Float[Tensor, " b"], counts: Tensor | None = None) -> None:
        """Add the losses of a batch, one per sample. With ``counts``, each is a sum of that number of losses."""
        self.total = self.total + losses.sum(dtype=torch.float32)
        self.num_samples = self.num_samples + (len(losses) if counts is None else counts.sum().long())

    def compute(self) -> Float[Tensor, ""]:
        return self.total / self.num_samples

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        return super()._apply(_in_its_precision(fn), exclude_state)


class ExactMetrics(MetricCollection):
    """Metrics whose sums stay in float32 in a model of lower precision: a sum of bfloat16 stops growing at 256 times a
    batch's."""

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        return super()._apply(_in_its_precision(fn), *args, **kwargs)


def _in_its_precision(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function that moves a sum to another device, without a change of its precision."""
    return lambda state: fn(state).to(state.dtype)
