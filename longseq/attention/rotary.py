"""Rotary positions: queries and keys are turned by angles that grow with their places (RoFormer, arXiv:2104.09864)."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longseq.arguments import ArgumentError
from longseq.attention.grid import TokenGrid


class Rotary(nn.Module):
    """Turn pairs of channels by angles of the token's row and of its column, so that a product of a query and a key
    depends on how far apart they are, and in which direction.

    Half of the pairs turn by the row, half by the column, or all by the place in a single line, at rates that fall
    geometrically from 1 radian a token, towards 1/100 on a grid (arXiv:2403.13298) and 1/10,000 on a line, which they
    come the nearer the more pairs there are. Prefix tokens, which have no place, and channels that are left over are
    not turned.

    Args:
        grid: Where the tokens come from; a line of tokens may also be longer than this one.
        channels: c, of a head.

    Raises:
        ValueError: If there are too few channels for a pair on each axis.
    """

    def __init__(self, grid: TokenGrid, channels: int) -> None:
        super().__init__()
        self.grid = grid
        axes = max(sum(length > 1 for length in grid.size), 1)
        if channels < 2 * axes:
            raise ArgumentError(
                "rotary",
                f"must be false for heads of {channels} channels, got true; it needs {2 * axes}: take fewer heads",
            )
        self.pairs = channels // 2 // axes  # of each axis
        self.base = 100.0 if axes == 2 else 10_000.0

    def forward(self, tokens: Float[Tensor, "b h n c"]) -> Float[Tensor, "b h n c"]:
        """Turn the queries or the keys of the first n tokens.

        Raises:
            ValueError: If there are more tokens than those of a grid with rows and columns.
        """
        angles = self._angles(tokens.shape[2], tokens.device)
        cos, sin = angles.cos().to(tokens.dtype), angles.sin().to(tokens.dtype)
        turned = angles.shape[1]
        first, second = tokens[..., :turned], tokens[..., turned : 2 * turned]
        return torch.cat([first * cos - second * sin, first * sin + second * cos, tokens[..., 2 * turned :]], dim=-1)

    def _angles(self, n: int, device: torch.device) -> Float[Tensor, "n pairs"]:
        """The angles of the first n tokens. They are not kept: a buffer would be empty after a start on the meta
        device, and to compute them costs nothing beside the scores."""
        prefix = self.grid.num_prefix_tokens
        height, width = self.grid.size
        # not torch's default, which is bfloat16 in a training with bf16-true: it has no places above 256
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
