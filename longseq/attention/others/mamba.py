"""Mamba (arXiv:2312.00752), a state-space model with a selective scan, in both directions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longseq.arguments import require_positive
from longseq.attention.grid import TokenGrid
from longseq.attention.layer import Stack
from longseq.attention.mechanism import Mechanism
from longseq.attention.others.mamba2 import MambaLayer, accumulated, causal, start_of_dt
from longseq.compat.torch import at_least_float32, without_autocast

_CHUNK = 64  # Q: tokens whose states are in memory at once


@dataclass(frozen=True)
class Mamba(Mechanism):
    """h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t, y_t = C_t' h_t + D x_t, with N states for each of e d channels (eq. 2).

    dt (a number for each channel, of rank r), B and C (N numbers for all channels) are computed from x, which comes
    from the tokens through a short causal convolution. The result is (y silu(z)) W. Each direction has its own weights,
    the backward one begins at the last token before the padding, and the results of both are summed.

    The states are computed in chunks of Q = 64 tokens, one chunk after the other, in log2(Q) steps within each. The
    backward pass computes the states of a chunk again, so that only the last ones of each chunk are kept: time and
    memory grow with n. For e = ``expand``, a direction costs 6 e n d^2 FLOPs for the linear maps of x, z and W,
    4 n e d (r + N) for those of dt, B and C, and 2 n e d N for y; the scan itself has about 3 n e d N log2(Q)
    multiplications and additions, which are no matrix products. No weight depends on n.

    Args:
        state: N.
        expand: e, the width of x and z as a multiple of d.
        conv: Width of the convolution, in tokens.
        rank: r; None for d / 16, rounded up.
    """

    state: int = 16
    expand: int = 2
    conv: int = 4
    rank: int | None = None

    any_length: ClassVar[bool] = True

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls(), cls(state=4, expand=1, conv=3, rank=3)]

    def layers(self, stack: Stack, grid: TokenGrid) -> "list[MambaLayer]":
        given = {} if self.rank is None else {"rank": self.rank}
        require_positive("leave it out for the paper's", state=self.state, expand=self.expand, conv=self.conv, **given)
        return [
            MambaLayer(dim, trained.proj_drop, *(_Direction(dim, self) for _ in range(2)))
            for trained, dim in ((trained, trained.qkv.in_features) for trained in stack)
        ]


class _Direction(nn.Module):
    """Mamba from the first token to the last: (b, n, d) -> (b, n, e d), before ``out_proj``.

    Weights have the names and the initial values of the paper's code.
    """

    def __init__(self, dim: int, options: Mamba) -> None:
        super().__init__()
        inner, rank = options.expand * dim, options.rank or -(-dim // 16)
        self.sizes = [rank, options.state, options.state]
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, options.conv, groups=inner)
        self.x_proj = nn.Linear(inner, sum(self.sizes), bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        nn.init.uniform_(self.dt_proj.weight, -(rank**-0.5), rank**-0.5)
        self.dt_proj.bias = nn.Parameter(start_of_dt(inner))
        self.A_log = nn.Parameter(torch.arange(1.0, options.state + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n e"]:
        x, z = self.in_proj(x).chunk(2, dim=-1)
        x = causal(self.conv1d, x)
        low, B, C = self.x_proj(x).split(self.sizes, dim=-1)
        dt = self.dt_proj(low)
        with without_autocast(x):
            dt, values, B, C = map(at_least_float32, (dt, x, B, C))
            A, D = -at_least_float32(self.A_log).exp(), at_least_float32(self.D)
            mixed = _selective_scan(values, F.softplus(dt), A, B, C) + D * values
            return (mixed * F.silu(at_least_float32(z))).to(x.dtype)


def _selective_scan(
    x: Float[Tensor, "b n e"],
    dt: Float[Tensor, "b n e"],
    A: Float[Tensor, "e s"],
    B: Float[Tensor, "b n s"],
    C: Float[Tensor, "b n s"],
) -> Float[Tensor, "b n e"]:
    """y_t = C_t' h_t, chunk by chunk."""
    state, mixed = x.new_zeros(x.shape[0], *A.shape), []
    for parts in zip(*(part.split(_CHUNK, dim=1) for part in (x, dt, B, C)), strict=True):
        if torch.is_grad_enabled():  # dt, x, B and C are kept anyway, and states would take N times their memory
            of_chunk, state = checkpoint(_of_chunk, state, A, *parts, use_reentrant=False, preserve_rng_state=False)
        else:
            of_chunk, state = _of_chunk(state, A, *parts)
        mixed.append(of_chunk)
    return torch.cat(mixed, dim=1)


def _of_chunk(
    state: Float[Tensor, "b e s"],
    A: Float[Tensor, "e s"],
    x: Float[Tensor, "b q e"],
    dt: Float[Tensor, "b q e"],
    B: Float[Tensor, "b q s"],
    C: Float[Tensor, "b q s"],
) -> tuple[Float[Tensor, "b q e"], Float[Tensor, "b e s"]]:
    """The results of a chunk and its last states, from the last states of the chunk before."""
    decay = torch.exp(dt[..., None] * A)
    states = (dt * x)[..., None] * B[:, :, None]
    first = states[:, :1] + decay[:, :1] * state[:, None]
    states = accumulated(torch.cat([first, states[:, 1:]], dim=1), decay)
    return (states @ C[..., None]).squeeze(-1), states[:, -1]
