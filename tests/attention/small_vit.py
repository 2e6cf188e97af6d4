"""Vision transformers of timm that are small enough to test on, with the attention of every mechanism."""

import torch
from timm.models.vision_transformer import VisionTransformer

from longseq.attention import plug
from longseq.attention.examples import every_mechanism

MECHANISMS = every_mechanism()


def vit(size: int = 8, depth: int = 2, heads: int = 4, dim: int = 32, **kwargs: object) -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=size, patch_size=1, in_chans=1, num_classes=10, embed_dim=dim, depth=depth, num_heads=heads, **kwargs
    )


def model(mechanism, **options):
    return plug(vit(**options), mechanism)


def images(count=2):
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def gradients(vit, mask=None):
    vit.zero_grad()
    vit(images(), attn_mask=mask).square().sum().backward()
    return {name: p.grad.clone() for name, p in vit.named_parameters()}


def kind_of_layer(mechanism):
    """The layer's class, its formula and the classes of its projections: together they decide which code runs."""
    layer = model(mechanism).blocks[0].attn
    formula = type(layer.formula) if isinstance(layer.formula, torch.nn.Module) else layer.formula
    return type(layer), formula, tuple(type(part) for part in layer.modules())


# One mechanism for every kind of layer.
COMPILED = list({kind_of_layer(mechanism): mechanism for mechanism in reversed(MECHANISMS)}.values())
