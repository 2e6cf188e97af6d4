"""Nystromformer (arXiv:2102.03902): softmax attention from its rows and columns at a few landmarks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longseq.arguments import require, require_positive
from longseq.attention.grid import TokenGrid
from longseq.attention.heads import Heads
from longseq.attention.layer import AttentionLayer, Stack
from longseq.attention.mechanism import Mechanism
from longseq.attention.mixer import own_softmax
from longseq.attention.window import MeanProjection
from longseq.compat.torch import without_autocast


@dataclass(frozen=True)
class Nystromformer(Mechanism):
    """Y = softmax_k(Q Kl' / sqrt(c)) pinv(softmax_k(Ql Kl' / sqrt(c))) softmax_n(Ql K' / sqrt(c)) V (equation 13).

    The landmarks Ql and Kl are the means of queries and of keys over k windows of the sequence. A window has
    ceil(n / k) tokens, where n is the size of the grid: a shorter sequence has fewer landmarks, a longer one more.
    Means leave padding out, and a window of padding alone is no landmark. A layer costs 8 n d^2 FLOPs for queries,
    keys, values and output, 8 n k d for the scores and their products, and 8 k^3 h per iteration of the inverse.

    Args:
        k: Landmarks, 1 <= k <= n.
        iterations: Of the inverse: Z (13 - A Z (15 - A Z (7 - A Z))) / 4 (equation 11).
        kernel_size: Width, in tokens, of a convolution of the values along the sequence that is added to Y, with one
            kernel per head; odd. 0 leaves it out.
    """

    k: int = 64
    iterations: int = 6
    kernel_size: int = 0

    any_length: ClassVar[bool] = True

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls(7), cls(7, kernel_size=5)]

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        n = grid.num_tokens
        require(1 <= self.k <= n, "k", f"must be in 1..{n} (the sequence length), got {self.k}; choose fewer landmarks")
        require_positive("6 is usual", iterations=self.iterations)
        is_odd_or_0 = self.kernel_size == 0 or (self.kernel_size > 0 and self.kernel_size % 2 == 1)
        require(is_odd_or_0, "kernel_size", f"must be odd, got {self.kernel_size}; 0 leaves the convolution out")
        # the result of a query depends on the landmarks, and through them on all other queries
        return [AttentionLayer(trained, _NystromFormula(self, n, trained.num_heads)) for trained in stack]


class _NystromFormula(nn.Module):
    """Nystrom attention with landmarks, and a convolution of the values.

    Args:
        described: The mechanism.
        n: Tokens of the grid.
        heads: h.
    """

    def __init__(self, described: Nystromformer, n: int, heads: int) -> None:
        super().__init__()
        self.windows, self.iterations = MeanProjection(n, described.k), described.iterations
        self.convolution = None
        if size := described.kernel_size:
            self.convolution = nn.Conv2d(heads, heads, (size, 1), padding=(size // 2, 0), groups=heads, bias=False)

    def forward(self, heads: Heads) -> Float[Tensor, "b h n c"]:
        """Dropout is applied to the weights of the n tokens, as in softmax attention."""
        queries, keys, values, _, key_mask, dropout = heads
        queries = queries * queries.shape[-1] ** -0.5
        present = None if key_mask is None else key_mask[:, 0].mT
        of_queries, of_keys = self._landmarks(queries, present), self._landmarks(keys, present)
        filled = None if present is None else self.windows.filled(present)[:, None].mT  # (b, 1, 1, k)
        of_tokens = own_softmax(of_queries @ keys.mT, -1, key_mask)
        summaries = F.dropout(of_tokens, dropout) @ values
        with without_autocast(queries):
            inverse = self._inverse(of_queries, of_keys, filled).to(summaries.dtype)
        mixed = own_softmax(queries @ of_keys.mT, -1, filled) @ (inverse @ summaries)
        return mixed if self.convolution is None else mixed + self.convolution(values)

    def _landmarks(self, x: Float[Tensor, "b h n c"], present: Bool[Tensor, "b n 1"] | None) -> Tensor:
        """The means over windows, (b, h, k, c)."""
        heads = x.shape[1]
        return self.windows(x.transpose(1, 2).flatten(2), present).unflatten(-1, (heads, -1)).transpose(1, 2)

    def _inverse(
        self,
        of_queries: Float[Tensor, "b h k c"],
        of_keys: Float[Tensor, "b h k c"],
        filled: Bool[Tensor, "b 1 1 k"] | None,
    ) -> Float[Tensor, "b h k k"]:
        """The pseudo-inverse of the landmarks' weights, in float32 at least.

        Rows and columns of landmarks without a token are zero in every iteration, so all others are what they would be
        for the shorter sequence alone.
        """
        dtype = torch.promote_types(of_queries.dtype, torch.float32)
        A = own_softmax(of_queries.to(dtype) @ of_keys.to(dtype).mT, -1, filled)
        if filled is not None:
            A = A.masked_fill(~filled.mT, 0)
        return iterative_inverse(A, self.iterations)


def iterative_inverse(A: Float[Tensor, "*b k k"], iterations: int) -> Float[Tensor, "*b k k"]:
    """The pseudo-inverse of each matrix, by iterations of third order that start from A' / (|A|_1 |A|_inf)."""
    largest_sums = A.abs().sum(-2).amax(-1) * A.abs().sum(-1).amax(-1)
    Z = A.mT / largest_sums[..., None, None]
    one = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    for _ in range(iterations):
        AZ = A @ Z
        Z = Z @ (13 * one - AZ @ (15 * one - AZ @ (7 * one - AZ))) / 4
    return Z
