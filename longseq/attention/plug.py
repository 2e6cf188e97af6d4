"""Put a mechanism's layers into any timm vision transformer, and resample a trained one to another grid of tokens."""

import re
from typing import Any

import torch
from timm.layers.attention import Attention, AttentionRope
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models.eva import EvaAttention
from torch import nn

from longseq.arguments import ArgumentError
from longseq.attention._timm_rotary import as_plain
from longseq.attention.grid import TokenGrid
from longseq.attention.layer import AttentionLayer
from longseq.attention.mechanism import Mechanism
from longseq.compat.timm import Trunk

_OF_PAIRS = "it adds a number to the score of every pair of tokens, and shortened keys are not tokens"
REFUSED = {  # why, by class of timm
    "Beit": _OF_PAIRS,
    "VisionTransformerRelPos": _OF_PAIRS,
    "VisionTransformerSAM": _OF_PAIRS,
    "NaFlexVit": "its grid of tokens has no fixed size; longseq.TimmEncoder takes it, at one size",
}


def plug(vit: nn.Module, mechanism: Mechanism) -> Any:
    """Replace the attention in every block of a timm ViT by a mechanism's, in place; all weights are kept.

    State-dict names stay timm's. Weights that timm's attention lacks are new, such as the projections E and F. Load
    pretrained weights first: some new weights start from them (Longformer's for prefix tokens), and attention with
    rotary positions gets a single ``qkv``.

    Args:
        vit: A timm VisionTransformer, or an Eva (EVA, DINOv3), whose blocks hold timm's attention.
        mechanism: For example ``Linformer(k=256)``.

    Returns:
        The same object.

    Raises:
        ValueError: If the model is of another kind, or the mechanism does not fit it.
    """
    if not isinstance(vit, Trunk):
        why = REFUSED.get(type(vit).__name__)
        what = f"must be a timm VisionTransformer or Eva, got {type(vit).__name__}"
        raise ArgumentError("vit", what if why is None else f"{what}: {why}")
    attentions: list[Any] = [getattr(block, "attn", None) for block in vit.blocks]
    for depth, attention in enumerate(attentions):
        if type(attention) in (EvaAttention, AttentionRope):
            attentions[depth] = as_plain(attention)
        elif type(attention) is not Attention and not isinstance(attention, AttentionLayer):
            block = f"block {depth} ({type(vit.blocks[depth]).__name__}) holds {type(attention).__name__}"
            what = f"must hold timm's Attention in every block, but {block}"
            raise ArgumentError("vit", f"{what}; choose a plain, new ViT or DeiT")
    layers = mechanism.layers(attentions, token_grid(vit)) if attentions else []
    for block, attention, layer in zip(vit.blocks, attentions, layers, strict=True):
        layer.num_heads = attention.num_heads  # longseq.resize rebuilds attention even from a layer without heads
        block.attn = layer.train(block.attn.training)  # type: ignore[union-attr]
    vit.mechanism = mechanism  # type: ignore[assignment]  # for longseq.resize, which rebuilds the layers
    return vit


def token_grid(vit: Trunk) -> TokenGrid:
    """The tokens that a timm ViT makes."""
    return TokenGrid(tuple(vit.patch_embed.grid_size), vit.num_prefix_tokens)


@torch.no_grad()
def carry(trained: Trunk, new: Trunk) -> list[str]:
    """Give a plugged ViT the weights of a trained one whose grid of tokens may differ.

    Position embeddings are resampled as timm does it; fixed waves stay those of the new grid. Each attention layer
    resamples its own weights: it multiplies E and F by a damped inverse of the interpolation of tokens
    (docs/resize.md), keeps their row sums, and stretches the kernel of a convolution with its window. Everything else
    is copied.

    Returns:
        The names of weights and projections that keep their initial values, because the trained model has none of them.

    Raises:
        ValueError: If a weight that does not depend on the grid has another shape; the message begins with its name.
    """
    if len(trained.blocks) != len(new.blocks):
        raise ValueError(f"depth must be {len(trained.blocks)}, as in the trained model, got {len(new.blocks)}")
    old_grid, new_grid = token_grid(trained), token_grid(new)
    weights = {name: weight for name, weight in trained.state_dict().items() if not is_of_attention(name)}
    if "pos_embed" in weights and "pos_embed" in new.state_dict():
        prefix, was = (0 if vit.no_embed_class else vit.num_prefix_tokens for vit in (new, trained))
        if prefix != was:
            raise ValueError(f"pool must be that of the trained model, with {was} class tokens, got {prefix}")
        size = list(new_grid.size)
        weights["pos_embed"] = resample_abs_pos_embed(weights["pos_embed"], size, list(old_grid.size), prefix)
        if isinstance(trained.pos_embed, nn.Parameter) and not isinstance(new.pos_embed, nn.Parameter):
            weights["pos_embed"] = new.pos_embed  # fixed waves
    neutral = tuple(f"{name}." for name, part in new.named_modules() if getattr(part, "is_neutral_at_start", False))
    fresh = []
    for name, ours in new.state_dict().items():
        if name not in weights and name.startswith(neutral):
            fresh.append(name)
            continue
        if not is_of_attention(name) and (name not in weights or weights[name].shape != ours.shape):
            was, now = tuple(weights[name].shape) if name in weights else "absent", tuple(ours.shape)
            raise ValueError(f"{name} must have one shape, got {was} in the trained model and {now} in the new one")
    new.load_state_dict(weights, strict=False)
    for depth, (source, block) in enumerate(zip(trained.blocks, new.blocks, strict=True)):
        layer: Any = block.attn
        try:
            fresh += [f"blocks.{depth}.attn.{name}" for name in layer.carry(source.attn, old_grid, new_grid)]
        except ValueError as error:
            raise ValueError(f"blocks.{depth}.attn.{error}") from error
    return fresh


def is_of_attention(name: str) -> bool:
    """Whether a weight of a ViT belongs to an attention layer, which resamples its own weights."""
    return re.match(r"blocks\.\d+\.attn\.", name) is not None
