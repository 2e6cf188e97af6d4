"""Read a model of vit-pytorch with the package linformer: its weights become those of a plugged ViT of timm's."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers.attention import Attention
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from longseq.arguments import ArgumentError, require, require_choice, require_positive
from longseq.attention import Linformer, plug
from longseq.encoders._timm_models import misfit

_NAMES = {  # theirs: timm's
    r"to_patch_embedding\.1": "patch_embed.patch_norm",
    r"to_patch_embedding\.2": "patch_embed.proj",
    r"to_patch_embedding\.3": "patch_embed.norm",
    r"pos_embedding": "pos_embed",
    r"transformer\.net\.layers\.(\d+)\.0\.norm": r"blocks.\1.norm1",
    r"transformer\.net\.layers\.(\d+)\.1\.norm": r"blocks.\1.norm2",
    r"transformer\.net\.layers\.(\d+)\.0\.fn\.to_out": r"blocks.\1.attn.proj",
    r"transformer\.net\.layers\.(\d+)\.0\.fn": r"blocks.\1.attn",
    r"transformer\.net\.layers\.(\d+)\.1\.fn\.w": r"blocks.\1.mlp.fc",
    r"mlp_head\.1": "head",
}


class NormedPatchEmbed(PatchEmbed):
    """timm's patch embedding between two LayerNorms: (b, channels, height, width) -> (b, patches, d).

    The first normalises all numbers of a patch, in the order rows, columns, channels; the second a token.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, norm_layer=nn.LayerNorm, **named)
        self.patch_norm = nn.LayerNorm(self.proj.weight[0].numel())

    def forward(self, x: Float[Tensor, "b channels height width"]) -> Float[Tensor, "b n d"]:
        what = f"must have {self.img_size} pixels, got {tuple(x.shape[2:])}; convert the model with longseq.resize"
        require(tuple(x.shape[2:]) == self.img_size, "images", what)
        rows, columns = self.proj.kernel_size
        patches = x.unflatten(3, (-1, columns)).unflatten(2, (-1, rows)).permute(0, 2, 4, 3, 5, 1)
        weight = self.proj.weight.permute(0, 2, 3, 1).flatten(1)
        return self.norm(F.linear(self.patch_norm(patches.flatten(3).flatten(1, 2)), weight, self.proj.bias))


def from_vit_pytorch(
    state_dict: Mapping[str, Tensor],
    heads: int = 8,
    pool: Literal["cls", "mean"] = "cls",
    image_size: int | Sequence[int] | None = None,
    channels: int = 3,
) -> Any:
    """A ViT with the weights and the logits of ``vit_pytorch.efficient.ViT`` around ``linformer.Linformer``.

    The other arguments are those of their constructors, with the same defaults, because weights do not show them. With
    wrong heads or a wrong pool the logits are wrong. Rates of dropout are 0.

    Args:
        state_dict: The weights of their model.
        heads: Number of attention heads.
        pool: What the head gets: the class token, or the mean of all tokens, to which the class token belongs.
        image_size: Height and width of an image in pixels, or one number; None for a square of the known patches.
        channels: Of an image.

    Returns:
        timm's VisionTransformer with a Linformer in each block: images (b, channels, height, width), normalised as
        for their model, become logits (b, classes). ``longseq.resize`` makes one for larger images.

    Raises:
        ValueError: If the weights are those of another model, or an argument does not fit them.

    Example:
        >>> from_vit_pytorch(torch.load("vit.pt"), heads=8)
    """
    require_choice("pool", pool, Literal["cls", "mean"])
    require_positive(heads=heads, channels=channels)
    what = "must not be of a reversible Linformer, whose blocks work on two streams; train a new model"
    require(not any(name.startswith("transformer.net.blocks.") for name in state_dict), "state_dict", what)
    weights = {_renamed(name, pool): weight for name, weight in state_dict.items()}
    try:
        return _built(weights, heads, pool, image_size, channels)
    except KeyError as error:
        raise _refusal(f"it lacks {error.args[0]}") from error
    except RuntimeError as error:
        raise _refusal(misfit(str(error)) or str(error)) from error


def _renamed(name: str, pool: str) -> str:
    names = {**_NAMES, r"mlp_head\.0": "norm" if pool == "cls" else "fc_norm"}
    return next((re.sub(theirs, ours, name) for theirs, ours in names.items() if re.match(theirs, name)), name)


def _built(weights: dict[str, Tensor], heads: int, pool: str, image_size: Any, channels: int) -> Any:
    first = "blocks.0.attn"
    n, dim = weights["pos_embed"].shape[1:]
    is_tied = f"{first}.proj_v" not in weights
    k, inner = weights[f"{first}.proj_k"].shape[1], len(weights[f"{first}.to_q.weight"])
    what = f"must divide the {inner} rows of to_q, got {heads}; give the value of their constructor"
    require(inner % heads == 0, "heads", what)
    patch, size = _sizes(n - 1, weights["patch_embed.proj.weight"].shape[1], image_size, channels)
    pixels = weights["patch_embed.proj.weight"].unflatten(1, (patch, patch, channels))
    weights["patch_embed.proj.weight"] = pixels.permute(0, 3, 1, 2)
    depth = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    for block in range(depth):
        _join(weights, f"blocks.{block}.attn", heads, n, is_tied)
    vit = VisionTransformer(
        img_size=size,
        patch_size=patch,
        in_chans=channels,
        num_classes=len(weights["head.weight"]),
        global_pool="token" if pool == "cls" else "avg",
        pool_include_prefix=True,
        embed_dim=dim,
        depth=depth,
        num_heads=1,  # the attention is replaced below
        mlp_ratio=len(weights["blocks.0.mlp.fc1.weight"]) / dim,
        norm_layer=nn.LayerNorm,  # timm's own has another epsilon
        embed_layer=NormedPatchEmbed,
    )
    for block in vit.blocks:
        block.attn = Attention(dim, heads, attn_head_dim=inner // heads)  # type: ignore[assignment]
    vit = plug(vit, Linformer(k, "key_value" if is_tied else "headwise")).to(weights["pos_embed"].dtype)
    vit.load_state_dict(weights)
    return vit


def _join(weights: dict[str, Tensor], layer: str, heads: int, n: int, is_tied: bool) -> None:
    """Replace the matrices of a layer of attention by those of ours, in place."""
    queries, keys = (weights.pop(f"{layer}.to_{name}.weight") for name in "qk")
    values = keys if is_tied else weights.pop(f"{layer}.to_v.weight")
    if len(keys) != len(queries):  # all heads have the same keys
        what = (
            f"must be {len(queries) // len(keys)}, because the keys of one head have {len(keys)} channels, got {heads}"
        )
        require(len(keys) * heads == len(queries), "heads", what)
        keys, values = keys.repeat(heads, 1), values.repeat(heads, 1)
    weights[f"{layer}.qkv.weight"] = torch.cat([queries, keys, values])
    of_keys = weights.pop(f"{layer}.proj_k")
    for name, matrix in ("keys", of_keys), ("values", of_keys if is_tied else weights.pop(f"{layer}.proj_v")):
        if len(matrix) < n:
            raise _refusal(f"it projects {len(matrix)} tokens, and has positions for {n}")
        weights[f"{layer}.project_{name}.weight"] = matrix[:n].T  # theirs may be for more tokens than an image has


def _sizes(patches: int, numbers: int, image_size: Any, channels: int) -> tuple[int, tuple[int, int]]:
    """The side of a patch, and height and width of an image, in pixels."""
    patch = math.isqrt(numbers // channels)
    what = f"must be another number, got {channels}: a patch has {numbers} numbers; give the value of their constructor"
    require(patch * patch * channels == numbers, "channels", what)
    if image_size is None:
        side = math.isqrt(patches)
        require(side * side == patches, "image_size", f"must be given, because {patches} patches are not a square")
        return patch, (side * patch, side * patch)
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    what = f"must have {patches} patches of {patch} x {patch} pixels, got {height} x {width} pixels"
    fits = height % patch == 0 and width % patch == 0 and height * width == patches * patch * patch
    require(fits, "image_size", f"{what}; give the value of their constructor")
    return patch, (height, width)


def _refusal(why: str) -> ArgumentError:
    what = f"must be of vit_pytorch.efficient.ViT around linformer.Linformer ({why}); give model.state_dict()"
    return ArgumentError("state_dict", what)
