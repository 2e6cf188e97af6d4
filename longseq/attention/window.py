"""Projections over windows of the sequence: pooling and convolution with window and stride n / k."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longseq.attention.grid import TokenGrid
from longseq.attention.mixer import blank
from longseq.attention.projection import Projection, ProjectionLayer, resample_columns
from longseq.attention.shard import Shard, highest, summed
from longseq.compat.torch import is_plain


class WindowProjection(ProjectionLayer):
    """Windows of ceil(n / k) tokens, side by side along the sequence; the last may be shorter if k does not divide n.

    There are ceil(n / window) windows: k, or fewer if rounding up leaves no tokens for the last ones. The length of a
    window follows from the configured n: a shorter sequence has fewer windows and a longer one more, all of that
    length.

    Args:
        n: Tokens in.
        k: Tokens out, at most.
    """

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.window = math.ceil(n / k)

    can_be_sharded = True

    def windows(self, tokens: Tensor, padding: float = 0.0) -> Tensor:
        """(b, n, d) -> (b, k, window, d), with padding after the last token. Of a sequence on several processes: the
        windows that contain a token of this process, with padding in place of its neighbours' tokens."""
        before = 0 if self.shard is None else self.shard.first % self.window
        missing = -(before + tokens.shape[1]) % self.window
        if before or missing:
            tokens = F.pad(tokens, (0, 0, before, missing), value=padding)
        return tokens.unflatten(1, (-1, self.window))

    def placed(self, short: Float[Tensor, "b m d"], empty: float = 0.0) -> Float[Tensor, "b k d"]:
        """The values of this process's windows, put in their places among the windows of all processes."""
        if self.shard is None:
            return short
        k = math.ceil(self.shard.num_tokens / self.window)
        return F.pad(short, (0, 0, self._begin, k - self._begin - short.shape[1]), value=empty)

    @property
    def _begin(self) -> int:
        """The first window of this process."""
        return 0 if self.shard is None else self.shard.first // self.window

    def filled(self, present: Bool[Tensor, "b n 1"]) -> Bool[Tensor, "b k 1"]:
        own = self.windows(present).any(dim=2)
        return own if self.shard is None else highest(self.placed(own).float(), self.shard) > 0


class MeanProjection(WindowProjection):
    """The mean over each window, without padding."""

    commutes = True

    def forward(
        self, tokens: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None = None
    ) -> Float[Tensor, "b k d"]:
        exact = torch.promote_types(tokens.dtype, torch.float32)  # float16 ends at 65,504: too few for counts and sums
        counted = tokens.new_ones(1, tokens.shape[1], 1, dtype=torch.bool) if present is None else present
        counts = self.windows(counted).sum(dim=2).to(exact)
        sums = self.windows(blank(tokens, present)).sum(dim=2, dtype=exact)
        if self.shard is not None:
            both = torch.cat([sums, counts.expand(len(sums), -1, -1)], dim=-1)
            sums, counts = summed(self.placed(both), self.shard).split([sums.shape[-1], 1], dim=-1)
        return (sums / counts.clamp(min=1)).to(tokens.dtype)


class MaxProjection(WindowProjection):
    """The maximum over each window, channel by channel; not linear, so it does not commute."""

    commutes = False

    def forward(
        self, tokens: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None = None
    ) -> Float[Tensor, "b k d"]:
        lowest = -float("inf")
        there = tokens if present is None else tokens.masked_fill(~present, lowest)
        if self.shard is not None:
            return self._over_shards(self.windows(there, lowest), self.shard)
        short = self.windows(there, lowest).amax(dim=2)
        return short if present is None else short.masked_fill(~self.filled(present), 0.0)

    def _over_shards(self, windows: Float[Tensor, "b m window d"], shard: Shard) -> Float[Tensor, "b k d"]:
        """The mean of all tokens that equal the maximum. It has the value and gradient of the maximum, but is a sum,
        which can be taken over several processes."""
        most = highest(self.placed(windows.amax(dim=2), -float("inf")), shard)
        most = most[:, self._begin : self._begin + windows.shape[1], None]
        is_most = (windows == most) & windows.isfinite()
        both = [windows.masked_fill(~is_most, 0).sum(2), is_most.sum(2).to(windows.dtype)]
        sums, counts = summed(self.placed(torch.cat(both, dim=-1)), shard).chunk(2, dim=-1)
        return sums / counts.clamp(min=1)


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
        windows = self.windows(blank(tokens, present))
        return summed(self.placed(self._convolved(windows)), self.shard)

    def _convolved(self, windows: Float[Tensor, "b k window d"]) -> Float[Tensor, "b k d"]:
        """The convolution as a product, because a convolution copies all tokens, transposed, in each direction."""
        # on the meta device FLOPs are counted, and those of elementwise products would not be
        if windows.is_meta or not is_plain(self.convolution, nn.Conv1d):
            return self.convolution(windows.flatten(1, 2).mT).mT
        weight, groups = self.convolution.weight.to(windows.dtype), self.convolution.groups
        if groups == len(weight):
            return (windows * weight.squeeze(1).mT.contiguous()).sum(dim=2)
        by_group = windows.unflatten(-1, (groups, -1))
        # einsum sums in alphabetical order: t before u, tokens before channels, is the order in memory
        return torch.einsum("bktgu,gout->bkgo", by_group, weight.unflatten(0, (groups, -1))).flatten(2)

    @torch.no_grad()
    def carry(self, trained: "ConvProjection", old: TokenGrid, new: TokenGrid) -> None:
        lines = [TokenGrid((layer.window, 1)) for layer in (trained, self)]
        self.convolution.weight.copy_(resample_columns(trained.convolution.weight, *lines))


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
