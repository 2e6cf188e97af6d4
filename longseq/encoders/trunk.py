"""A new vision transformer: timm's, without a head, of any size that this machine can hold."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from longseq.arguments import ArgumentError
from longseq.attention.plug import token_grid
from longseq.encoders.local import LocalMixing
from longseq.encoders.positions import Positions, sincos
from longseq.encoders.stem import Stem, StemEmbed


@dataclass(frozen=True)
class Sizes:
    """What a new ViT is, besides its attention and its inputs: every encoder takes these arguments, as ``**sizes``.

    An encoder whose defaults differ has a subclass with other ones. It also says which of them the encoder lacks: these
    have ``field(init=False)``.

    Args:
        dim: Width of a token.
        depth: Number of blocks; 0 with a stem, for its tokens alone.
        heads: Attention heads; they divide dim.
        mlp_ratio: Width of the hidden layer of a block's perceptron, as a multiple of dim.
        dropout: Dropout rate of position embeddings, attention outputs and perceptrons.
        drop_path: Rate of stochastic depth in the last block, growing linearly from 0.
        pool: What the features are: ``avg``, the mean of the tokens, or ``token``, a class token.
        checkpointing: Whether to compute the blocks' activations again and not keep them: less memory, more time.
        local: Depthwise convolutions over the tokens in every block, ``Conv2d`` or ``Conv1d``; None for none.
        positions: What tells a token its place: ``learned`` vectors, ``sincos``, fixed waves, or ``none``: with local
            mixing, edges tell.
        any_length: Whether images may be of any size that patches fill, and clips of any length, without a resize;
            ``shape`` or ``seconds`` is then a usual one. Positions must be ``none``, and the attention must not be
            bound to a length.
        reversible: Whether blocks are the Reformer's, whose activations are computed again from their outputs: memory
            for one block, whatever the depth, and more time.
        stem: Convolutions in front of the tokens (stem.py), whose strides divide the patch; None for none.
        layer_scale: Where the learned scale of what each attention and perceptron adds starts (LayerScale,
            arXiv:2103.17239); 0 for no scale.

    Raises:
        ValueError: If a number is out of its range, the heads do not divide the width, pool is unknown, or positions
            are bound to a length that any_length leaves open.
        MemoryError: If this machine has no room for the weights: it would fill its memory until it is killed.
    """

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
    stem: Stem | None = None
    layer_scale: float = 0.0

    def __post_init__(self) -> None:
        if not self.depth and self.stem is None:
            raise ArgumentError("depth", "must be positive without a stem, got 0; give a stem, or a depth")
        positive = {"dim": self.dim, "depth": self.depth or 1, "heads": self.heads, "mlp_ratio": self.mlp_ratio}
        for name, value in positive.items():
            if not value > 0:  # not (value <= 0), which NaN would pass
                raise ArgumentError(name, f"must be positive, got {value}; the README's configs have values that work")
        if self.dim * self.mlp_ratio < 1:
            what = f"must leave the perceptron a width of 1 or more, got {self.mlp_ratio} times {self.dim}"
            raise ArgumentError("mlp_ratio", f"{what}; 4 is usual")
        for name, value in {"dropout": self.dropout, "drop_path": self.drop_path}.items():
            if not 0 <= value < 1:
                raise ArgumentError(name, f"must be in 0..1 (1 excluded), got {value}; 0 turns it off")
        if self.dim % self.heads:
            what = f"must divide dim, but {self.heads} does not divide {self.dim}; change one of them"
            raise ArgumentError("heads", what)
        size = 4 * self.depth * (4 + 2 * self.mlp_ratio) * self.dim * self.dim
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if size > memory:
            raise MemoryError(
                f"the weights of {self.depth} blocks of dim {self.dim} take {size / 2**30:.3g} GiB, and this machine "
                f"has {memory / 2**30:.3g} in all"
            )
        if not 0 <= self.layer_scale <= 1:
            what = f"must be in 0..1, got {self.layer_scale}; 0 leaves it out, 0.05 is a small start"
            raise ArgumentError("layer_scale", what)
        if self.pool not in ("avg", "token"):
            raise ArgumentError("pool", f"must be avg or token, got {self.pool!r}; choose one of them")
        if self.pool == "token" and not self.depth:
            raise ArgumentError("pool", "must be avg with depth 0, where a class token sees no other; leave it out")
        if self.positions not in get_args(Positions):
            what = f"must be learned, sincos or none, got {self.positions!r}; choose one of them"
            raise ArgumentError("positions", what)
        if self.any_length and self.positions != "none":
            what = f"must be none for inputs of any length, got {self.positions!r}; local mixing tells neighbours apart"
            raise ArgumentError("positions", what)


def make_trunk(picture_shape: tuple[int, int, int], patch: tuple[int, int], sizes: Sizes) -> VisionTransformer:
    """A new timm ViT without a head.

    Where a token is one pixel, position embeddings start with a deviation of 1 and not timm's 0.02: a pixel means
    little without its place, and exact attention does not learn the places within a short training (accuracy 0.52 on
    digits with 0.02, 0.91 with 1; docs/results). Frames mean more and learn better with timm's 0.02: 0.99 on spoken
    digits, 0.97 with 1.

    With any_length it takes pictures of any size, and picture_shape is a usual one. With a depth of 0 the tokens of the
    stem are pooled and normalised.
    """
    channels, height, width = picture_shape
    embed: Any = {} if sizes.stem is None else {"embed_layer": StemEmbed}
    trunk = VisionTransformer(
        img_size=(height, width),
        patch_size=patch,  # type: ignore[arg-type]  # timm takes a pair too
        in_chans=channels,
        num_classes=0,
        global_pool=sizes.pool,  # type: ignore[arg-type]
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
        **embed,
    )
    if sizes.stem is not None:
        trunk.patch_embed.put_behind(sizes.stem)  # type: ignore[operator]
    trunk.patch_embed.strict_img_size = not sizes.any_length
    if sizes.positions == "sincos":
        del trunk.pos_embed
        trunk.pos_embed = nn.Buffer(sincos(token_grid(trunk), sizes.dim))  # type: ignore[assignment]
    elif sizes.positions == "learned" and patch == (1, 1):
        nn.init.normal_(trunk.pos_embed)  # type: ignore[arg-type]
    return trunk


def picture_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """Check the shape of an image.

    Raises:
        ValueError: If it is not three positive numbers: channels, height and width.
    """
    if len(shape) != 3 or min(shape) < 1:
        raise ArgumentError("shape", f"must be channels, height and width, got {list(shape)}; for example [3, 32, 32]")
    channels, height, width = shape
    return channels, height, width
