"""The patch embedding of a timm ViT, as a matrix product."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from timm.layers.helpers import to_2tuple
from timm.layers.patch_embed import PatchEmbed
from torch import Tensor, nn

from longseq.compat.torch import is_hooked, is_plain


class OverlappingPatchEmbed(PatchEmbed):
    """timm's patch embedding with overlapping patches; what fills no patch at the end is left out.

    Args:
        arguments, named: As PatchEmbed takes them.
        stride: Rows and columns from one patch to the next.
    """

    def __init__(self, *arguments: Any, stride: tuple[int, int], **named: Any) -> None:
        self.stride = stride
        super().__init__(*arguments, **named)
        self.proj.stride = stride

    def _init_img_size(self, img_size: Any) -> Any:
        size: Any = to_2tuple(img_size)
        sides: Any = zip(size, self.patch_size, self.stride, strict=True)
        rows, columns = ((side - of_patch) // stride + 1 for side, of_patch, stride in sides)
        return size, (rows, columns), rows * columns


def stride_of(embed: Any) -> tuple[int, int]:
    """Rows and columns from one patch to the next."""
    return getattr(embed, "stride", embed.patch_size)


def count_rows(embed: Any, rows: Any) -> Any:
    """The number of rows of patches in this many rows of an input, a number or a tensor of numbers. The last patch is
    padded; but an overlapping patch that is not filled is left out, unless it is the only one."""
    patch = embed.patch_size[0]
    if isinstance(embed, OverlappingPatchEmbed):
        return (at_least(rows, patch) - patch) // embed.stride[0] + 1
    return (rows + patch - 1) // patch  # not -(-rows // patch): ONNX rounds quotients of negative numbers up


def count_columns(embed: Any, width: int) -> int:
    """The number of columns of patches in an input of this width."""
    return (width - embed.patch_size[1]) // stride_of(embed)[1] + 1


def at_least(numbers: Any, least: int) -> Any:
    """A number, or each number of a tensor, raised to a minimum."""
    return numbers.clamp(min=least) if isinstance(numbers, Tensor) else max(numbers, least)


def embed_patches(
    embed: Any, picture: Float[Tensor, "b channels height width"], is_part: bool = False
) -> Float[Tensor, "b ... d"]:
    """The tokens that a timm patch embedding computes, (b, n, d), or (b, rows, columns, d) if it does not flatten.

    Patches that do not overlap are embedded by a linear map of the flattened patches. A convolution gives the same
    numbers, but on processors with AMX torch 2.14's bfloat16 convolution is wrong, without an error, for some kernels
    of one row, such as (1, 16) over one channel: it is off by 1e38. An embedding of another class, a wrapped embedding,
    and an input of a size that it refuses are left to timm.

    Args:
        embed: ``vit.patch_embed``.
        picture: An input of the size that the embedding was built for, or of any size that patches fill if it is not
            strict.
        is_part: Whether the input consists of some rows of one of that size.
    """
    rows, columns = embed.patch_size
    height, width = picture.shape[-2:]
    is_strict = embed.strict_img_size and not is_part
    fits = (height, width) == embed.img_size if is_strict else not (height % rows or width % columns)
    if not is_product(embed) or not fits:
        return embed(picture)
    patches = patches_of(picture, rows, columns)
    weight = embed.proj.weight.flatten(1)
    # on a CPU, products over few numbers take four times as long in bfloat16 as in float32
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
    """Whether a patch embedding is a linear map of flattened patches."""
    if type(embed) is not PatchEmbed or is_hooked(embed) or not is_plain(embed.proj, nn.Conv2d) or not embed.flatten:
        return False
    conv = embed.proj
    is_simple = conv.padding == (0, 0) and conv.dilation == (1, 1) and conv.groups == 1
    return is_simple and conv.stride == conv.kernel_size == embed.patch_size


def without_padding(
    picture: Float[Tensor, "b channels height width"], rows: Int64[Tensor, " b"] | None
) -> Float[Tensor, "b channels height width"]:
    """Inputs with zeros in their padding, which is everything after the first ``rows``; None without padding."""
    return picture if rows is None else picture.masked_fill(~is_present(rows, picture.shape[2])[:, None, :, None], 0)


def is_present(counts: Int64[Tensor, " b"], length: int) -> Bool[Tensor, "b length"]:
    """(b, length), True in the first counts[i] places of row i."""
    return torch.arange(length, device=counts.device) < counts[:, None]
