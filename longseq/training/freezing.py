"""Keep weights of an encoder as they are."""

from typing import Any, Literal

from torch import nn

from longseq.arguments import ArgumentError


def freeze_encoder(encoder: Any, freeze: Literal["encoder"] | int | None) -> None:
    """Take parameters of an encoder out of the training.

    Args:
        encoder: The encoder.
        freeze: ``encoder`` for all, or a number: the embedding of patches and positions, and so many of the first
            blocks; None for nothing. A matrix that a frozen block shares with a later one is frozen too.

    Raises:
        ValueError: If there are fewer blocks.
    """
    if freeze is None:
        return
    frozen: list[nn.Module | nn.Parameter] = [encoder]
    if freeze != "encoder":
        trunk, depth = encoder.trunk, encoder.depth
        if isinstance(freeze, str) or not 0 <= freeze <= depth:
            raise ArgumentError("freeze", f"must be encoder, or in 0..{depth} (the blocks), got {freeze!r}; choose one")
        frozen = [trunk.patch_embed, *trunk.blocks[:freeze]]
        frozen += [trunk.get_parameter(name) for name, _ in trunk.named_parameters(recurse=False)]  # positions, classes
    for part in frozen:
        part.requires_grad_(False)
