"""timm's NaFlexViT (arXiv:2307.06304), which takes images of any size and shape, as a plain ViT for one size."""

from typing import Any

import torch
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer

from longseq.arguments import require
from longseq.encoders.trunk import refuse_unfilled


@torch.no_grad()
def at_one_size(naflex: NaFlexVit, size: tuple[int, int]) -> VisionTransformer:
    """A VisionTransformer with the features of a NaFlexVit for images of one size, and with its blocks and weights.

    The matrix of the patch embedding becomes a convolution. Position embeddings are resampled as the NaFlexVit does for
    images of this size: they are its embedding of an image of zeros, minus the bias.

    Args:
        naflex: The model, without a head; its parts are taken over.
        size: Height and width of an image, in pixels.

    Raises:
        ValueError: If patches do not divide the image, or the model has rotary positions or norms of patches.
    """
    embeds: Any = naflex.embeds
    blocks: Any = naflex.blocks
    weight, bias = embeds.proj.weight, embeds.proj.bias
    refuse_unfilled(size, embeds.patch_size)
    norm = None if type(embeds.norm) is torch.nn.Identity else embeds.norm
    what = "must be a NaFlexVit without rotary positions and norms of patches; try another"
    require(all(part is None for part in (naflex.rope, embeds.norm_input, norm)), "model", what)
    vit: Any = VisionTransformer(
        img_size=size,
        patch_size=embeds.patch_size,
        in_chans=naflex.in_chans,
        num_classes=0,
        global_pool=naflex.global_pool,  # type: ignore[arg-type]
        embed_dim=naflex.embed_dim,
        depth=1,
        num_heads=blocks[0].attn.num_heads,
        class_token=naflex.has_class_token,
        reg_tokens=naflex.num_reg_tokens,
        no_embed_class=True,
        device=weight.device,
        dtype=weight.dtype,
    )
    for name in ("norm_pre", "blocks", "norm", "attn_pool", "fc_norm", "head_drop", "pool_include_prefix"):
        setattr(vit, name, getattr(naflex, name))
    if embeds.is_linear:
        sides = (*embeds.patch_size, naflex.in_chans) if embeds.channels_last else (naflex.in_chans, *embeds.patch_size)
        weight = weight.unflatten(1, sides)
        weight = weight.movedim(-1, 1) if embeds.channels_last else weight
    vit.patch_embed.proj.weight.copy_(weight)
    if bias is None:
        vit.patch_embed.proj.bias = None
    else:
        vit.patch_embed.proj.bias.copy_(bias)
    nothing = torch.zeros(1, naflex.in_chans, *size, dtype=weight.dtype, device=weight.device)
    positions = embeds.eval()(nothing)[0][:, naflex.num_prefix_tokens :]
    vit.pos_embed.copy_(positions if bias is None else positions - bias)
    vit.pos_drop = embeds.pos_drop.train(naflex.training)
    vit.cls_token, vit.reg_token = embeds.cls_token, embeds.reg_token
    return vit.train(naflex.training)
