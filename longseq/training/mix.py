"""Mix the samples of a training batch and their labels: MixUp and CutMix."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Beta

from longseq.arguments import ArgumentError


class Mix(ABC):
    """Replaces each sample of a batch by a mixture of two, and each target by the shares of their classes.

    Args:
        alpha: Parameter of the Beta distribution from which one share is drawn for each batch. A smaller alpha makes
            the two shares less equal.

    Raises:
        ValueError: If alpha is out of its range.
    """

    suits: ClassVar[tuple[str, ...]] = ("images",)  # the kinds of encoders whose inputs it can mix

    def __init__(self, alpha: float = 0.4) -> None:
        # a smaller alpha mixes nothing, a larger one gives equal shares, and a huge one does not fit into float32
        if not 1e-3 <= alpha <= 1e3:
            raise ArgumentError("alpha", f"must be in 0.001..1000, got {alpha}; 0.2 to 1 is usual")
        self.alpha = alpha

    @abstractmethod
    def __call__(self, inputs: Any, targets: Float[Tensor, "b classes"]) -> tuple[Any, Float[Tensor, "b classes"]]:
        """Mix each sample with the one before it in the batch."""

    def share(self) -> float:
        """Draw the share that a sample has in its mixture."""
        alpha = torch.tensor(self.alpha, dtype=torch.float32)  # Beta lacks bfloat16, which bf16-true makes the default
        return float(Beta(alpha, alpha).sample())


class MixUp(Mix):
    """The weighted mean of two images or two sounds; a mixture of sounds is as long as the longer one.

    Source: Zhang et al., mixup: Beyond empirical risk minimization (arXiv:1710.09412).
    """

    suits = ("images", "sounds")

    def __call__(self, inputs: Any, targets: Float[Tensor, "b classes"]) -> tuple[Any, Float[Tensor, "b classes"]]:
        share = self.share()
        exact = torch.promote_types(targets.dtype, torch.float32)  # bfloat16 would drown quiet sounds in noise

        def mixed(values: Tensor) -> Tensor:
            return share * values.to(exact) + (1 - share) * values.to(exact).roll(1, 0)

        both = mixed(targets).to(targets.dtype)
        if isinstance(inputs, Mapping):
            lengths = inputs["lengths"]
            longer = torch.maximum(lengths, lengths.roll(1, 0))
            waveforms, missing = inputs["waveforms"], inputs["waveforms"].isnan()
            mixture = mixed(waveforms.masked_fill(missing, 0))  # a gap of one of them is silent, as its padding is
            is_gap = missing & missing.roll(1, 0)
            return {"waveforms": mixture.masked_fill(is_gap, float("nan")), "lengths": longer}, both
        return mixed(inputs), both


class CutMix(Mix):
    """Puts a rectangle of another image into each image.

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


class MixUpOrCutMix(Mix):
    """MixUp or CutMix, drawn for each batch.

    Args:
        alpha: The alpha of MixUp.
        cutmix_alpha: The alpha of CutMix.
        cutmix_share: The probability of CutMix.

    Raises:
        ValueError: If an alpha or the share is out of its range.
    """

    def __init__(self, alpha: float = 0.4, cutmix_alpha: float = 1.0, cutmix_share: float = 0.5) -> None:
        super().__init__(alpha)
        if not 0 <= cutmix_share <= 1:
            raise ArgumentError("cutmix_share", f"must be in 0..1, got {cutmix_share}; 0.5 draws both equally often")
        self.cutmix_alpha, self.cutmix_share = cutmix_alpha, cutmix_share
        self._mixup, self._cutmix = MixUp(alpha), CutMix(cutmix_alpha)

    def __call__(self, inputs: Any, targets: Float[Tensor, "b classes"]) -> tuple[Any, Float[Tensor, "b classes"]]:
        mix = self._cutmix if float(torch.rand(())) < self.cutmix_share else self._mixup
        return mix(inputs, targets)
