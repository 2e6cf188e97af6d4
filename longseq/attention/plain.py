"""Whether a layer's weights say all that it does, so that a short cut may use them without calling it."""

from torch import Tensor, nn

from longseq.compat.torch import is_hooked


def is_plain(layer: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a layer is of one of these very classes, and nothing stands round it that only a call of it would run.

    Adapters (LoRA), quantisation and FSDP change the class of a layer or of its weight; pruning, old weight norms and
    users hang hooks on it; a parametrization changes its class.
    """
    if type(layer) not in kinds or is_hooked(layer):
        return False
    return all(type(weight) in (nn.Parameter, Tensor) for weight in (*layer.parameters(False), *layer.buffers(False)))
