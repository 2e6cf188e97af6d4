"""Rotary positions: queries and keys are rotated by angles that grow with their positions (arXiv:2104.09864)."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longseq.arguments import ArgumentError, require
from longseq.attention.grid import TokenGrid


class Rotary(nn.Module):
    """Rotate pairs of channels by angles that depend on the token's row and column, so that the product of a query and
    a key depends on their distance and direction.

    On a grid, half of the pairs rotate with the row and half with the column; in a single line, all pairs rotate with
    the position. The rates fall geometrically from 1 radian per token: towards 1/100 on a grid (arXiv:2403.13298),
    towards 1/10,000 in a line. The more pairs, the closer they get to that limit. Prefix tokens, which have no
    position, and remaining channels are not rotated.

    Args:
        grid: The grid of the tokens. If it is a single line, a sequence may also be longer.
        channels: c, the channels of a head.

    Raises:
        ValueError: If there are too few channels for a pair on each axis.
    """

    def __init__(self, grid: TokenGrid, channels: int) -> None:
        super().__init__()
        self.grid = grid
        axes = max(sum(length > 1 for length in grid.size), 1)
        what = f"must be false for heads of {channels} channels, got true; it needs {2 * axes}: take fewer heads"
        require(channels >= 2 * axes, "rotary", what)
        self.pairs = channels // 2 // axes  # of each axis
        self.base = 100.0 if axes == 2 else 10_000.0

    def forward(self, tokens: Float[Tensor, "b h n c"]) -> Float[Tensor, "b h n c"]:
        """Rotate the queries or the keys of the first n tokens.

        Raises:
            ValueError: If a grid with rows and columns has fewer tokens.
        """
        angles = self._angles(tokens.shape[2], tokens.device)
        cos, sin = angles.cos().to(tokens.dtype), angles.sin().to(tokens.dtype)
        turned = angles.shape[1]
        first, second = tokens[..., :turned], tokens[..., turned : 2 * turned]
        return torch.cat([first * cos - second * sin, first * sin + second * cos, tokens[..., 2 * turned :]], dim=-1)

    def _angles(self, n: int, device: torch.device) -> Float[Tensor, "n pairs"]:
        """The angles of the first n tokens. They are computed each time, at no cost compared with the scores: a buffer
        would be empty in a model that was built on the meta device."""
        prefix = self.grid.num_prefix_tokens
        height, width = self.grid.size
        # not torch's default dtype, which is bfloat16 in a bf16-true training and has no odd integers above 256
        of_float32: Any = {"dtype": torch.float32, "device": device}
        rates = self.base ** -(torch.arange(self.pairs, **of_float32) / self.pairs)
        if min(height, width) == 1:
            places = torch.cat([torch.zeros(prefix, **of_float32), torch.arange(n - prefix, **of_float32)])
            return places[:, None] * rates
        if n > self.grid.num_tokens:
            what = f"must be false for more tokens than the {self.grid.num_tokens} of the grid, got {n}"
            raise ArgumentError("rotary", f"{what}; carry the model to the new size with longseq.resize")
        axes = torch.meshgrid(torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij")
        angles = torch.cat([axis.flatten()[:, None] * rates for axis in axes], dim=1)
        return nn.functional.pad(angles, (0, 0, prefix, 0))[:n]
