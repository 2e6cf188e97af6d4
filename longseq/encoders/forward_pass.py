"""The forward pass of a plugged trunk: from inputs of different lengths to tokens, and to features."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longseq.arguments import ArgumentError
from longseq.attention.shard import Shard, summed
from longseq.compat.timm import Trunk, add_positions, leaves_prefix_alone
from longseq.compat.torch import at_least_float32, has_bfloat16_autocast, is_hooked
from longseq.encoders._block import run_block
from longseq.encoders._reversible import run_reversible
from longseq.encoders.gated_pooling import GatedPooling
from longseq.encoders.local import LocalBlock
from longseq.encoders.patches import count_columns, count_rows, embed_patches, is_present, without_padding
from longseq.encoders.positions import clock
from longseq.encoders.statistics_pooling import StatisticsPooling
from longseq.encoders.stem import StemEmbed


def encode(
    trunk: Trunk, picture: Float[Tensor, "b channels height width"], rows: Int64[Tensor, " b"] | None = None
) -> Float[Tensor, "b dim"]:
    """The features that a plugged trunk computes: timm's forward pass, with three additions.

    Inputs may have padding, rows at their end. Each input is encoded as if it were alone, because padding is masked
    from the first token to the pooling. Activation checkpointing works with a mask too. If only the class token leaves
    the trunk, the last block is computed for the prefix tokens alone.

    Args:
        trunk: A ViT whose attention is a mechanism's.
        picture: Normalised inputs, as high as the highest one. If ``trunk.has_gaps``, NaN stands for what is missing: a
            token without anything else is masked as padding is, and another missing number becomes 0, the mean.
        rows: The number of rows of each input before its padding; None without padding.
    """
    if is_hooked(trunk) or is_hooked(trunk.blocks):  # the shorter path would not call the hooks
        is_wider = count_columns(trunk.patch_embed, picture.shape[3]) != trunk.patch_embed.grid_size[1]
        is_local = any(isinstance(block, LocalBlock) for block in trunk.blocks)
        reasons = {
            "inputs of unlike lengths": rows is not None,
            "reversible blocks": _num_reversible(trunk) > 0,
            "signals with gaps": has_gaps(trunk),
            "positions clock": _clock_seconds(trunk) is not None,
            "local mixing in images of another width": is_wider and is_local,
        }
        if what := next((what for what, is_so in reasons.items() if is_so), None):
            raise ArgumentError("trunk", f"must have no hooks for {what}; hook into the encoder or its blocks")
        return trunk(picture)
    last_queries = trunk.num_prefix_tokens if leaves_prefix_alone(trunk) else None
    return pooled(trunk, *encode_tokens(trunk, picture, rows, last_queries))


def pooled(trunk: Trunk, tokens: Float[Tensor, "b q d"], present: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b dim"]:
    """The features of an input, from the tokens that ``encode_tokens`` returns."""
    shard, prefix = shard_of(trunk), trunk.num_prefix_tokens
    if (present is None and shard is None) or trunk.global_pool not in ("avg", "max"):
        return trunk.forward_head(tokens)
    grid, there = tokens[:, prefix:], None if present is None else present[:, prefix:]
    if isinstance(trunk.attn_pool, GatedPooling | StatisticsPooling):
        features = trunk.attn_pool(grid, there)
    elif trunk.global_pool == "max":
        features = grid.masked_fill(~there[..., None], -float("inf")).amax(1)  # type: ignore[index]
    else:
        features = _mean(grid, there, shard)
    return trunk.head_drop(trunk.fc_norm(features))


def shares(trunk: Trunk, tokens: Float[Tensor, "b q d"], present: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b n"]:
    """The share of each token except prefix tokens in what ``pooled`` takes of them: its weight, or for ``max`` the
    share of the channels that it decides, and for ``statistics`` the mean of its shares in them."""
    prefix = trunk.num_prefix_tokens
    grid, there = tokens[:, prefix:], None if present is None else present[:, prefix:]
    if isinstance(trunk.attn_pool, GatedPooling):
        return trunk.attn_pool.weights(grid, there)
    if isinstance(trunk.attn_pool, StatisticsPooling):
        return trunk.attn_pool.shares(grid, there)
    if trunk.global_pool == "max":
        grid = grid if there is None else grid.masked_fill(~there[..., None], -float("inf"))
        return F.one_hot(grid.argmax(1), grid.shape[1]).float().mean(1)
    equal = grid.new_ones(grid.shape[:2]) if there is None else there.to(grid.dtype)
    return equal / equal.sum(1, keepdim=True)


def _mean(
    tokens: Float[Tensor, "b n d"], present: Bool[Tensor, "b n"] | None, shard: Shard | None
) -> Float[Tensor, "b d"]:
    exact = at_least_float32(tokens)  # float16 cannot count beyond 65,504 tokens
    there = exact.new_ones(*exact.shape[:2], 1) if present is None else present[..., None]
    if present is not None:
        exact = exact.masked_fill(~there, 0)
    total, count = exact.sum(1), there.sum(1).to(exact.dtype)
    if shard is not None:
        total, count = summed(torch.cat([total, count], dim=1), shard).split([total.shape[1], 1], dim=1)
    return (total / count).to(tokens.dtype)


def token_features(
    trunk: Trunk, picture: Float[Tensor, "b channels height width"], rows: Int64[Tensor, " b"] | None = None
) -> tuple[Float[Tensor, "b n d"], Bool[Tensor, "b n"] | None]:
    """The features of every token except prefix tokens, normalised as those of ``encode``, and which tokens are
    present; None without padding. The arguments are those of encode."""
    return of_grid(trunk, *encode_tokens(trunk, picture, rows))


def of_grid(
    trunk: Trunk, tokens: Float[Tensor, "b q d"], present: Bool[Tensor, "b q"] | None
) -> tuple[Float[Tensor, "b n d"], Bool[Tensor, "b n"] | None]:
    """The features of every token except prefix tokens, from what ``encode_tokens`` returns. With ``statistics`` they
    are those of an input of this token alone."""
    prefix = trunk.num_prefix_tokens
    grid = tokens[:, prefix:]
    if isinstance(trunk.attn_pool, StatisticsPooling):
        grid = trunk.attn_pool.of_tokens(grid)
    return trunk.fc_norm(grid), None if present is None else present[:, prefix:]


def encode_tokens(
    trunk: Trunk,
    picture: Float[Tensor, "b channels height width"],
    rows: Int64[Tensor, " b"] | None = None,
    last_queries: int | None = None,
    replaced: tuple[Bool[Tensor, "b _"], Float[Tensor, " d"]] | None = None,
) -> tuple[Float[Tensor, "b q d"], Bool[Tensor, "b n"] | None]:
    """The tokens that leave a plugged trunk, before pooling, and which of them are present; None without padding.

    Args:
        trunk, picture, rows: As for ``encode``.
        last_queries: The number of tokens that the last block computes; None for all.
        replaced: Which patches of the whole grid are hidden, and the token that replaces them.

    Returns:
        The tokens of this process, if several processes share a sequence (encoders/sharding.py).
    """
    present, shard = None, shard_of(trunk)
    embed: Any = trunk.patch_embed
    any_length = not embed.strict_img_size
    known = None
    if has_gaps(trunk):
        known, picture = without_gaps(picture, rows)
    # a compiled graph cannot read the length, and an exported program takes the same path for any batch size
    if any_length and rows is not None and not torch.compiler.is_compiling() and len(rows) == 1:
        picture = picture[:, :, : int(rows)]
        picture = _with_rows(picture, -picture.shape[2] % embed.patch_size[0])
    elif rows is not None:
        height = picture.shape[2]
        is_whole = shard is not None and not any_length  # processes share the rows of the whole grid
        longest = count_tokens(trunk, embed.img_size[0] if is_whole else height)
        present = is_present(count_tokens(trunk, rows), longest)
        picture = without_padding(picture, rows)
        missing = -height % embed.patch_size[0] if any_length else embed.img_size[0] - height
        picture = _with_rows(picture, missing)
    columns, own = count_columns(embed, picture.shape[3]), None
    if known is not None:
        present = _outside_gaps(trunk, known, picture.shape[2], columns, present)
    if shard is not None:
        own, picture, present = _share_of(trunk, picture, present, shard)
    patches = embed(picture, rows) if isinstance(embed, StemEmbed) else embed_patches(embed, picture, own is not None)
    patches = patches.to(picture.dtype)  # under autocast tokens have the precision of the weights
    if replaced is not None:
        where, token = replaced
        where = where[:, own or slice(patches[0, ..., 0].numel())]
        patches = torch.where(where.view(*patches.shape[:-1], 1), token.to(patches.dtype), patches)
    seconds = _clock_seconds(trunk)
    if seconds is not None:
        first_row = 0 if own is None else own.start // columns
        waves = clock(patches.shape[1], columns, seconds, patches.shape[2], first_row, patches.device)
        patches = patches + waves.to(patches.dtype)
    tokens, given = add_positions(trunk, patches, own)
    if present is not None:
        tokens = tokens[:, : present.shape[1]]
    if isinstance(trunk, VisionTransformer):  # an Eva drops patches in _pos_embed
        tokens = trunk.patch_drop(tokens)
    # after timm's convolution a token's channels are n numbers apart: every later layer would copy them
    tokens = trunk.norm_pre(tokens.contiguous())
    if getattr(trunk, "bf16_residual", False) and has_bfloat16_autocast(tokens):
        tokens = tokens.to(torch.bfloat16)
    mask = None if present is None else present[:, None, None]
    reversible, run = _num_reversible(trunk), getattr(trunk, "compiled_block", run_block)
    if reversible:
        tokens = run_reversible(list(trunk.blocks)[:reversible], tokens, mask, columns)
    for depth, (block, also) in list(enumerate(zip(trunk.blocks, given, strict=True), start=1))[reversible:]:
        num_queries = last_queries if depth == len(trunk.blocks) else None
        arguments = block, tokens, mask, num_queries, columns
        if trunk.grad_checkpointing and torch.is_grad_enabled():
            tokens = checkpoint(run, *arguments, **also, use_reentrant=False)
        else:
            tokens = run(*arguments, **also)
    return trunk.norm(tokens), present


def _with_rows(picture: Tensor, missing: int) -> Tensor:
    """The picture with rows of zeros after it. Without any it is no copy, which ``pad`` would make of a large bag."""
    if not torch.compiler.is_compiling() and missing == 0:  # a compiled graph is for any number of rows
        return picture
    return F.pad(picture, (0, 0, 0, missing))


def has_gaps(trunk: Trunk) -> bool:
    """Whether NaN in the inputs of a trunk stands for what is missing."""
    return getattr(trunk, "has_gaps", False)


def _clock_seconds(trunk: Trunk) -> float | None:
    """Seconds from one row of tokens to the next, if their times are added to them; else None."""
    return getattr(trunk, "clock_seconds", None)


def without_gaps(
    picture: Float[Tensor, "b channels height width"], rows: Int64[Tensor, " b"] | None
) -> tuple[Bool[Tensor, "b height"], Float[Tensor, "b channels height width"]]:
    """Which rows hold something, and inputs with zeros for what is missing. An input that holds nothing stays as it is,
    with all of its rows, so that its features are NaN."""
    missing = picture.isnan()
    known = ~missing.flatten(3).all(3).all(1)
    there = known if rows is None else known & is_present(rows, picture.shape[2])
    is_empty = ~there.any(1)
    picture = picture.masked_fill(missing & ~is_empty[:, None, None, None], 0)
    inside = torch.ones_like(known) if rows is None else is_present(rows, picture.shape[2])
    return there | (is_empty[:, None] & inside), picture  # not torch.where: onnxruntime has none of booleans


def _outside_gaps(
    trunk: Trunk, known: Bool[Tensor, "b _"], height: int, columns: int, present: Bool[Tensor, "b n"] | None
) -> Bool[Tensor, "b n"]:
    """The tokens that hold something, of those that are present, from the rows that do."""
    patch: Any = trunk.patch_embed.patch_size  # type: ignore[union-attr]
    known = known[:, :height]
    known = torch.cat([known, known.new_zeros(known.shape[0], height - known.shape[1])], dim=1)
    tokens = known.unflatten(1, (-1, patch[0])).any(2).repeat_interleave(columns, dim=1)
    tokens = torch.cat([tokens.new_ones(tokens.shape[0], trunk.num_prefix_tokens), tokens], dim=1)
    return tokens if present is None else tokens[:, : present.shape[1]] & present


def _num_reversible(trunk: Trunk) -> int:
    """The number of reversible blocks. The last block is not one of them if only its prefix tokens are used."""
    return len(trunk.blocks) - leaves_prefix_alone(trunk) if getattr(trunk, "reversible", False) else 0


def shard_of(trunk: Trunk) -> Shard | None:
    """This process's part of the tokens; None if it has all."""
    return getattr(trunk, "shard", None)


def _share_of(
    trunk: Trunk, picture: Tensor, present: Bool[Tensor, "b n"] | None, shard: Shard
) -> tuple[slice, Tensor, Bool[Tensor, "b _"] | None]:
    """This process's places on the grid, its rows of the inputs, and which of its tokens are present."""
    embed: Any = trunk.patch_embed
    (high, wide), prefix = embed.patch_size, trunk.num_prefix_tokens
    height, columns = picture.shape[2] // high, picture.shape[3] // wide
    rows = shard.rows(height)
    own = slice(rows.start * columns, rows.stop * columns)
    shard.num_tokens = prefix + height * columns
    shard.first = prefix + own.start if shard.rank else 0
    if present is not None:
        present = torch.cat([present[:, :prefix], present[:, prefix:][:, own]], dim=1)
    return own, picture[:, :, rows.start * high : rows.stop * high], present


def count_tokens(trunk: Trunk, rows: Int64[Tensor, " b"] | int) -> Any:
    """The number of tokens, including prefix tokens, of inputs with this many rows."""
    embed: Any = trunk.patch_embed
    return trunk.num_prefix_tokens + count_rows(embed, rows) * embed.grid_size[1]
