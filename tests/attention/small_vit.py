"""Vision transformers of timm that are small enough to test on, with the attention of every mechanism."""

import torch
from timm.models.vision_transformer import VisionTransformer

from longseq.attention import LSTM, Linear, Verma, plug
from longseq.attention.examples import every_mechanism
from longseq.attention.layer import AttentionLayer

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


# Those with queries, keys and values, of which the contract asks more.
ATTENTION = [mechanism for mechanism in MECHANISMS if isinstance(model(mechanism).blocks[0].attn, AttentionLayer)]


def kind_of_layer(mechanism):
    """The layer's class, its formula and the classes of its parts: together they decide which code runs."""
    layer = model(mechanism).blocks[0].attn
    formula = getattr(layer, "formula", None)
    formula = type(formula) if isinstance(formula, torch.nn.Module) else formula
    return type(layer), formula, tuple(type(part) for part in layer.modules())


# One mechanism for every kind of layer that compiles in one graph, which nn.LSTM does not. Projections are called alike
# in Linformer and in Verma.
COMPILED = [mechanism for mechanism in reversed(MECHANISMS) if not isinstance(mechanism, LSTM)]
COMPILED = [each for each in COMPILED if not isinstance(each, Verma) or isinstance(each.projection, Linear)]
COMPILED = list({kind_of_layer(mechanism): mechanism for mechanism in COMPILED}.values())
