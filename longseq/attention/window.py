"""Projections over windows of the sequence: pooling and convolution with window and stride n / k."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longseq.attention.grid import TokenGrid
from longseq.attention.projection import Projection, ProjectionLayer, blank


class WindowProjection(ProjectionLayer):
    """Windows of ceil(n / k) tokens, side by side along the sequence; the last may be shorter if k does not divide n.

    There are ceil(n / window) windows: k, or fewer where rounding up leaves no token for the last ones. The window's
    length follows from the configured n: a shorter sequence has fewer windows and a longer one more,
    all of the same length.

    Args:
        n: Tokens in.
        k: Tokens out, at most.
    """

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.window = math.ceil(n / k)

    def windows(self, tokens: Tensor, padding: float = 0.0) -> Tensor:
        """(b, n, d) -> (b, k, window, d), with padding behind the last token."""
        missing = -tokens.shape[1] % self.window
        if missing:
            tokens = F.pad(tokens, (0, 0, 0, missing), value=padding)
        return tokens.unflatten(1, (-1, self.window))

    def filled(self, present: Bool[Tensor, "b n 1"]) -> Bool[Tensor, "b k 1"]:
        return self.windows(present).any(dim=2)


class MeanProjection(WindowProjection):
    """The mean over each window, without absent tokens."""

    commutes = True

    def forward(
        self, tokens: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None = None
    ) -> Float[Tensor, "b k d"]:
        if present is None:
            present = tokens.new_ones(1, tokens.shape[1], 1, dtype=torch.bool)
        counts = self.windows(present).sum(dim=2).clamp(min=1)
        return self.windows(blank(tokens, present)).sum(dim=2) / counts.to(tokens.dtype)


class MaxProjection(WindowProjection):
    """The maximum over each window, channel by channel; not linear, so it does not commute."""

    commutes = False

    def forward(
        self, tokens: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None = None
    ) -> Float[Tensor, "b k d"]:
        lowest = -float("inf")
        if present is None:
            return self.windows(tokens, lowest).amax(dim=2)
        short = self.windows(tokens.masked_fill(~present, lowest), lowest).amax(dim=2)
        return short.masked_fill(~self.filled(present), 0.0)


class ConvProjection(WindowProjection):
    """A learned convolution whose kernel and stride are the window; kernels differ by channel, so it does not commute.

    Args:
        n: Tokens in.
        k: Tokens out, at most.
        dim: Channels in and out.
        groups: dim for a depthwise kernel, 1 for a full one, the number of heads for one full kernel per head.
    """

    commutes = False

    def __init__(self, n: int, k: int, dim: int, groups: int) -> None:
        super().__init__(n, k)
        self.convolution = nn.Conv1d(dim, dim, self.window, self.window, groups=groups, bias=False)
        nn.init.normal_(self.convolution.weight, std=(dim // groups * self.window) ** -0.5)  # by fan-in, as learned E

    def forward(
        self, tokens: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None = None
    ) -> Float[Tensor, "b k d"]:
        missing = -tokens.shape[1] % self.window
        channels = F.pad(blank(tokens, present).mT, (0, missing))
        return self.convolution(channels).mT

    @torch.no_grad()
    def carry(self, trained: "ConvProjection", old: TokenGrid, new: TokenGrid) -> None:
        kernel = trained.convolution.weight
        ratio = trained.window / self.window  # keeps the kernel's sum, as E keeps its row sums
        self.convolution.weight.copy_(F.interpolate(kernel, self.window, mode="linear", antialias=False) * ratio)


@dataclass(frozen=True)
class Mean(Projection):
    """Mean pooling with window and stride n / k; nothing is learned. A longer sequence has more windows."""

    any_length: ClassVar[bool] = True

    def build(self, grid: TokenGrid, k: int, dim: int, heads: int | None = None) -> MeanProjection:
        return MeanProjection(grid.num_tokens, k)


@dataclass(frozen=True)
class Max(Projection):
    """Max pooling with window and stride n / k; nothing is learned. A longer sequence has more windows."""

    any_length: ClassVar[bool] = True

    def build(self, grid: TokenGrid, k: int, dim: int, heads: int | None = None) -> MaxProjection:
        return MaxProjection(grid.num_tokens, k)


@dataclass(frozen=True)
class Conv(Projection):
    """A learned convolution with kernel and stride n / k. A longer sequence has more windows.

    Args:
        full: Whether the kernel combines all channels, with (d, d, n/k) weights, or with sharing ``none`` the channels
            of a head. Otherwise it is depthwise, with (d, n/k) weights.
    """

    full: bool = False

    any_length: ClassVar[bool] = True

    def build(self, grid: TokenGrid, k: int, dim: int, heads: int | None = None) -> ConvProjection:
        return ConvProjection(grid.num_tokens, k, dim, (heads or 1) if self.full else dim)
