"""Whether a layer's weights say all that it does, so that a short cut may use them without calling it."""

from typing import Any

import torch
from torch import Tensor, nn


def is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a layer is of this very class, and nothing has been put round it that only a call of it would run.

    Adapters (LoRA), quantisation and FSDP change the class of a layer or of its weight; pruning, old weight norms and
    users hang hooks on it; a parametrization changes its class.
    """
    if type(layer) is not kind or is_hooked(layer):
        return False
    return all(type(weight) in (nn.Parameter, Tensor) for weight in (*layer.parameters(False), *layer.buffers(False)))


def is_hooked(layer: Any) -> bool:
    """Whether a call of the layer runs hooks."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def is_transformed() -> bool:
    """Whether torch.func (vmap, grad, jvp) or forward-mode differentiation is at work, which a Function must know."""
    # torch's own autograd.Function asks so; there is no public way
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
