"""Mixing the samples of a training batch with each other, labels and all."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Beta

from longseq.arguments import ArgumentError


class Mix(ABC):
    """A batch becomes one whose samples are each made of two, and whose targets are their classes' shares.

    Args:
        alpha: Of the Beta distribution of the shares, one draw a batch: the smaller, the more one of the two prevails.

    Raises:
        ValueError: If alpha is out of its range.
    """

    def __init__(self, alpha: float = 0.4) -> None:
        if not 1e-3 <= alpha <= 1e3:  # beyond, nothing is mixed, or always half of each, and then it has no 32 bits
            raise ArgumentError("alpha", f"must be in 0.001..1000, got {alpha}; 0.2 to 1 is usual")
        self.alpha = alpha

    @abstractmethod
    def __call__(self, inputs: Any, targets: Float[Tensor, "b classes"]) -> tuple[Any, Float[Tensor, "b classes"]]:
        """Mix each sample with the one before it in the batch."""

    def share(self) -> float:
        """Of a sample in its mixture."""
        return float(Beta(torch.tensor(self.alpha), torch.tensor(self.alpha)).sample())


class MixUp(Mix):
    """The weighted mean of two images, or of two sounds: a mixture is as long as the longer one.

    Source: Zhang et al., mixup: Beyond empirical risk minimization (arXiv:1710.09412).
    """

    def __call__(self, inputs: Any, targets: Float[Tensor, "b classes"]) -> tuple[Any, Float[Tensor, "b classes"]]:
        share = self.share()

        def mixed(values: Tensor) -> Tensor:
            return share * values.to(targets.dtype) + (1 - share) * values.to(targets.dtype).roll(1, 0)

        if isinstance(inputs, Mapping):
            lengths = inputs["lengths"]
            both = {"waveforms": mixed(inputs["waveforms"]), "lengths": torch.maximum(lengths, lengths.roll(1, 0))}
            return both, mixed(targets)
        return mixed(inputs), mixed(targets)


class CutMix(Mix):
    """Images with a rectangle of another one in them.

    Source: Yun et al., CutMix (arXiv:1905.04899).
    """

    def __call__(self, inputs: Any, targets: Float[Tensor, "b classes"]) -> tuple[Any, Float[Tensor, "b classes"]]:
        height, width = inputs.shape[2:]
        side = (1 - self.share()) ** 0.5
        top, left = int(torch.randint(height, ())), int(torch.randint(width, ()))
        rows = slice(max(top - round(side * height) // 2, 0), top + round(side * height) // 2)
        columns = slice(max(left - round(side * width) // 2, 0), left + round(side * width) // 2)
        mixed = inputs.clone()
        mixed[:, :, rows, columns] = inputs.roll(1, 0)[:, :, rows, columns]
        cut = mixed[0, 0, rows, columns].numel() / (height * width)
        return mixed, (1 - cut) * targets + cut * targets.roll(1, 0)
