"""A projection whose matrix E is computed from the tokens: Transformer-LS (arXiv:2107.02192), section 3.2."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longseq.attention.grid import TokenGrid
from longseq.attention.mixer import blank, masked_scores
from longseq.attention.projection import Projection, ProjectionLayer, Shortening, shorten_by_head
from longseq.attention.scaling import refuse_wrong_power, scaled_by_length
from longseq.attention.shard import Shard, shared_softmax, summed


class DynamicProjection(ProjectionLayer):
    """Shorten a sequence with E = softmax_n(X W)', X its tokens: (b, n, d) -> (b, k, d).

    Each row of E is a weighted mean over the tokens, with weight zero for padding. No weight of the layer depends on n.

    Args:
        weight: W, (k, d), or (h, k, d) with one E for each head.
        norm: Whether shortened keys and values are normalised.
        length_scaling: The power of ``scaled_by_length`` for X W.
    """

    can_be_sharded = True

    def __init__(self, weight: Float[Tensor, "*h k d"], norm: bool, length_scaling: float) -> None:
        super().__init__()
        self.weight, self.norm, self.length_scaling = nn.Parameter(weight), norm, length_scaling
        self.commutes = weight.ndim == 2 and not norm  # matrices of heads differ by channel

    def given(self, x: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None) -> Shortening:
        scores = torch.einsum("bnd,...kd->b...kn", x, self.weight)
        scores = scaled_by_length(scores, x.shape[1], present, self.length_scaling, self.shard)
        there = None if present is None else present.mT if self.weight.ndim == 2 else present[:, None].mT
        if self.shard is not None:
            E = shared_softmax(scores, -1, there, self.shard).to(scores.dtype)
            return GivenMatrix(E, self.commutes, self.norm, self.shard)
        return GivenMatrix(masked_scores(scores, there).softmax(dim=-1), self.commutes, self.norm)

    def forward(
        self, tokens: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None = None
    ) -> Float[Tensor, "b k d"]:
        return self.given(tokens, present)(tokens, present)

    @torch.no_grad()
    def carry(self, trained: "DynamicProjection", old: TokenGrid, new: TokenGrid) -> None:
        self.load_state_dict(trained.state_dict())


class GivenMatrix:
    """A projection whose matrix E was computed for each sequence of a batch.

    Args:
        matrix: E, (b, k, n), or (b, h, k, n) with one for each head; its columns at padding are zero.
        commutes: Whether all heads share it, and no norm follows.
        norm: Whether each shortened token is normalised over its channels.
        shard: This process's part of the tokens.
    """

    def __init__(
        self, matrix: Float[Tensor, "b *h k n"], commutes: bool, norm: bool, shard: Shard | None = None
    ) -> None:
        self.matrix, self.commutes, self.norm, self.shard = matrix, commutes, norm, shard

    @property
    def unnormed(self) -> "GivenMatrix":
        return GivenMatrix(self.matrix, self.commutes, False, self.shard)

    def __call__(
        self, tokens: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None = None
    ) -> Float[Tensor, "_ k d"]:
        shorten = torch.matmul if self.matrix.ndim == 3 else shorten_by_head
        short = summed(shorten(self.matrix, blank(tokens, present)), self.shard)
        return F.layer_norm(short, short.shape[-1:]).to(short.dtype) if self.norm else short

    def filled(self, present: Bool[Tensor, "b n 1"]) -> None:
        """Every row sums over all tokens."""
        return None


@dataclass(frozen=True)
class Dynamic(Projection):
    """E = softmax_n(X W)', learned W of (k, d), one for each head with the sharing ``none`` (arXiv:2107.02192).

    E depends on the content of the tokens and not on their positions: it has k d weights at any length, and a trained
    one works at another length without resizing. It costs twice as much as a learned E.

    Args:
        norm: Whether shortened keys and values are normalised over their channels (section 3.4, without learned
            weights). Each row of E takes a mean, and the mean of many tokens is a short vector: without the norm, the
            keys of long sequences are nearly equal. With it, keys and values are computed from n tokens, which costs
            4 n d^2 instead of 4 k d^2.
        length_scaling: X W is multiplied by (log(n) / log(1000)) to this power, so that the rows of E do not become
            flatter in sequences longer than those of the training (attention/scaling.py); 0 turns it off.
    """

    norm: bool = False
    length_scaling: float = 0.0

    takes_lengths_of_heads: ClassVar[bool] = False
    any_length: ClassVar[bool] = True

    @classmethod
    def examples(cls) -> "Sequence[Projection]":
        return [cls(), cls(norm=True), cls(length_scaling=1.0)]

    def build(self, grid: TokenGrid, k: int, dim: int, heads: int | None = None) -> ProjectionLayer:
        refuse_wrong_power(self.length_scaling)
        # tokens are normalised, so scores have a deviation of 4: each row starts as a mean of few tokens. With 1, all
        # rows start near the mean of all tokens: 0.23 after six epochs of digits, not 0.71 (docs/guides/choosing.md)
        weight = 4 * torch.randn(heads or 1, k, dim) * dim**-0.5
        return DynamicProjection(weight[0].clone() if heads is None else weight, self.norm, self.length_scaling)
