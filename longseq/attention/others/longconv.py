"""Long convolution: a learned kernel as long as the sequence (arXiv:2302.06646), in both directions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longseq.arguments import ArgumentError, require, require_positive
from longseq.attention.grid import TokenGrid
from longseq.attention.layer import Stack
from longseq.attention.mechanism import Mechanism
from longseq.attention.mixer import copy_weights
from longseq.attention.others.fourier import convolve
from longseq.attention.others.sequence import FilterLayer
from longseq.compat.torch import at_least_float32


@dataclass(frozen=True)
class LongConv(Mechanism):
    """y = K * u + D u, a kernel of n numbers for each channel and direction; then GELU and a gated linear unit.

    K = sign(K') max(|K'| - lam, 0) is the squashed kernel; K' are the weights or, with ``smooth``, their moving
    average. The kernel of the backward direction begins at the next token. The trunk's dropout of attention weights is
    applied to K, as the paper's kernel dropout.

    A layer costs 4 n d^2 FLOPs for the gated unit and 15 n d log2(2 n) for three FFTs, one of which runs once per
    batch. K' has 2 n d weights. Padding is zero and changes nothing; a shorter sequence uses the first numbers of K.

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
        require(self.lam >= 0, "lam", f"must be 0 or more, got {self.lam}; 0.003 is usual")
        is_odd = self.smooth >= 1 and self.smooth % 2 == 1
        require(is_odd, "smooth", f"must be odd and positive, got {self.smooth}; 1 for no moving average")
        require_positive("0.001 is usual", lr=self.lr)
        return [LongConvLayer(trained, grid.num_tokens, self) for trained in stack]


class LongConvLayer(FilterLayer):
    """A layer of LongConv.

    Args:
        trained: The attention layer that this one replaces; its dropout of weights becomes that of the kernel.
        n: Tokens of the longest sequence.
        options: The mechanism.

    Attributes:
        kernel: K' of each direction, (2, d, n). It starts as N(0, 0.02^2), decaying with the lag l by
            exp(-(l / n) (d / 2)^(i / d)) in channel i.
    """

    def __init__(self, trained: Any, n: int, options: LongConv) -> None:
        dim = trained.qkv.in_features
        super().__init__(dim, trained.proj_drop)
        self.attn_drop, self.options = trained.attn_drop, options
        rates = (dim / 2) ** (torch.arange(dim) / dim)
        self.kernel = nn.Parameter(0.02 * torch.randn(2, dim, n) * torch.exp(-rates[:, None] * torch.arange(n) / n))

    def filter(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        n, longest = x.shape[1], self.kernel.shape[-1]
        if n > longest:
            what = f"must be at most the {longest} that the kernel was built for, got {n}"
            raise ArgumentError("tokens", f"{what}; carry the model to another size with longseq.resize")
        kernel = self.attn_drop(_squashed(at_least_float32(self.kernel), self.options))
        return convolve(x, *kernel[..., :n])

    @torch.no_grad()
    def carry(self, trained: nn.Module, old: TokenGrid, new: TokenGrid) -> list[str]:
        """Copy all weights except the kernel, and resample K, whose lags are steps along rows and columns of the grid.

        For a grid with twice the tokens the values of K are halved, so that their sum stays the same. With ``smooth``
        the new K is only close to the resampled one, because it is averaged once more.
        """
        fresh, theirs = copy_weights(self, trained, {"kernel"}), getattr(trained, "kernel", None)
        if not isinstance(theirs, Tensor) or theirs.shape[:2] != self.kernel.shape[:2]:
            return [*fresh, "kernel"]
        if new != old:
            options: Any = trained.options
            theirs = _resampled(_squashed(theirs, options), old, new)
            theirs = theirs + theirs.sign() * self.options.lam  # squashing takes this off again
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
    """Linear interpolation that keeps the first and the last point. Where points become fewer, each new one is a mean
    of the nearby old ones, with weights that fall linearly."""
    step = max((old - 1) / max(new - 1, 1), 1)
    places = torch.linspace(0, old - 1, new, dtype=torch.float64)
    weights = F.relu(1 - (torch.arange(old) - places[:, None]).abs() / step)
    return weights / weights.sum(1, keepdim=True)
