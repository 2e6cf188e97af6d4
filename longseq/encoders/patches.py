"""The patch embedding of a timm ViT, as a matrix product."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers.patch_embed import PatchEmbed
from torch import Tensor, nn

from longseq.attention.plain import is_hooked, is_plain


def embed_patches(
    embed: Any, picture: Float[Tensor, "b channels height width"], is_part: bool = False
) -> Float[Tensor, "b n d"]:
    """The tokens that a timm patch embedding makes of pictures, with its own weights.

    Where patches do not overlap, the embedding is a linear map of the flattened patches. A convolution gives the same
    numbers, but torch 2.14's convolution in bfloat16 is wrong, without an error, on processors with AMX for some
    kernels of one row, such as (1, 16) over one channel: it is off by 1e38. An embedding of another class, a wrapped
    embedding, and a picture of a size that it refuses are left to timm.

    Args:
        embed: ``vit.patch_embed``.
        picture: Of the size that the embedding was built for, or of any size that patches fill if it takes others.
        is_part: Whether the picture is some rows of one of that size.
    """
    rows, columns = embed.patch_size
    height, width = picture.shape[-2:]
    is_strict = embed.strict_img_size and not is_part
    fits = (height, width) == embed.img_size if is_strict else not (height % rows or width % columns)
    if not is_product(embed) or not fits:
        return embed(picture)
    patches = patches_of(picture, rows, columns)
    weight = embed.proj.weight.flatten(1)
    # on a CPU, products over a few numbers take four times as long in bfloat16 as in float32
    is_short = weight.shape[1] < 32 and picture.device.type == "cpu"
    with torch.autocast("cpu", enabled=False) if is_short else nullcontext():
        return embed.norm(F.linear(patches, weight, embed.proj.bias))


def patches_of(picture: Tensor, rows: int, columns: int) -> Float[Tensor, "b n p"]:
    """The numbers of each patch, row after row of the grid; rows that fill no patch are filled with zeros."""
    missing = -picture.shape[2] % rows
    if missing:
        picture = F.pad(picture, (0, 0, 0, missing))
    patches = picture.unflatten(3, (-1, columns)).unflatten(2, (-1, rows)).permute(0, 2, 4, 1, 3, 5)
    return patches.flatten(3).flatten(1, 2)


def is_product(embed: Any) -> bool:
    if type(embed) is not PatchEmbed or is_hooked(embed) or not is_plain(embed.proj, nn.Conv2d) or not embed.flatten:
        return False
    conv = embed.proj
    is_simple = conv.padding == (0, 0) and conv.dilation == (1, 1) and conv.groups == 1
    return is_simple and conv.stride == conv.kernel_size == embed.patch_size
