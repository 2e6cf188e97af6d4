"""The optimizer and the learning rate's course."""

import math

from timm.optim import create_optimizer_v2
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def make_optimizer(model: nn.Module, name: str, learning_rate: float, weight_decay: float) -> Optimizer:
    """Any optimizer that timm knows, with weight decay on matrices but not on norms and biases.

    Args:
        model: Its parameters are optimised; its ``no_weight_decay()`` names further ones to spare.
        name: One of ``timm.optim.list_optimizers()``.
        learning_rate: The peak of the schedule.
        weight_decay: Of all matrices.
    """
    return create_optimizer_v2(model, name, lr=learning_rate, weight_decay=weight_decay)


def warmup_cosine(optimizer: Optimizer, num_steps: int, warmup_fraction: float) -> LambdaLR:
    """Rise linearly for a fraction of the steps, then fall along half a cosine to 0; one step of it an update."""
    num_warmup = max(1, round(num_steps * warmup_fraction))

    def factor(step: int) -> float:
        if step < num_warmup:
            return (step + 1) / num_warmup
        progress = (step - num_warmup) / max(1, num_steps - num_warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return LambdaLR(optimizer, factor)
