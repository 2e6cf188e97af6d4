"""E as a product of one matrix along the rows of the token grid and one along its columns."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longseq.arguments import ArgumentError, require, require_choice
from longseq.attention.grid import TokenGrid
from longseq.attention.mixer import blank
from longseq.attention.projection import (
    Linear,
    Projection,
    ProjectionLayer,
    refuse_other_lengths,
    resample_columns,
    short_product,
)
from longseq.attention.shard import summed

Start = Literal["random", "mean"]


class SeparableProjection(ProjectionLayer):
    """Shorten a grid of tokens along its rows and its columns: E = [P, E_y (x) E_x].

    E_y is (k_y, height) and E_x (k_x, width). So E has k = k_y k_x rows, and its weights grow with height + width, not
    with height * width. Prefix tokens have dense columns P, (k, prefix). E X costs 2 n k_y d + 2 k_y width k_x d FLOPs;
    a dense E costs 2 n k d.

    Args:
        along_rows: E_y, (k_y, height), or (h, k_y, height) with one matrix for each head.
        along_columns: E_x, (k_x, width), or (h, k_x, width).
        of_prefix: P, (k, prefix), or (h, k, prefix).
    """

    can_be_sharded = True

    def __init__(self, along_rows: Tensor, along_columns: Tensor, of_prefix: Tensor) -> None:
        super().__init__()
        self.along_rows, self.along_columns = nn.Parameter(along_rows), nn.Parameter(along_columns)
        self.of_prefix = nn.Parameter(of_prefix) if of_prefix.shape[-1] else None
        self.commutes = along_rows.ndim == 2  # matrices of heads differ by channel

    def forward(
        self, tokens: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None = None
    ) -> Float[Tensor, "b k d"]:
        E_y, E_x, of_prefix = self.along_rows, self.along_columns, self.of_prefix
        if self.shard is not None:
            E_y = E_y[..., self.shard.rows(E_y.shape[-1])]
            of_prefix = of_prefix if self.shard.rank == 0 else None
        prefix = 0 if of_prefix is None else of_prefix.shape[-1]
        height, width = E_y.shape[-1], E_x.shape[-1]
        count = tokens.shape[1] - prefix
        refuse_other_lengths(tokens, prefix + height * width, present)
        tokens = blank(tokens, present)
        if not self.commutes:  # (b, h, n, c): heads before tokens
            tokens = tokens.unflatten(-1, (len(E_y), -1)).transpose(1, 2)
        grid = tokens[..., prefix:, :]
        if missing := -count % width:
            grid = torch.cat([grid, grid.new_zeros(*grid.shape[:-2], missing, grid.shape[-1])], dim=-2)
        rows = (count + missing) // width
        by_row = grid.unflatten(-2, (rows, width)).flatten(-2)
        bands = (short_product if self.commutes else torch.matmul)(E_y[..., :rows], by_row)  # (b, k_y, width d)
        slots = E_x.unsqueeze(-3) @ bands.unflatten(-1, (width, -1))  # (b, k_y, k_x, d)
        short = slots.flatten(-3, -2)
        if of_prefix is not None:
            short = short + of_prefix @ tokens[..., :prefix, :]
        elif self.of_prefix is not None:
            short = short + 0 * self.of_prefix.sum()  # all processes must have a gradient for each weight, if only 0
        short = summed(short, self.shard)
        return short if self.commutes else short.transpose(1, 2).flatten(2)

    @torch.no_grad()
    def carry(self, trained: "SeparableProjection", old: TokenGrid, new: TokenGrid) -> None:
        lines = [TokenGrid((length, 1)) for length in (*old.size, *new.size)]
        self.along_rows.copy_(resample_columns(trained.along_rows, lines[0], lines[2]))
        self.along_columns.copy_(resample_columns(trained.along_columns, lines[1], lines[3]))
        if self.of_prefix is not None and trained.of_prefix is not None:
            self.of_prefix.copy_(trained.of_prefix)


@dataclass(frozen=True)
class Separable(Projection):
    """Learned E = E_y (x) E_x on the grid of tokens, k = k_y k_x: the paper's E in height + width instead of n columns.

    For an image of 1,024 x 1,024 pixels and k = 256 it has 32 thousand weights, a dense E 268 million. If all tokens
    are in one row or column, such as the frames of a sound, it is ``Linear``.

    Args:
        start: The initial weights. ``random``: E_y of N(0, 1/height), E_x of N(0, 1/width), so that entries of E have
            the variance 1/n. ``mean``: means over windows that tile the grid, which suit the keys of a pretrained
            model; the columns of prefix tokens start at zero.
        rows: k_y, which divides k; None for the k_y that fits the grid with k_y and k_x as equal as possible.
    """

    start: Start = "random"
    rows: int | None = None

    def __post_init__(self) -> None:
        require_choice("start", self.start, Start)

    def build(self, grid: TokenGrid, k: int, dim: int, heads: int | None = None) -> ProjectionLayer:
        if 1 in grid.size:
            return Linear(self.start).build(grid, k, dim, heads)
        k_y, k_x = self.slots(grid, k)
        count = heads or 1
        factors = [self._factor(count, *shape) for shape in zip((k_y, k_x), grid.size, strict=True)]
        of_prefix = torch.zeros(count, k, grid.num_prefix_tokens)
        if self.start == "random":
            of_prefix.normal_(std=grid.num_tokens**-0.5)
        weights: list[Any] = [*factors, of_prefix]
        return SeparableProjection(*(weight[0].clone() if heads is None else weight for weight in weights))

    def slots(self, grid: TokenGrid, k: int) -> tuple[int, int]:
        """k_y and k_x.

        Raises:
            ValueError: If no two factors of k fit the grid.
        """
        fitting = _pairs(grid, k)
        size = f"{grid.size[0]} x {grid.size[1]}"
        if not fitting:
            near = max(n for n in range(1, k) if _pairs(grid, n))
            raise ArgumentError("k", f"must give rows times columns within {size}, got k {k}; {near} does")
        if self.rows is not None:
            fitting = [pair for pair in fitting if pair[0] == self.rows]
        what = f"must give rows times columns within {size}, got k {k} and rows {self.rows}; leave rows out"
        require(bool(fitting), "rows", what)
        return min(fitting, key=lambda pair: abs(math.log(pair[0] / pair[1])))

    def _factor(self, count: int, k: int, length: int) -> Float[Tensor, "count k length"]:
        if self.start == "mean":
            return TokenGrid((length, 1)).window_means(k).repeat(count, 1, 1)
        return torch.randn(count, k, length) * length**-0.5


def _pairs(grid: TokenGrid, k: int) -> list[tuple[int, int]]:
    """The pairs of factors of k that fit the rows and columns of a grid."""
    height, width = grid.size
    return [(rows, k // rows) for rows in range(1, height + 1) if k % rows == 0 and k // rows <= width]
