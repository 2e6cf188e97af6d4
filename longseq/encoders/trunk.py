"""A new vision transformer: timm's, without a head, of any size that this machine can hold."""

import os
from collections.abc import Sequence
from typing import Any, get_args

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from longseq.arguments import ArgumentError
from longseq.attention.plug import token_grid
from longseq.encoders.positions import Positions, sincos
from longseq.encoders.stem import Stem, StemEmbed


def refuse_beyond_memory(dim: int, depth: int, mlp_ratio: float) -> None:
    """Check that this machine can hold the matrices of a ViT: it would fill its memory until it is killed.

    Raises:
        MemoryError: If the matrices are larger than the memory.
    """
    size = 4 * depth * (4 + 2 * mlp_ratio) * dim * dim
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise MemoryError(
            f"the weights of {depth} blocks of dim {dim} take {size / 2**30:.3g} GiB, and this machine has "
            f"{memory / 2**30:.3g} in all"
        )


def refuse_wrong_sizes(
    dim: int, depth: int, heads: int, mlp_ratio: float, dropout: float, drop_path: float, has_stem: bool = False
) -> None:
    """Check the numbers of a new ViT; with a stem its depth may be 0.

    Raises:
        ValueError: If one is out of its range, or the heads do not divide the width.
        MemoryError: If this machine has no room for the weights.
    """
    if not depth and not has_stem:
        raise ArgumentError("depth", "must be positive without a stem, got 0; give a stem, or a depth")
    for name, value in {"dim": dim, "depth": depth or 1, "heads": heads, "mlp_ratio": mlp_ratio}.items():
        if not value > 0:  # not (value <= 0), which NaN would pass
            raise ArgumentError(name, f"must be positive, got {value}; the README's configs have values that work")
    if dim * mlp_ratio < 1:
        raise ArgumentError(
            "mlp_ratio", f"must leave the perceptron a width of 1 or more, got {mlp_ratio} times {dim}; 4 is usual"
        )
    for name, value in {"dropout": dropout, "drop_path": drop_path}.items():
        if not 0 <= value < 1:
            raise ArgumentError(name, f"must be in 0..1 (1 excluded), got {value}; 0 turns it off")
    if dim % heads:
        raise ArgumentError("heads", f"must divide dim, but {heads} does not divide {dim}; change one of them")
    refuse_beyond_memory(dim, depth, mlp_ratio)


def make_trunk(
    picture_shape: tuple[int, int, int],
    patch: tuple[int, int],
    dim: int,
    depth: int,
    heads: int,
    mlp_ratio: float,
    dropout: float,
    drop_path: float,
    pool: str,
    positions: Positions = "learned",
    any_length: bool = False,
    stem: Stem | None = None,
    layer_scale: float = 0.0,
) -> VisionTransformer:
    """A new timm ViT without a head.

    Where a token is one pixel, position embeddings start with a deviation of 1 and not timm's 0.02: a pixel means
    little without its place, and exact attention does not learn the places within a short training (accuracy 0.52 on
    digits with 0.02, 0.91 with 1; docs/results). Frames mean more and learn better with timm's 0.02: 0.99 on spoken
    digits, 0.97 with 1.

    With any_length it takes pictures of any size, and picture_shape is a usual one. The strides of a stem divide the
    patch. With a stem the depth may be 0: its tokens are then pooled and normalised. With layer_scale, a learned number
    for each channel scales what each attention and each perceptron adds; it starts at this value (LayerScale,
    arXiv:2103.17239).

    Raises:
        ValueError: If a number is out of its range, the heads do not divide the width, pool is unknown, or positions
            are bound to a length that any_length leaves open.
        MemoryError: If this machine has no room for the weights.
    """
    refuse_wrong_sizes(dim, depth, heads, mlp_ratio, dropout, drop_path, stem is not None)
    if not 0 <= layer_scale <= 1:
        raise ArgumentError(
            "layer_scale", f"must be in 0..1, got {layer_scale}; 0 leaves it out, 0.05 is a small start"
        )
    if pool not in ("avg", "token"):
        raise ArgumentError("pool", f"must be avg or token, got {pool!r}; choose one of them")
    if pool == "token" and not depth:
        raise ArgumentError("pool", "must be avg with depth 0, where a class token sees no other; leave it out")
    if positions not in get_args(Positions):
        raise ArgumentError("positions", f"must be learned, sincos or none, got {positions!r}; choose one of them")
    if any_length and positions != "none":
        what = f"must be none for inputs of any length, got {positions!r}; local mixing tells neighbours apart"
        raise ArgumentError("positions", what)
    channels, height, width = picture_shape
    embed: Any = {} if stem is None else {"embed_layer": StemEmbed}
    trunk = VisionTransformer(
        img_size=(height, width),
        patch_size=patch,  # type: ignore[arg-type]  # timm takes a pair too
        in_chans=channels,
        num_classes=0,
        global_pool=pool,  # type: ignore[arg-type]
        class_token=pool == "token",
        embed_dim=dim,
        depth=depth,
        num_heads=heads,
        mlp_ratio=mlp_ratio,
        pos_drop_rate=dropout,
        proj_drop_rate=dropout,
        drop_path_rate=drop_path,
        pos_embed="learn" if positions == "learned" else "none",
        init_values=layer_scale or None,
        **embed,
    )
    if stem is not None:
        trunk.patch_embed.put_behind(stem)  # type: ignore[operator]
    trunk.patch_embed.strict_img_size = not any_length
    if positions == "sincos":
        del trunk.pos_embed
        trunk.pos_embed = nn.Buffer(sincos(token_grid(trunk), dim))  # type: ignore[assignment]
    elif positions == "learned" and patch == (1, 1):
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
