"""Quantization-aware training: linear layers compute as after ``export --int8 true`` while they learn."""

from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longseq.arguments import require


class QuantizationAwareTraining(pl.Callback):
    """Trains for a model of 8-bit integers (arXiv:1712.05877), with all of the weights or some of them quantised.

    While the model is fitted, each linear layer rounds its inputs and its weights to the numbers that the exported
    layer has. A rounded number passes its gradient on to the number that it was rounded from. Validation, and so the
    choice of the best checkpoint, always rounds everything. A checkpoint holds the weights before they are rounded, and
    afterwards all layers are plain again: a test counts the model in float32, and ``export --int8 true`` the exported
    one.

    Args:
        noise: The share of the weights that a training step rounds, drawn anew for each layer at each step: all with 1,
            quantisation noise (arXiv:2004.07320) below 1. Inputs of layers are always rounded.

    Raises:
        ValueError: If noise is not above 0 and at most 1.
    """

    def __init__(self, noise: float = 1.0) -> None:
        require(0 < noise <= 1, "noise", f"must be above 0 and at most 1, got {noise}; 1 rounds all weights")
        self.noise = noise

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            for layer in pl_module.modules():
                if type(layer) is nn.Linear:
                    layer.__class__ = QuantisedLinear  # the layer keeps its weights, their names and its hooks
                    layer.noise = self.noise  # type: ignore[assignment]

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for layer in pl_module.modules():
            if type(layer) is QuantisedLinear:
                del layer.noise
                layer.__class__ = nn.Linear  # type: ignore[assignment]

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)


class QuantisedLinear(nn.Linear):
    """A linear layer of float numbers that computes what it would with 8-bit integers, as onnxruntime does.

    Its inputs are rounded to 256 steps from the least to the largest of all of them (and 0), and the weights of each
    output to 255 steps, as many above 0 as below.
    """

    noise: float = 1.0

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b e"]:
        change = rounded_weight(self.weight) - self.weight
        if self.training and self.noise < 1:
            change = change.masked_fill(torch.rand_like(change) >= self.noise, 0)
        return F.linear(x + (rounded_inputs(x) - x).detach(), self.weight + change.detach(), self.bias)


@torch.no_grad()
def rounded_weight(weight: Float[Tensor, "e d"]) -> Float[Tensor, "e d"]:
    """The nearest numbers s i with integers i of -127..127, and an s for each row."""
    step = weight.abs().amax(1, keepdim=True).clamp(min=_tiny(weight)) / 127
    return (weight / step).round().clamp(-127, 127) * step


@torch.no_grad()
def rounded_inputs(x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """The nearest numbers s (i - z) with integers i and z of 0..255, and one s and one z for all."""
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    step = (high - low).clamp(min=_tiny(x)) / 255
    zero = (-low / step).round()
    return ((x / step).round() + zero).clamp(0, 255).sub(zero) * step


def _tiny(numbers: Tensor) -> Any:
    return 255 * torch.finfo(numbers.dtype).tiny
