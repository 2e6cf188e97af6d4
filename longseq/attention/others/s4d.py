"""S4D, a diagonal state-space model (arXiv:2206.11893), in both directions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longseq.arguments import require, require_choice, require_positive
from longseq.attention.grid import TokenGrid
from longseq.attention.layer import Stack
from longseq.attention.mechanism import Mechanism
from longseq.attention.mixer import copy_weights
from longseq.attention.others.fourier import convolve
from longseq.attention.others.sequence import FilterLayer
from longseq.compat.torch import at_least_float32

Start = Literal["lin", "inv"]


@dataclass(frozen=True)
class S4D(Mechanism):
    """x' = A x + B u, y = Re(C x) + D u, with a diagonal A for each channel, discretised by a zero-order hold.

    As a convolution: y = K * u, K_l = 2 Re(sum_i C_i (exp(dt A_i) - 1) / A_i exp(l dt A_i)) with B = 1, over N / 2
    states (their conjugates give the factor 2). The backward direction has the same A and dt, its own C, and begins at
    the next token, as in S4's code. Then GELU and a gated linear unit.

    A layer costs 4 n d^2 FLOPs for the gated unit, 15 n d log2(2 n) for three FFTs, and 4 n d N for the kernels, once
    per batch. Padding is zero and changes nothing, and no weight depends on n.

    Args:
        state: N, the states of a channel with their conjugates; even.
        start: ``lin``: A_i = -1/2 + i pi i (S4D-Lin). ``inv``: -1/2 + i (N / pi) (N / (2 i + 1) - 1) (S4D-Inv).
        lr: The highest learning rate of A and dt, which have no weight decay, as in S4's code.
    """

    state: int = 64
    start: Start = "lin"
    lr: float = 0.001

    any_length: ClassVar[bool] = True

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls(), cls(state=16, start="inv")]

    def layers(self, stack: Stack, grid: TokenGrid) -> "list[S4DLayer]":
        is_even = self.state >= 2 and self.state % 2 == 0
        require(is_even, "state", f"must be even and positive, got {self.state}; 64 is usual")
        require_choice("start", self.start, Start)
        require_positive("0.001 is usual", lr=self.lr)
        number = torch.arange(self.state // 2)
        is_lin = self.start == "lin"
        imag = math.pi * number if is_lin else self.state / math.pi * (self.state / (2 * number + 1) - 1)
        return [S4DLayer(trained.qkv.in_features, trained.proj_drop, imag, self.lr) for trained in stack]


class S4DLayer(FilterLayer):
    """A layer of S4D.

    Args:
        dim, proj_drop: As FilterLayer takes them.
        imag: The imaginary parts of A at the start, whose real parts are -1/2.
        lr: The highest learning rate of A and dt.

    Attributes:
        log_dt: log(dt), (d).
        log_A_real, A_imag: A = -exp(log_A_real) + i A_imag, (d, N / 2).
        C: Real and imaginary parts for each direction, (2, d, N / 2, 2).
    """

    def __init__(self, dim: int, proj_drop: nn.Module, imag: Float[Tensor, " states"], lr: float) -> None:
        super().__init__(dim, proj_drop)
        self.lr, states = lr, len(imag)
        low, high = math.log(0.001), math.log(0.1)
        self.log_dt = nn.Parameter(low + (high - low) * torch.rand(dim))
        self.log_A_real = nn.Parameter(torch.full((dim, states), math.log(0.5)))
        self.A_imag = nn.Parameter(imag.repeat(dim, 1))
        self.C = nn.Parameter(torch.randn(2, dim, states, 2) * 0.5**0.5)

    def kernels(self, n: int) -> Float[Tensor, "2 d n"]:
        """K of each direction. The powers exp(l dt A) are products of exp(s i dt A) and exp(j dt A), s near sqrt(n).

        Complex numbers are written as pairs: their exponential is slow on a CPU, and ONNX has none.
        """
        dt, C = at_least_float32(self.log_dt).exp()[:, None], at_least_float32(self.C)
        A_real, A_imag = -at_least_float32(self.log_A_real).exp(), at_least_float32(self.A_imag)
        growth, angle = dt * A_real, dt * A_imag
        # (exp(dt A) - 1) / A, without the difference of nearly equal numbers
        real, imag = torch.expm1(growth) * angle.cos() - 2 * (angle / 2).sin().square(), growth.exp() * angle.sin()
        size = A_real.square() + A_imag.square()
        real, imag = (real * A_real + imag * A_imag) / size, (imag * A_real - real * A_imag) / size
        C_real, C_imag = C.unbind(-1)
        C_real, C_imag = 2 * (C_real * real - C_imag * imag), 2 * (C_real * imag + C_imag * real)

        def powers(steps: Tensor) -> tuple[Tensor, Tensor]:
            size = torch.exp(growth[..., None] * steps)
            return size * torch.cos(angle[..., None] * steps), size * torch.sin(angle[..., None] * steps)

        block = 1 << (n.bit_length() // 2)
        real, imag = powers(torch.arange(0, n, block, device=dt.device))
        C_real, C_imag = C_real[..., None], C_imag[..., None]
        coarse = torch.cat([C_real * real - C_imag * imag, -C_real * imag - C_imag * real], dim=-2)
        fine = torch.cat(powers(torch.arange(block, device=dt.device)), dim=-2)
        return (coarse.mT @ fine).flatten(-2)[..., :n]

    def filter(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        return convolve(x, *self.kernels(x.shape[1]))

    @torch.no_grad()
    def carry(self, trained: nn.Module, old: TokenGrid, new: TokenGrid) -> list[str]:
        """Copy all weights. If the grid has f times the tokens, dt is divided by f, so that the memory spans the same
        share of the sequence, as LongConv's resampled kernel does."""
        fresh = copy_weights(self, trained, set())
        if "log_dt" not in fresh:
            self.log_dt += math.log(math.prod(old.size) / math.prod(new.size))
        return fresh

    def no_weight_decay(self) -> set[str]:
        return {"log_dt", "log_A_real", "A_imag"}

    def learning_rates(self, learning_rate: float) -> dict[str, float]:
        return dict.fromkeys(sorted(self.no_weight_decay()), min(self.lr, learning_rate))
