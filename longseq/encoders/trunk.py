"""A new vision transformer: timm's, without a head, of any size that this machine can hold."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from longseq.arguments import require, require_choice, require_positive
from longseq.attention.plug import token_grid
from longseq.encoders.gated_pooling import GatedPooling
from longseq.encoders.local import LocalMixing
from longseq.encoders.positions import Positions, sincos
from longseq.encoders.statistics_pooling import StatisticsPooling
from longseq.encoders.stem import Stem, StemEmbed

_POOLINGS = {"gated": GatedPooling, "statistics": StatisticsPooling}


@dataclass(frozen=True)
class Sizes:
    """The settings of a new ViT, except its attention and its inputs: every encoder takes them, as ``**sizes``.

    An encoder with other defaults has a subclass. Settings that the encoder lacks have ``field(init=False)`` there.

    Args:
        dim: Width of a token.
        depth: Number of blocks; 0 is possible with a stem, whose tokens are then pooled directly.
        heads: Number of attention heads, a divisor of dim.
        mlp_ratio: Width of the hidden layer of each MLP, as a multiple of dim.
        dropout: Dropout rate of position embeddings, attention outputs and MLPs.
        drop_path: Rate of stochastic depth in the last block, growing linearly from 0.
        pool: What the features are: ``avg``, the mean of the tokens; ``max``, the largest number of each channel;
            ``gated``, their mean with learned weights (gated_pooling.py); ``statistics``, a hidden layer over their
            mean, maximum and deviation (statistics_pooling.py); or ``token``, a class token.
        checkpointing: Whether the blocks' activations are recomputed instead of stored: less memory, more time.
        local: Depthwise convolutions over the tokens in every block, ``Conv2d`` or ``Conv1d``; None for none.
        positions: Position embeddings: ``learned`` vectors, ``sincos`` (fixed waves), ``clock`` (fixed waves of the
            logarithm of the time, for sounds, signals and features in time), or ``none``. With local mixing, the edges
            of the input show the positions.
        any_length: Whether images may have any size that patches fill, and clips any length, without a resize;
            ``shape`` or ``seconds`` is then a typical one. It needs positions ``none`` or ``clock``, and an
            attention that is not bound to a length.
        reversible: Whether blocks are reversible as in the Reformer. Their activations are recomputed from their
            outputs: this takes the memory of one block, whatever the depth, and more time.
        stem: Convolutions before the tokens (stem.py), whose strides divide the patch; None for none.
        bf16_residual: Whether the tokens from block to block are bfloat16 too under bfloat16 autocast (``bf16-mixed``):
            less memory traffic, and a rounding after each block. It has no effect in other precisions.
        layer_scale: Initial value of the learned scales of attention and MLP outputs (LayerScale, arXiv:2103.17239); 0
            for no scales.

    Raises:
        ValueError: If a number is out of its range, heads is no divisor of dim, pool or positions are unknown, or
            positions are bound to a length although any_length is True.
        MemoryError: If this machine has too little memory for the weights; the system would kill the process.
    """

    has_own_tokens: ClassVar[bool] = False  # whether the tokens mean something without blocks and without a stem

    dim: int = 128
    depth: int = 6
    heads: int = 4
    mlp_ratio: float = 4.0
    dropout: float = 0.0
    drop_path: float = 0.0
    pool: str = "avg"
    checkpointing: bool = False
    local: LocalMixing | None = None
    positions: Positions = "learned"
    any_length: bool = False
    reversible: bool = False
    bf16_residual: bool = False
    stem: Stem | None = None
    layer_scale: float = 0.0

    def __post_init__(self) -> None:
        has_blocks = bool(self.depth)
        what = "must be positive without a stem, got 0; give a stem, or a depth"
        require(has_blocks or self.stem is not None or self.has_own_tokens, "depth", what)
        require_positive(dim=self.dim, depth=self.depth or 1, heads=self.heads, mlp_ratio=self.mlp_ratio)
        what = f"must leave the MLP a width of 1 or more, got {self.mlp_ratio} times {self.dim}"
        require(self.dim * self.mlp_ratio >= 1, "mlp_ratio", f"{what}; 4 is usual")
        for name, rate in {"dropout": self.dropout, "drop_path": self.drop_path}.items():
            require(0 <= rate < 1, name, f"must be in 0..1 (1 excluded), got {rate}; 0 turns it off")
        what = f"must divide dim, but {self.heads} does not divide {self.dim}; change one of them"
        require(self.dim % self.heads == 0, "heads", what)
        size = 4 * self.depth * (4 + 2 * self.mlp_ratio) * self.dim * self.dim
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if size > memory:
            raise MemoryError(
                f"the weights of {self.depth} blocks of dim {self.dim} take {size / 2**30:.3g} GiB, and this machine "
                f"has {memory / 2**30:.3g} in all"
            )
        what = f"must be in 0..1, got {self.layer_scale}; 0 leaves it out, 0.05 is a small start"
        require(0 <= self.layer_scale <= 1, "layer_scale", what)
        require_choice("pool", self.pool, Literal["avg", "max", "gated", "statistics", "token"])
        what = "must not be token with depth 0, where a class token sees no other; leave it out"
        require(has_blocks or self.pool != "token", "pool", what)
        require_choice("positions", self.positions, Positions)
        what = f"must be none or clock for inputs of any length, got {self.positions!r}"
        is_free = self.positions in ("none", "clock")
        require(not self.any_length or is_free, "positions", f"{what}; local mixing tells neighbours apart")


def make_vit(
    kind: type[VisionTransformer],
    picture_shape: tuple[int, int, int],
    patch: tuple[int, int],
    sizes: Sizes,
    **options: Any,
) -> Any:
    """A ViT of a class derived from timm's, without a head, of these sizes; options are further ones of timm's."""
    channels, *size = picture_shape
    vit = kind(
        img_size=tuple(size),  # type: ignore[arg-type]
        patch_size=patch,  # type: ignore[arg-type]  # timm takes a pair too
        in_chans=channels,
        num_classes=0,
        global_pool="avg" if sizes.pool in _POOLINGS else sizes.pool,  # type: ignore[arg-type]
        class_token=sizes.pool == "token",
        embed_dim=sizes.dim,
        depth=sizes.depth,
        num_heads=sizes.heads,
        mlp_ratio=sizes.mlp_ratio,
        pos_drop_rate=sizes.dropout,
        proj_drop_rate=sizes.dropout,
        drop_path_rate=sizes.drop_path,
        pos_embed="learn" if sizes.positions == "learned" else "none",
        init_values=sizes.layer_scale or None,
        **options,
    )
    if sizes.pool in _POOLINGS:
        vit.attn_pool = _POOLINGS[sizes.pool](sizes.dim)  # type: ignore[assignment]
    return vit


def make_trunk(
    picture_shape: tuple[int, int, int], patch: tuple[int, int], sizes: Sizes, row_seconds: float | None = None
) -> VisionTransformer:
    """A new timm ViT without a head.

    If each pixel is a token, position embeddings start with a deviation of 1 instead of timm's 0.02: a pixel means
    little without its position, and exact attention does not learn positions in a short training (accuracy on digits
    0.52 with 0.02, 0.91 with 1; docs/results). Frames mean more, and learn better with timm's 0.02 (spoken digits 0.99
    with 0.02, 0.97 with 1).

    With any_length the trunk takes inputs of any size, and picture_shape is a typical one. With depth 0 the tokens of
    the stem are pooled and normalised. row_seconds is the time from one row of tokens to the next, if there is one.
    """
    what = "must not be clock for tokens without a time, got clock; features have one with data.token_seconds"
    require(sizes.positions != "clock" or row_seconds is not None, "positions", what)
    embed = {} if sizes.stem is None else {"embed_layer": StemEmbed}
    trunk = make_vit(VisionTransformer, picture_shape, patch, sizes, **embed)
    if sizes.stem is not None:
        trunk.patch_embed.put_behind(sizes.stem)
    trunk.patch_embed.strict_img_size = not sizes.any_length
    trunk.clock_seconds = row_seconds if sizes.positions == "clock" else None  # type: ignore[assignment]
    if sizes.positions == "sincos":
        del trunk.pos_embed
        trunk.pos_embed = nn.Buffer(sincos(token_grid(trunk), sizes.dim))
    elif sizes.positions == "learned" and patch == (1, 1):
        nn.init.normal_(trunk.pos_embed)
    return trunk


def picture_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """Check the shape of an image.

    Raises:
        ValueError: If it is not three positive numbers: channels, height and width.
    """
    what = f"must be channels, height and width, got {list(shape)}; for example [3, 32, 32]"
    require(len(shape) == 3 and min(shape) >= 1, "shape", what)
    channels, height, width = shape
    return channels, height, width


def refuse_unfilled(size: tuple[int, int], patch: tuple[int, int]) -> None:
    """Check that patches fill an image.

    Args:
        size, patch: Height and width of the image and of a patch, in pixels.

    Raises:
        ValueError: If they do not.
    """
    is_filled = not any(side % of_patch for side, of_patch in zip(size, patch, strict=True))
    what = f"must be filled by patches of {patch}, got {size}; give --data.size {filled_size(size, patch)}"
    require(is_filled, "shape", what)


def filled_size(size: tuple[int, int], patch: tuple[int, int]) -> str:
    """The largest size below that patches fill, at least one patch, as --data.size takes it."""
    rows, columns = (max(side // of_patch, 1) * of_patch for side, of_patch in zip(size, patch, strict=True))
    return str(rows) if rows == columns else f"[{rows},{columns}]"
