"""S4, a state-space model whose matrix is diagonal plus low rank (arXiv:2111.00396), in both directions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn

from longseq.arguments import require, require_positive
from longseq.attention.grid import TokenGrid
from longseq.attention.layer import Stack
from longseq.attention.mechanism import Mechanism
from longseq.attention.others.s4d import S4DLayer
from longseq.compat.torch import at_least_float32


@dataclass(frozen=True)
class S4(Mechanism):
    """x' = A x + B u, y = Re(C x) + D u, with A = Lambda - P P* for each channel, discretised by the bilinear rule.

    Lambda, P and B start as those of HiPPO-LegS (section 3 and appendix C.1); P P* in place of the paper's P Q* keeps A
    stable, as in its later code. With h = dt / 2, A' = (1 - h A)^-1 (1 + h A) and B' = dt (1 - h A)^-1 B, where the
    inverse is that of a diagonal matrix, corrected for rank one (Woodbury), the filter is the convolution y = K * u,
    K_l = C A'^l B'. The backward direction has the same A, B and dt, its own C, and begins at the next token. Then GELU
    and a gated linear unit.

    The paper computes K by a Cauchy kernel and an FFT, for one length. Here K_l is the product of C A'^(s i) and
    A'^j B', s near sqrt(n), whose powers are doubled step by step: the same numbers, for any length, in real
    arithmetic. A layer costs 4 n d^2 FLOPs for the gated unit, 15 n d log2(2 n) for three FFTs, and for the kernels,
    once per batch, 4 n d N, about 2 d N^3 log2(n) for the powers, and 6 sqrt(n) d N^2 for their products with B' and C.
    Padding is zero and changes nothing, and no weight depends on n.

    Args:
        state: N, the states of a channel with their conjugates; even.
        lr: The highest learning rate of A, B and dt, which have no weight decay, as in S4's code.
    """

    state: int = 64
    lr: float = 0.001

    any_length: ClassVar[bool] = True

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls(state=16)]

    def layers(self, stack: Stack, grid: TokenGrid) -> "list[S4Layer]":
        is_even = self.state >= 2 and self.state % 2 == 0
        require(is_even, "state", f"must be even and positive, got {self.state}; 64 is usual")
        require_positive("0.001 is usual", lr=self.lr)
        imag, P = hippo(self.state)
        # as numbers, for the dtype and the device of all other weights, which may be meta
        start = torch.tensor(imag.tolist()), torch.tensor(torch.view_as_real(P).tolist())
        return [S4Layer(trained.qkv.in_features, trained.proj_drop, *start, self.lr) for trained in stack]


class S4Layer(S4DLayer):
    """A layer of S4.

    Args:
        dim, proj_drop, imag, lr: As S4DLayer takes them.
        P: Its initial value for every channel, as real and imaginary parts.

    Attributes:
        P, B: Real and imaginary parts, (d, N / 2, 2); those of conjugate states are their conjugates.
    """

    def __init__(
        self,
        dim: int,
        proj_drop: nn.Module,
        imag: Float[Tensor, " states"],
        P: Float[Tensor, "states 2"],
        lr: float,
    ) -> None:
        super().__init__(dim, proj_drop, imag, lr)
        pairs = P.repeat(dim, 1, 1)
        self.P = nn.Parameter(pairs)
        self.B = nn.Parameter(2**0.5 * pairs)  # B_n = sqrt(2 n + 1) and P_n = sqrt(n + 1 / 2), in the same basis

    def kernels(self, n: int) -> Float[Tensor, "2 d n"]:
        """K of each direction. A state and its conjugate are written as two real numbers, on which P P* acts as 2 p p',
        p the parts of P."""
        power, column, rows = self._discretised()
        block = 1 << (n.bit_length() // 2)
        columns, rows = column[..., None], rows.transpose(0, 1)
        while columns.shape[-1] < block:  # A'^j B', j < block
            columns = torch.cat([columns, power @ columns], dim=-1)
            power = power @ power
        count = -(-n // block)
        while rows.shape[1] < 2 * count:  # C A'^(block i), i < count, both directions
            rows = torch.cat([rows, rows @ power], dim=1)
            power = power @ power
        products = (rows[:, : 2 * count] @ columns).unflatten(1, (count, 2))
        return products.permute(2, 0, 1, 3).flatten(-2)[..., :n]

    def _discretised(self) -> tuple[Float[Tensor, "d s s"], Float[Tensor, "d s"], Float[Tensor, "2 d s"]]:
        """A', B' and C of both directions, as real numbers."""
        weights = self.log_dt, self.log_A_real, self.A_imag, self.P, self.B, self.C
        log_dt, log_A_real, A_imag, P, B, C = map(at_least_float32, weights)
        half = log_dt.exp()[:, None] / 2
        real, imag = -half * log_A_real.exp(), half * A_imag  # of h Lambda
        size = (1 - real).square() + imag.square()
        G = _of_pairs((1 - real) / size, imag / size)  # (1 - h Lambda)^-1
        p = P.flatten(1)
        left, right = (G @ p[..., None]).squeeze(-1), (p[:, None] @ G).squeeze(1)
        scale = 2 * half / (1 + 2 * half * (p * left).sum(-1, keepdim=True))
        inverse = G - (scale * left)[..., None] * right[:, None]
        ahead = torch.diag_embed(torch.ones_like(p)) + _of_pairs(real, imag)
        ahead = ahead - 2 * half[..., None] * p[..., None] * p[:, None]
        column = (inverse @ (2 * half * B.flatten(1))[..., None]).squeeze(-1)
        rows = 2 * torch.stack([C[..., 0], -C[..., 1]], dim=-1).flatten(-2)
        return inverse @ ahead, column, rows

    def no_weight_decay(self) -> set[str]:
        return super().no_weight_decay() | {"P", "B"}


def _of_pairs(real: Float[Tensor, "d s"], imag: Float[Tensor, "d s"]) -> Float[Tensor, "d t t"]:
    """The matrix that multiplies pairs of real and imaginary parts by complex numbers."""
    rows = torch.stack([real, imag]), torch.stack([-imag, real])
    blocks = torch.diag_embed(torch.stack(rows, dim=1))  # (2, 2, d, s, s)
    return blocks.permute(2, 3, 0, 4, 1).flatten(3).flatten(1, 2)


def hippo(state: int) -> tuple[Float[Tensor, " half"], Complex[Tensor, " half"]]:
    """Imaginary parts of Lambda, whose real parts are -1/2, and P of HiPPO-LegS, for the states whose imaginary parts
    are positive (appendix C.1)."""
    P = (torch.arange(state, dtype=torch.float64, device="cpu") + 0.5).sqrt()
    # A + P P' = -1/2 + S, where A_nk = -sqrt((2 n + 1)(2 k + 1)) below the diagonal, so S is skew
    lower = torch.outer(P, P).tril(-1)
    skew = lower.T - lower
    imag, vectors = torch.linalg.eigh(-1j * skew)
    is_positive = imag > 0
    return imag[is_positive], (vectors.mH @ P.to(vectors.dtype))[is_positive]
