"""Long convolution: a learned kernel as long as the sequence (arXiv:2302.06646), in both directions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longseq.arguments import ArgumentError
from longseq.attention.grid import TokenGrid
from longseq.attention.layer import Stack
from longseq.attention.mechanism import Mechanism
from longseq.attention.mixer import copy_weights
from longseq.attention.others.fourier import convolve
from longseq.attention.others.sequence import FilterLayer, width_and_dropout
from longseq.compat.torch import at_least_float32


@dataclass(frozen=True)
class LongConv(Mechanism):
    """y = K * u + D u, a kernel of n numbers for each channel and direction; then GELU and a gated linear unit.

    K = sign(K') max(|K'| - lam, 0), squashed, of the weights K' or, with ``smooth``, of their moving average. The
    kernel of the backward direction begins at the next token. The trunk's dropout of attention weights falls on K, as
    the paper's kernel dropout.

    A layer costs 4 n d^2 FLOPs for the gated unit and 15 n d log2(2 n) for three FFTs, one of them once in a batch; it
    has 2 n d weights in K'. Padding is zero and changes nothing; a shorter sequence uses the first numbers of K.

    Args:
        lam: The threshold of squashing; the paper's settings lie in 0.001..0.003.
        smooth: Width of the moving average, odd; 1 for none.
        lr: The highest learning rate of K', which has no weight decay, as in the paper's code.
    """

    lam: float = 0.003
    smooth: int = 1
    lr: float = 0.001

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls(), cls(lam=0.001, smooth=5)]

    def layers(self, stack: Stack, grid: TokenGrid) -> "list[LongConvLayer]":
        if not self.lam >= 0:
            raise ArgumentError("lam", f"must be 0 or more, got {self.lam}; 0.003 is usual")
        if self.smooth < 1 or self.smooth % 2 == 0:
            raise ArgumentError("smooth", f"must be odd and positive, got {self.smooth}; 1 for no moving average")
        if not self.lr > 0:
            raise ArgumentError("lr", f"must be positive, got {self.lr}; 0.001 is usual")
        drops = [trained.attn_drop for trained in stack]
        return [
            LongConvLayer(*sizes, drop, grid.num_tokens, self)
            for sizes, drop in zip(width_and_dropout(stack), drops, strict=True)
        ]


class LongConvLayer(FilterLayer):
    """A layer of LongConv.

    Args:
        dim, proj_drop: As FilterLayer takes them.
        attn_drop: The dropout of the kernel.
        n: The longest sequence.
        options: The mechanism.

    Attributes:
        kernel: K' of each direction, (2, d, n). It starts as N(0, 0.02^2), decaying with the lag l by
            exp(-(l / n) (d / 2)^(i / d)) in channel i.
    """

    def __init__(self, dim: int, proj_drop: nn.Module, attn_drop: nn.Module, n: int, options: LongConv) -> None:
        super().__init__(dim, proj_drop)
        self.attn_drop, self.options = attn_drop, options
        rates = (dim / 2) ** (torch.arange(dim) / dim)
        self.kernel = nn.Parameter(0.02 * torch.randn(2, dim, n) * torch.exp(-rates[:, None] * torch.arange(n) / n))

    def filter(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        n, longest = x.shape[1], self.kernel.shape[-1]
        if n > longest:
            raise ArgumentError(
                "tokens",
                f"must be at most the {longest} that the kernel was built for, got {n}; carry the model to another "
                "size with longseq.resize",
            )
        kernel = self.attn_drop(_squashed(at_least_float32(self.kernel), self.options))
        return convolve(x, *kernel[..., :n])

    @torch.no_grad()
    def carry(self, trained: nn.Module, old: TokenGrid, new: TokenGrid) -> list[str]:
        """Copy all weights except the kernel. K is resampled; its lags are steps along rows and columns of the grid.

        A grid with twice the tokens has kernels of half the size, so that their sums stay. With ``smooth`` the new K is
        near what was resampled, for it is averaged once more.
        """
        fresh, theirs = copy_weights(self, trained, {"kernel"}), getattr(trained, "kernel", None)
        if not isinstance(theirs, Tensor) or theirs.shape[:2] != self.kernel.shape[:2]:
            return [*fresh, "kernel"]
        if new != old:
            kept: Any = trained.options
            theirs = _resampled(_squashed(theirs, kept), old, new)
            theirs = theirs + theirs.sign() * self.options.lam  # squashed again, it is what was resampled
        self.kernel.copy_(theirs)
        return fresh

    def no_weight_decay(self) -> set[str]:
        return {"kernel"}

    def learning_rates(self, learning_rate: float) -> dict[str, float]:
        return {"kernel": min(self.options.lr, learning_rate)}


def _squashed(weights: Float[Tensor, "2 d n"], options: LongConv) -> Float[Tensor, "2 d n"]:
    """K of the weights K'."""
    if options.smooth > 1:
        weights = F.avg_pool1d(weights, options.smooth, stride=1, padding=options.smooth // 2)
    return weights.sign() * F.relu(weights.abs() - options.lam)


def _resampled(kernel: Float[Tensor, "2 d n"], old: TokenGrid, new: TokenGrid) -> Float[Tensor, "2 d m"]:
    if new.num_prefix_tokens != old.num_prefix_tokens:
        raise ValueError(f"prefix tokens must stay {old.num_prefix_tokens}, got {new.num_prefix_tokens}; keep the pool")
    num_old, num_new = old.size[0] * old.size[1], new.size[0] * new.size[1]
    of_grid, rest = kernel[..., :num_old].unflatten(-1, old.size), kernel[..., num_old:]
    along_rows, along_columns = (_means(*sizes).to(kernel) for sizes in zip(old.size, new.size, strict=True))
    steps = along_rows @ of_grid @ along_columns.mT
    return torch.cat([steps.flatten(-2) * (num_old / num_new), rest], dim=-1)


def _means(old: int, new: int) -> Float[Tensor, "new old"]:
    """Linear interpolation between points whose first and last ones stay; of more points than asked for, the mean of
    those nearby, with weights that fall linearly."""
    step = max((old - 1) / max(new - 1, 1), 1)
    places = torch.linspace(0, old - 1, new, dtype=torch.float64)
    weights = F.relu(1 - (torch.arange(old) - places[:, None]).abs() / step)
    return weights / weights.sum(1, keepdim=True)
