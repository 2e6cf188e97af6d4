"""Whether a layer only applies its weights, so that a short cut may read them without calling the layer."""

from torch import Tensor, nn

from longseq.compat.torch import is_hooked


def is_plain(layer: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a layer is exactly of one of these classes, and a call of it would run nothing besides its weights.

    Adapters (LoRA), quantisation and FSDP change the class of a layer or of its weight. Pruning, old weight norms and
    users register hooks on it. A parametrization changes its class.
    """
    if type(layer) not in kinds or is_hooked(layer):
        return False
    return all(type(weight) in (nn.Parameter, Tensor) for weight in (*layer.parameters(False), *layer.buffers(False)))
