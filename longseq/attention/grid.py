"""Where the tokens of a sequence come from."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from longseq.arguments import require


@dataclass(frozen=True)
class TokenGrid:
    """A grid (height, width) of tokens, row by row, after the prefix tokens; for sound (frames, bands).

    Args:
        size: Rows and columns of the grid, in tokens.
        num_prefix_tokens: Class and register tokens in front of the grid.
    """

    size: tuple[int, int]
    num_prefix_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """n, the length of the whole sequence."""
        return self.num_prefix_tokens + math.prod(self.size)

    def window_means(self, k: int) -> Float[Tensor, "k n"]:
        """The matrix that takes means over k windows: one window per prefix token, and nearly square windows that tile
        the grid.

        Raises:
            ValueError: If the prefix tokens leave no window for the grid.
        """
        prefix = self.num_prefix_tokens
        require(k > prefix, "k", f"must be more than {prefix} (the prefix tokens), got {k}; raise k")
        num_windows = k - prefix
        height, width = self.size
        bands = min(max(round(math.sqrt(num_windows * height / width)), math.ceil(num_windows / width)), height)
        bands = min(bands, num_windows)
        means = torch.zeros(k, self.num_tokens)
        means[:, :prefix] = torch.eye(k, prefix)
        row = prefix
        for band, rows in enumerate(torch.arange(height).tensor_split(bands)):
            in_band = num_windows * (band + 1) // bands - num_windows * band // bands
            for columns in torch.arange(width).tensor_split(in_band):
                tokens = prefix + (rows[:, None] * width + columns).flatten()
                means[row, tokens] = 1 / len(tokens)
                row += 1
        return means
