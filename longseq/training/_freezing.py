"""Freeze weights of an encoder."""

from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from longseq.arguments import ArgumentError


def freeze_encoder(encoder: Any, freeze: Literal["encoder", "stem"] | int | None) -> None:
    """Freeze parameters of an encoder.

    Args:
        encoder: The encoder.
        freeze: ``encoder`` for all, ``stem`` for the layers in front of the patches, or a number: the embedding of
            patches and positions, a stem, and that many of the first blocks; None for nothing. A matrix that a frozen
            block shares with a later one is frozen too.

    Raises:
        ValueError: If there is no stem, or there are fewer blocks.
    """
    if freeze is None:
        return
    frozen: list[nn.Module | nn.Parameter] = [encoder]
    if freeze == "stem":
        if getattr(encoder, "stem", None) is None:
            what = f"must not be stem where {type(encoder).__name__} has none"
            raise ArgumentError("freeze", f"{what}; give model.encoder.stem, or leave freeze out")
        frozen = [encoder.trunk.patch_embed.stem]
    elif freeze != "encoder":
        trunk, depth = encoder.trunk, encoder.depth
        if isinstance(freeze, str) or not 0 <= freeze <= depth:
            what = f"must be encoder, stem, or in 0..{depth} (the blocks), got {freeze!r}"
            raise ArgumentError("freeze", f"{what}; choose one")
        frozen = [trunk.patch_embed, *trunk.blocks[:freeze]]
        frozen += [trunk.get_parameter(name) for name, _ in trunk.named_parameters(recurse=False)]  # positions, classes
    for part in frozen:
        part.requires_grad_(False)
    keep_frozen_statistics(encoder)


def keep_frozen_statistics(encoder: nn.Module) -> None:
    """Put each BatchNorm with frozen weights into evaluation mode, so that training keeps its statistics."""
    for part in encoder.modules():
        if isinstance(part, _BatchNorm) and not any(weight.requires_grad for weight in part.parameters()):
            part.eval()
