"""Position embeddings: learned vectors, fixed waves, a clock, or none."""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from longseq.attention.grid import TokenGrid

Positions = Literal["learned", "sincos", "clock", "none"]

_WAVELENGTHS = 64.0, 1 / 64  # of the clock, the longest and the shortest, in natural logarithms of 1 + seconds


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


def clock(
    num_tokens: int, columns: int, row_seconds: float, dim: int, first_row: int = 0, device: Any = None
) -> Float[Tensor, "1 n d"]:
    """Sines and cosines of log(1 + seconds since the start), for inputs of any length.

    The wavelengths go geometrically from 64 to 1/64 in natural logarithms: the first sine rises through 16, which are
    100 days, and the last wave has a period of 1/64 s at the start, of 1 s after a minute and of a minute after an
    hour.

    Args:
        num_tokens: n, of the rows from ``first_row`` on.
        columns: Tokens of a row, which have the same time.
        row_seconds: Seconds from one row to the next.
        dim: d.
        first_row: The row of the first token.
        device: Where the waves are computed.
    """
    rows = first_row + torch.arange(num_tokens, device=device) // columns
    logarithms = (1 + rows.double() * row_seconds).log()  # float32 would confuse the seconds of an hour
    sines = math.ceil(dim / 2)
    longest, shortest = _WAVELENGTHS
    steps = torch.arange(sines, dtype=torch.float64, device=device) / max(sines - 1, 1)
    phases = logarithms[:, None] / (longest * (shortest / longest) ** steps)
    angles = 2 * math.pi * (phases - phases.floor()).float()  # onnxruntime has no cosine of float64
    return torch.cat([angles.sin(), angles.cos()], dim=1)[None, :, :dim]


def _waves(places: Int64[Tensor, " n"], channels: int) -> Float[Tensor, "n channels"]:
    sines = math.ceil(channels / 2)
    angles = places[:, None] * 10_000 ** -(torch.arange(sines, dtype=torch.float64) / sines)
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :channels]
