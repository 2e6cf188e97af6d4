"""The optimizer and the learning rate schedule."""

import math
from collections.abc import Sequence
from typing import Any

from timm.optim import create_optimizer_v2, get_optimizer_info
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from longseq.arguments import SettingError


def make_optimizer(
    model: nn.Module, name: str, learning_rate: float, weight_decay: float, betas: Sequence[float] | None = None
) -> Optimizer:
    """Any optimizer that timm knows, with weight decay on matrices but not on norms and biases.

    Args:
        model: Its parameters are optimised; those that its ``no_weight_decay()`` names are not decayed.
        name: One of ``timm.optim.list_optimizers()``.
        learning_rate: The peak of the schedule.
        weight_decay: For matrices.
        betas: Decay of the running means of gradients and of their squares; None takes the optimizer's own.

    Raises:
        SettingError: If the optimizer has another number of betas, or cannot be made on this machine.
    """
    options: dict[str, Any] = {} if betas is None else {"betas": tuple(betas)}
    info = get_optimizer_info(name)
    wanted = info.num_betas if info.has_betas else 0
    if betas is not None and len(betas) != wanted:  # where wanted is 0, timm would leave them out without a word
        raise SettingError(f"model.betas: {name} has {wanted}, got {len(betas)}; leave them out, or choose adamw")
    try:
        return create_optimizer_v2(model, name, lr=learning_rate, weight_decay=weight_decay, **options)
    except (AssertionError, ImportError, RuntimeError) as error:  # some of timm's optimizers need other packages
        why = str(error).split("\n")[0] or "it needs a GPU or another package"
        raise SettingError(f"model.optimizer: {name} cannot be made here ({why}); adamw works everywhere") from error


class Course(LambdaLR):
    """LambdaLR with one function for all groups that the optimizer has now. A group that a callback adds later
    (BackboneFinetuning) keeps the rate that the callback gives it; LambdaLR itself would raise an error."""

    def get_lr(self) -> list[Any]:
        factor = self.lr_lambdas[0](self.last_epoch)
        rates: list[Any] = [peak * factor for peak in self.base_lrs]
        return rates + [group["lr"] for group in self.optimizer.param_groups[len(rates) :]]


def warmup_cosine(optimizer: Optimizer, num_steps: int | float, warmup_fraction: float) -> Course:
    """Rise linearly for a fraction of the steps, then fall along half a cosine to 0; one step for each update.

    Raises:
        SettingError: If the number of steps is infinite.
    """
    if math.isinf(num_steps):
        raise SettingError("trainer.max_epochs: the learning rate schedule needs an end; give it, or trainer.max_steps")
    num_warmup = max(1, round(num_steps * warmup_fraction))

    def factor(step: int) -> float:
        if step < num_warmup:
            return (step + 1) / num_warmup
        progress = (step - num_warmup) / max(1, num_steps - num_warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return Course(optimizer, factor)
