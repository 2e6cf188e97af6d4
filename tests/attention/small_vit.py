"""A vision transformer of timm that is small enough to test on."""

import torch
from timm.models.vision_transformer import VisionTransformer


def vit(size: int = 8, depth: int = 2, heads: int = 4, dim: int = 32, **kwargs: object) -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=size, patch_size=1, in_chans=1, num_classes=10, embed_dim=dim, depth=depth, num_heads=heads, **kwargs
    )
