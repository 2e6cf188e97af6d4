"""LRU, the linear recurrent unit (arXiv:2303.06349), in both directions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longseq.arguments import require, require_positive
from longseq.attention.grid import TokenGrid
from longseq.attention.layer import Stack
from longseq.attention.mechanism import Mechanism
from longseq.attention.mixer import copy_weights
from longseq.attention.others.sequence import FilterLayer
from longseq.compat.torch import at_least_float32


@dataclass(frozen=True)
class LRU(Mechanism):
    """x_k = Lambda x_(k-1) + exp(gamma) B u_k, y_k = Re(C x_k) + D u_k; then GELU and a gated linear unit.

    Lambda = exp(-exp(nu) + i exp(theta)) is diagonal, N complex numbers. The states of both directions have the same
    Lambda and B, and matrices C of their own: y_k = Re(C x_k + C' x'_k) + D u_k, where x' comes from the last token.

    The recurrence is computed as a convolution with the powers of Lambda, by FFTs. A layer costs 4 n d^2 FLOPs for the
    gated unit, 4 n d N for B, 8 n d N for C and C', and 40 n N log2(2 n) for eight real FFTs, two of which run once per
    batch. Padding is zero and changes nothing, and no weight depends on n.

    Args:
        state: N.
        r_min: The inner radius of the ring in which Lambda starts, uniformly by area; 0 <= r_min < r_max.
        r_max: The ring's outer radius, at most 1.
        max_phase: The largest angle at which Lambda starts.
        lr_factor: The learning rate of nu, theta, gamma and B, as a fraction of that of other weights; the paper uses
            0.25 and 0.5. These weights have no weight decay.
    """

    state: int = 256
    r_min: float = 0.0
    r_max: float = 1.0
    max_phase: float = 2 * math.pi
    lr_factor: float = 0.25

    any_length: ClassVar[bool] = True

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls(state=24), cls(state=8, r_min=0.9, r_max=0.99, max_phase=0.3)]

    def layers(self, stack: Stack, grid: TokenGrid) -> "list[LRULayer]":
        require_positive("256 is usual", state=self.state)
        what = f"must be in 0..r_max, and r_max at most 1, got {self.r_min} and {self.r_max}"
        require(0 <= self.r_min < self.r_max <= 1, "r_min", what)
        require_positive("leave it out for the usual one", max_phase=self.max_phase, lr_factor=self.lr_factor)
        return [LRULayer(trained.qkv.in_features, trained.proj_drop, self) for trained in stack]


class LRULayer(FilterLayer):
    """A layer of LRU.

    Args:
        dim, proj_drop: As FilterLayer takes them.
        options: The mechanism.

    Attributes:
        nu, theta, gamma: (N), logarithms as in the paper.
        B: Real and imaginary parts, (2, N, d).
        C: Real and imaginary parts for each direction, (2, 2, d, N).
    """

    def __init__(self, dim: int, proj_drop: nn.Module, options: LRU) -> None:
        super().__init__(dim, proj_drop)
        self.lr_factor, state = options.lr_factor, options.state
        area = options.r_min**2 + (options.r_max**2 - options.r_min**2) * torch.rand(state)
        area = area.clamp(1e-6, 1 - 1e-6)  # of |Lambda|^2; its logarithm and that of 1 - |Lambda|^2 must be finite
        self.nu = nn.Parameter(torch.log(-0.5 * torch.log(area)))
        self.theta = nn.Parameter(torch.log(options.max_phase * torch.rand(state).clamp(min=1e-6)))
        self.gamma = nn.Parameter(0.5 * torch.log(1 - area))
        self.B = nn.Parameter(torch.randn(2, state, dim) * (2 * dim) ** -0.5)
        self.C = nn.Parameter(torch.randn(2, 2, dim, state) * state**-0.5)

    def filter(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        n = x.shape[1]
        nu, theta, gamma, B, C = map(at_least_float32, (self.nu, self.theta, self.gamma, self.B, self.C))
        steps = torch.arange(n, device=x.device)
        size, angle = torch.exp(-nu.exp()[:, None] * steps), theta.exp()[:, None] * steps
        inputs = F.linear(x, (B * gamma.exp()[:, None]).flatten(0, 1)).mT
        # complex numbers as pairs of real sequences, because exporters support only FFTs of real numbers
        pairs = size * angle.cos(), size * angle.sin(), *inputs.chunk(2, dim=1)
        real, imag, first, second = (torch.fft.rfft(part, 2 * n) for part in pairs)
        states = []
        for re, im in ((real, imag), (real.conj(), imag.conj())):  # powers in the other direction have this spectrum
            states += [re * first - im * second, re * second + im * first]
        parts = torch.cat([torch.fft.irfft(part, 2 * n)[..., :n] for part in states], dim=1)
        rows = torch.cat([part for real, imag in C for part in (real, -imag)], dim=1)
        return F.linear(parts.mT, rows)

    @torch.no_grad()
    def carry(self, trained: nn.Module, old: TokenGrid, new: TokenGrid) -> list[str]:
        """Copy all weights. If the grid has f times the tokens, Lambda becomes Lambda^(1 / f), and B is multiplied by
        (1 - Lambda^(1 / f)) / (1 - Lambda), so that the result for a constant input stays the same. S4D's zero-order
        hold does the same when dt is divided by f.

        A Lambda below the real axis keeps its root below it: exp(theta) is positive, so its angle is then above pi.
        """
        fresh, share = copy_weights(self, trained, set()), math.prod(old.size) / math.prod(new.size)
        if share == 1 or not {"nu", "theta", "B"}.isdisjoint(fresh):
            return fresh
        angle = self.theta.double().exp()
        angle = torch.atan2(angle.sin(), angle.cos())  # in -pi..pi
        before = torch.complex(-self.nu.double().exp(), angle)
        after = share * before
        self.nu.copy_((-after.real).log())
        self.theta.copy_(after.imag.remainder(2 * math.pi).log())
        B = torch.complex(*self.B.double()) * ((1 - after.exp()) / (1 - before.exp()))[:, None]
        self.B.copy_(torch.stack([B.real, B.imag]))
        return fresh

    def no_weight_decay(self) -> set[str]:
        return {"nu", "theta", "gamma", "B"}

    def learning_rates(self, learning_rate: float) -> dict[str, float]:
        return dict.fromkeys(sorted(self.no_weight_decay()), self.lr_factor * learning_rate)
