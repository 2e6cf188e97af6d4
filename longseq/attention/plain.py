"""Whether a layer's weights say all that it does, so that a short cut may use them without calling it."""

from typing import Any

import torch
from torch import Tensor, nn


def is_plain(layer: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a layer is of one of these very classes, and nothing stands round it that only a call of it would run.

    Adapters (LoRA), quantisation and FSDP change the class of a layer or of its weight; pruning, old weight norms and
    users hang hooks on it; a parametrization changes its class.
    """
    if type(layer) not in kinds or is_hooked(layer):
        return False
    return all(type(weight) in (nn.Parameter, Tensor) for weight in (*layer.parameters(False), *layer.buffers(False)))


def is_hooked(layer: Any) -> bool:
    """Whether a call of the layer runs hooks, or a forward pass that someone has put in the place of its class's."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return bool(hooks) or "forward" in vars(layer)


def is_transformed() -> bool:
    """Whether torch.func (vmap, grad, jvp) or forward-mode differentiation is at work: our Functions know neither."""
    if torch.compiler.is_compiling():  # the compiler cannot follow the questions below
        return False
    # torch's own autograd.Function asks so; there is no public way
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
