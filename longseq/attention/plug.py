"""Put a mechanism's layers into any timm vision transformer."""

from typing import Any

from timm.layers.attention import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from longseq.attention.layer import AttentionLayer
from longseq.attention.mechanism import Mechanism, TokenGrid


def plug(vit: nn.Module, mechanism: Mechanism) -> VisionTransformer:
    """Replace the attention of every block of a timm ViT by a mechanism's, in place, keeping all its weights.

    State-dict names stay timm's, so pretrained weights load before and after. Only the projections E and F are new.

    Args:
        vit: A timm VisionTransformer whose blocks hold timm's Attention.
        mechanism: For example ``Linformer(k=256)``.

    Returns:
        The same object.

    Raises:
        ValueError: If the model is of another kind, or the mechanism does not fit it.
    """
    if not isinstance(vit, VisionTransformer):
        raise ValueError(f"vit must be a timm VisionTransformer, got {type(vit).__name__}")
    attentions: list[Any] = [getattr(block, "attn", None) for block in vit.blocks]
    for depth, attention in enumerate(attentions):
        if type(attention) not in (Attention, AttentionLayer):
            raise ValueError(
                f"vit must hold timm's Attention in every block, but block {depth} ({type(vit.blocks[depth]).__name__})"
                f" holds {type(attention).__name__}; choose a plain ViT or DeiT"
            )
    grid = TokenGrid(tuple(vit.patch_embed.grid_size), vit.num_prefix_tokens)
    for block, layer in zip(vit.blocks, mechanism.layers(attentions, grid), strict=True):
        block.attn = layer
    return vit
