"""Sequences whose tokens lie on several processes: what a layer sums over tokens, it sums over all of them.

Each process has some rows of the token grid, and a copy of the prefix tokens, of which only the first process gives
keys and values. Every process computes the loss; all gradients are those of the sum of these losses, as an all-reduce
whose backward pass is an all-reduce makes them. So their mean over the processes, which DistributedDataParallel takes,
is the gradient of the loss.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from longseq.arguments import ArgumentError


class Shard:
    """The share of a process in its sequences.

    Args:
        group: The processes that have the others.
        num_prefix_tokens: Tokens in front of the grid, which every process has.

    Attributes:
        rank, size: The place of the process, and how many there are.
        num_tokens: Tokens of the whole sequence, prefix included; the encoder sets it for each batch.
        first: The place of the first token of this process that gives keys and values; set with it.
    """

    def __init__(self, group: Any, num_prefix_tokens: int) -> None:
        self.group, self.num_prefix_tokens = group, num_prefix_tokens
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.num_tokens = self.first = 0

    def rows(self, height: int) -> slice:
        """The rows of a grid that this process has: as many as the others, or one less.

        Raises:
            ValueError: If there are fewer rows than processes.
        """
        if height < self.size:
            raise ArgumentError(
                "tokens", f"must be at most the {height} rows of a sequence, got {self.size}; use fewer"
            )
        return slice(self.rank * height // self.size, (self.rank + 1) * height // self.size)

    def of_keys(self, tokens: Tensor) -> Tensor:
        """The tokens (b, n, ...) that give keys and values: prefix tokens count once."""
        return tokens if self.rank == 0 else tokens[:, self.num_prefix_tokens :]


def summed(values: Tensor, shard: Shard | None) -> Tensor:
    """The sum over all processes; so is its gradient."""
    return values if shard is None else Sum.apply(values, shard.group)


@torch.no_grad()
def highest(values: Tensor, shard: Shard) -> Tensor:
    """The maximum over all processes, as a constant."""
    values = values.detach().clone()
    dist.all_reduce(values, dist.ReduceOp.MAX, group=shard.group)
    return values


class Sum(torch.autograd.Function):
    """All-reduce; its backward pass is an all-reduce, because every process has a loss."""

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
    """The rows of this process between the nearest ones of its neighbours; zeros beyond the ends of the grid.

    Raises:
        ValueError: If a process has fewer rows than its neighbours want.
    """
    return Halo.apply(grid, rows, shard) if rows else grid


class Halo(torch.autograd.Function):
    """Send the first rows to the process before, the last ones to the process after, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, grid: Tensor, rows: int, shard: Shard) -> Tensor:
        if grid.shape[2] < rows:
            what = f"must leave each process the {rows} rows that its neighbours' kernels reach, got {grid.shape[2]}"
            raise ArgumentError("tokens", f"{what}; use fewer")
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
    """What the processes before and after have sent; zeros where there is none."""
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
    """exp(scores - their maximum over all tokens, of which dim has this process's): the softmax before its division."""
    if present is not None:
        scores = scores.masked_fill(~present, -float("inf"))
    return (scores - highest(scores.amax(dim, keepdim=True), shard)).exp()


class Split(nn.Module):
    """A layer whose sums over tokens may go over several processes.

    Attributes:
        shard: The share of this process; None where one process has all tokens.
    """

    shard: Shard | None = None
