"""Mamba-2 (arXiv:2405.21060), a state-space model whose states depend on the tokens, in both directions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longseq.arguments import require_positive
from longseq.attention.grid import TokenGrid
from longseq.attention.layer import Stack
from longseq.attention.mechanism import Mechanism
from longseq.attention.others.sequence import SequenceLayer, backwards
from longseq.compat.torch import at_least_float32, without_autocast

_CHUNK = 64  # Q, the tokens of a chunk, as in the paper's listing 1


@dataclass(frozen=True)
class Mamba2(Mechanism):
    """H_t = exp(dt_t A) H_(t-1) + dt_t B_t x_t', y_t = C_t' H_t + D x_t, with a number A for each head.

    x (P channels in each head), B, C (N channels, shared by all heads) and dt are computed from the tokens, the first
    three through a short causal convolution. The result is RMSNorm(y silu(z)) W. Each direction has its own weights,
    the backward one begins at the last token before the padding, and the results of both are summed.

    The states are computed in chunks of Q = 64 tokens (section 6). On a GPU, in bfloat16, the kernel of the package
    ``mamba_ssm`` does this if it is installed. For e = ``expand``, a direction costs 6 e n d^2 FLOPs for the linear
    maps of x, z and W, 4 n d N for those of B and C, and 2 n Q (N + e d) + 4 n e d N in the chunks. No weight depends
    on n. The states of the m = n / Q chunks are summed in log2(m) steps. Each step stores a copy of all of them, e m d
    N numbers, for the backward pass, so the memory of a training grows with n log n.

    Args:
        state: N.
        expand: e, the width of x and z as a multiple of d. It is divided among the trunk's heads, P = e d / h. (The
            paper has P = 64: use d / 32 heads.)
        conv: Width of the convolution, in tokens.
    """

    state: int = 128
    expand: int = 2
    conv: int = 4

    any_length: ClassVar[bool] = True

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls(state=16), cls(state=8, expand=1, conv=3)]

    def layers(self, stack: Stack, grid: TokenGrid) -> "list[MambaLayer]":
        require_positive("leave it out for the paper's", state=self.state, expand=self.expand, conv=self.conv)
        sizes = [(trained.qkv.in_features, trained.num_heads) for trained in stack]
        return [
            MambaLayer(dim, trained.proj_drop, *(_Direction(dim, num_heads, self) for _ in range(2)))
            for trained, (dim, num_heads) in zip(stack, sizes, strict=True)
        ]


class MambaLayer(SequenceLayer):
    """A layer of Mamba or Mamba2.

    Args:
        dim, proj_drop: As SequenceLayer takes them.
        from_first, from_last: The recurrences of both directions: (b, n, d) -> (b, n, e d), and ``out_proj``.
    """

    def __init__(self, dim: int, proj_drop: nn.Module, from_first: nn.Module, from_last: nn.Module) -> None:
        super().__init__(dim, proj_drop)
        self.from_first: Any = from_first
        self.from_last: Any = from_last

    def mix(
        self, x: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None, num_queries: int | None
    ) -> Float[Tensor, "b q d"]:
        after = backwards(self.from_last(backwards(x, present)), present)[:, :num_queries]
        return self.from_first.out_proj(self.from_first(x)[:, :num_queries]) + self.from_last.out_proj(after)


class _Direction(nn.Module):
    """Mamba-2 from the first token to the last: (b, n, d) -> (b, n, e d), before ``out_proj``.

    Weights have the names and the initial values of the paper's code.
    """

    def __init__(self, dim: int, num_heads: int, options: Mamba2) -> None:
        super().__init__()
        inner = options.expand * dim
        self.sizes = [inner, inner + 2 * options.state, num_heads]
        self.in_proj = nn.Linear(dim, sum(self.sizes), bias=False)
        self.conv1d = nn.Conv1d(self.sizes[1], self.sizes[1], options.conv, groups=self.sizes[1])
        self.dt_bias = nn.Parameter(start_of_dt(num_heads))
        self.A_log = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(num_heads))
        self.norm = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n e"]:
        z, x_B_C, dt = self.in_proj(x).split(self.sizes, dim=-1)
        x_B_C = causal(self.conv1d, x_B_C)
        inner, state = self.sizes[0], (self.sizes[1] - self.sizes[0]) // 2
        with without_autocast(x):
            dt = F.softplus(at_least_float32(dt) + at_least_float32(self.dt_bias))
            values, B, C = x_B_C.split([inner, state, state], dim=-1)
            values = values.unflatten(-1, (self.sizes[2], -1))
            decay, D = -at_least_float32(self.A_log).exp(), at_least_float32(self.D)
            scan = kernel_for(values.device.type, values.dtype)
            if scan is None:
                values, B, C = map(at_least_float32, (values, B, C))
                mixed = _state_space_dual(values * dt[..., None], decay * dt, B, C) + D[:, None] * values
            else:  # the kernel takes B and C for groups of heads; here there is one group
                mixed = scan(values, dt, decay, B[:, :, None], C[:, :, None], chunk_size=_CHUNK, D=D)
            gated = at_least_float32(mixed).flatten(-2) * F.silu(at_least_float32(z))
            return F.rms_norm(gated, [inner], at_least_float32(self.norm), eps=1e-5).to(x_B_C.dtype)


def kernel_for(device: str, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """The Triton kernel of the paper's authors; None unless mamba_ssm is installed and the values are on a GPU, in
    bfloat16 or float16. In float32 it would multiply as TF32, with 11 bits."""
    if device != "cuda" or dtype not in (torch.bfloat16, torch.float16) or not _has_kernel():
        return None
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined  # type: ignore[import-not-found]

    return mamba_chunk_scan_combined


@torch.compiler.assume_constant_result
def _has_kernel() -> bool:
    return torch.cuda.is_available() and find_spec("mamba_ssm") is not None


def _state_space_dual(
    x: Float[Tensor, "b n h p"], log_decay: Float[Tensor, "b n h"], B: Float[Tensor, "b n s"], C: Float[Tensor, "b n s"]
) -> Float[Tensor, "b n h p"]:
    """y_t = C_t' H_t, H_t = exp(log_decay_t) H_(t-1) + B_t x_t', by products within chunks and states between them."""
    n, h = x.shape[1:3]
    padding = -n % _CHUNK
    x, log_decay, B, C = (
        F.pad(part, (0, 0) * (part.ndim - 2) + (0, padding)).unflatten(1, (-1, _CHUNK)) for part in (x, log_decay, B, C)
    )
    total = log_decay.cumsum(2)  # (b, chunks, Q, h), from the chunk's first token on
    past = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=x.device).tril()
    of_heads = total.mT
    between = (of_heads[..., :, None] - of_heads[..., None, :]).masked_fill(~past, -float("inf")).exp()
    within = ((C @ B.mT)[:, :, None] * between) @ x.transpose(2, 3)  # (b, chunks, h, Q, p)
    left = (total[:, :, -1:] - total).exp()[..., None] * x
    states = (left.flatten(-2).mT @ B).unflatten(2, (h, -1))  # (b, chunks, h, p, s), at the end of each chunk
    before = F.pad(accumulated(states, total[:, :, -1].exp()[..., None, None]), (0, 0) * 3 + (1, -1))
    from_before = (C @ before.flatten(2, 3).mT).unflatten(-1, (h, -1)) * total.exp()[..., None]
    return (within.transpose(2, 3) + from_before).flatten(1, 2)[:, :n]


def start_of_dt(count: int) -> Float[Tensor, " count"]:
    """Numbers whose softplus is dt, which starts in 0.001..0.1, uniformly by its logarithm."""
    low, high = math.log(0.001), math.log(0.1)
    dt = torch.exp(low + (high - low) * torch.rand(count))
    return dt + torch.log(-torch.expm1(-dt))


def causal(conv: nn.Conv1d, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
    """A convolution over a token and those before it, and SiLU."""
    return F.silu(conv(F.pad(x.mT, (conv.kernel_size[0] - 1, 0)))).mT


def accumulated(states: Float[Tensor, "b m *_"], decay: Float[Tensor, "b m *_"]) -> Float[Tensor, "b m *_"]:
    """H_i = decay_i H_(i-1) + states_i. Each step doubles the number of summed states: log2(m) steps."""
    step, count = 1, states.shape[1]
    while step < count:
        later = (0, 0) * (states.ndim - 2) + (step, -step)
        states = states + decay * F.pad(states, later)
        decay = decay * F.pad(decay, later, value=1.0)
        step *= 2
    return states
