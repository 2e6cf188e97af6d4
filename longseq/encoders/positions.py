"""Position embeddings: learned vectors, fixed waves, or none."""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from longseq.attention.grid import TokenGrid

Positions = Literal["learned", "sincos", "none"]


def sincos(grid: TokenGrid, dim: int) -> Float[Tensor, "1 n d"]:
    """Sines and cosines of a token's row, and of its column, at wavelengths from 2 pi to 10,000 * 2 pi tokens
    (arXiv:1706.03762, section 3.5); half of the channels each, or all of them where the tokens stand in one line.
    Prefix tokens, which have no place, get zeros.
    """
    height, width = grid.size
    y, x = (places.flatten() for places in torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
    axes = [places for places, length in ((y, height), (x, width)) if length > 1] or [y]
    channels = math.ceil(dim / (2 * len(axes)))  # of the sines along an axis
    rates = 10_000 ** -(torch.arange(channels, dtype=torch.float64) / channels)
    angles = [places[:, None] * rates for places in axes]
    waves = [wave for angle in angles for wave in (angle.sin(), angle.cos())]
    table = torch.cat(waves, dim=1)[:, :dim].float()
    return torch.cat([torch.zeros(grid.num_prefix_tokens, dim), table])[None]
