"""Position embeddings: learned vectors, fixed waves, or none."""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from longseq.attention.grid import TokenGrid

Positions = Literal["learned", "sincos", "none"]


def sincos(grid: TokenGrid, dim: int) -> Float[Tensor, "1 n d"]:
    """Sines and cosines of a token's row and of its column, at wavelengths from 2 pi to 10,000 * 2 pi tokens
    (arXiv:1706.03762, section 3.5). Row and column have half of the channels each; in a single line of tokens the
    position has all of them. Prefix tokens, which have no position, get zeros.
    """
    height, width = grid.size
    y, x = (places.flatten() for places in torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
    axes = [places for places, length in ((y, height), (x, width)) if length > 1] or [y]
    channels = math.ceil(dim / len(axes))  # of an axis
    table = torch.cat([_waves(places, channels) for places in axes], dim=1)[:, :dim].float()
    return torch.cat([torch.zeros(grid.num_prefix_tokens, dim, dtype=torch.float32), table])[None]


def _waves(places: Int64[Tensor, " n"], channels: int) -> Float[Tensor, "n channels"]:
    sines = math.ceil(channels / 2)
    angles = places[:, None] * 10_000 ** -(torch.arange(sines, dtype=torch.float64) / sines)
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :channels]
