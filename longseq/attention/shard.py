"""Sequences whose tokens are distributed over several processes: a layer's sums over tokens go over all processes.

Each process has some rows of the token grid and a copy of the prefix tokens, whose keys and values only the first
process computes. Every process computes the loss. The backward pass of an all-reduce is an all-reduce, so gradients are
those of the sum of these equal losses; DistributedDataParallel takes their mean over the processes, which is the
gradient of the loss.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from longseq.arguments import require
from longseq.compat.torch import at_least_float32


class Shard:
    """The part of a sequence that a process has.

    Args:
        group: The processes that share a sequence.
        num_prefix_tokens: Tokens before the grid, which every process has.

    Attributes:
        rank, size: The rank of this process, and the number of processes.
        num_tokens: Tokens of the whole sequence, including prefix tokens; the encoder sets it for each batch.
        first: The position of this process's first token with keys and values; the encoder sets it for each batch.
    """

    def __init__(self, group: Any, num_prefix_tokens: int) -> None:
        self.group, self.num_prefix_tokens = group, num_prefix_tokens
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.num_tokens = self.first = 0

    def rows(self, height: int) -> slice:
        """The rows of a grid that this process has. Numbers of rows differ by one at most.

        Raises:
            ValueError: If there are fewer rows than processes.
        """
        what = f"must be at most the {height} rows of a sequence, got {self.size}; use fewer"
        require(height >= self.size, "tokens", what)
        return slice(self.rank * height // self.size, (self.rank + 1) * height // self.size)

    def of_keys(self, tokens: Tensor) -> Tensor:
        """This process's tokens (b, n, ...) with keys and values: only the first process has those of prefix tokens."""
        return tokens if self.rank == 0 else tokens[:, self.num_prefix_tokens :]


def summed(values: Tensor, shard: Shard | None) -> Tensor:
    """The sum over all processes; its gradient is summed over all processes too."""
    return values if shard is None else _Sum.apply(values, shard.group)


@torch.no_grad()
def highest(values: Tensor, shard: Shard) -> Tensor:
    """The maximum over all processes, as a constant."""
    values = values.detach().clone()
    dist.all_reduce(values, dist.ReduceOp.MAX, group=shard.group)
    return values


class _Sum(torch.autograd.Function):
    """All-reduce. Its backward pass is an all-reduce too, because every process computes the loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        values = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def with_halo(grid: Float[Tensor, "b d rows columns"], rows: int, shard: Shard) -> Float[Tensor, "b d _ columns"]:
    """The rows of this process with the nearest rows of its neighbours on both sides; zeros at the ends of the grid.

    Raises:
        ValueError: If a process has fewer rows than its neighbours need.
    """
    return _Halo.apply(grid, rows, shard) if rows else grid


class _Halo(torch.autograd.Function):
    """Send the first rows to the previous process and the last rows to the next one, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, grid: Tensor, rows: int, shard: Shard) -> Tensor:
        what = f"must leave each process the {rows} rows that its neighbours' kernels reach, got {grid.shape[2]}"
        require(grid.shape[2] >= rows, "tokens", f"{what}; use fewer")
        ctx.rows, ctx.shard = rows, shard
        before, after = _exchanged(grid[:, :, :rows], grid[:, :, -rows:], shard)
        return torch.cat([before, grid, after], dim=2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        rows, grad = ctx.rows, grads[0]
        own = grad[:, :, rows:-rows].clone()
        of_first, of_last = _exchanged(grad[:, :, :rows], grad[:, :, -rows:], ctx.shard)
        own[:, :, :rows] += of_first
        own[:, :, -rows:] += of_last
        return own, None, None


def _exchanged(to_before: Tensor, to_after: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """What the previous and the next process have sent; zeros if there is no such process."""
    requests, received = [], []
    for step, sent in ((-1, to_before), (1, to_after)):
        other = shard.rank + step
        buffer = torch.zeros_like(sent, memory_format=torch.contiguous_format)
        received.append(buffer)
        if 0 <= other < shard.size:
            peer = dist.get_global_rank(shard.group, other)
            requests.append(dist.P2POp(dist.isend, sent.contiguous(), peer, shard.group))
            requests.append(dist.P2POp(dist.irecv, buffer, peer, shard.group))
    for request in dist.batch_isend_irecv(requests) if requests else []:
        request.wait()
    return received[0], received[1]


def exponentials(scores: Tensor, dim: int, present: Tensor | None, shard: Shard) -> Tensor:
    """exp(scores - m), the numerator of a softmax over all tokens, where m is the maximum over all processes.

    Args:
        scores: Those of this process's tokens.
        dim: The dimension of the tokens.
        present: False where a token is padding.
        shard: This process's part of the tokens.
    """
    if present is not None:
        scores = scores.masked_fill(~present, -float("inf"))
    return (scores - highest(scores.amax(dim, keepdim=True), shard)).exp()


def shared_softmax(scores: Tensor, dim: int, present: Tensor | None, shard: Shard) -> Tensor:
    """A softmax over the tokens of all processes, in float32 at least. The arguments are those of ``exponentials``.

    It is divided before anything is multiplied by it: a sum over more than 65,504 exponentials may exceed float16.
    """
    weights = exponentials(at_least_float32(scores), dim, present, shard)
    return weights / summed(weights.sum(dim, keepdim=True), shard)


class Split(nn.Module):
    """A layer whose sums over tokens may go over several processes.

    Attributes:
        shard: This process's part of the tokens; None if one process has all tokens.
    """

    shard: Shard | None = None


class SplitSums(Split):
    """A split layer that sums over keys.

    Args:
        sums_over_tokens: Whether keys and values are those of the tokens; False if a projection has shortened them, of
            which each process has all.
    """

    def __init__(self, sums_over_tokens: bool) -> None:
        super().__init__()
        self.sums_over_tokens = sums_over_tokens

    @property
    def shard_of_sums(self) -> Shard | None:
        return self.shard if self.sums_over_tokens else None
