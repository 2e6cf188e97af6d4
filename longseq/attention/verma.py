"""Verma's attention (arXiv:2101.10277): the softmax taken apart, so that nothing of size n x k is ever made."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from longseq.attention.grid import TokenGrid
from longseq.attention.layer import AttentionLayer, Stack
from longseq.attention.mechanism import Mechanism
from longseq.attention.projection import Linear, Projection
from longseq.attention.sharing import Lengths, Sharing, shared_projections

Normalize = Literal["rows", "columns"]


@dataclass(frozen=True)
class Verma(Mechanism):
    """H = softmax_c(Q / sqrt(c)), L = softmax_k((E K)' / sqrt(c)), Y = H (L (F V)).

    Multiplied as H (L X): H is n x c and L X is c x c, so the mix costs 2 (n + k) d c FLOPs and k has left the product
    with the queries. The paper's O(n d^2), independent of k, counts this and the projections of width d (4 n d^2 for
    queries and output, 4 k d^2 for keys and values), but not E itself: a learned E costs 2 n k d more (twice where F
    is another). With k absent there is no E, and keys and values cost 4 n d^2: the mechanism is then the Efficient
    Attention of Shen et al. (arXiv:1812.01243) with a scale of 1/sqrt(c) on either side.

    Args:
        k: Length of the shortened sequence, 1 <= k <= n: a number, a list of one a layer, or, with sharing ``none``, a
            list a layer of one a head. None keeps all n tokens.
        sharing: Which heads, keys and values, and layers share a matrix; of no effect without k.
        projection: What E and F are; of no effect without k.
        normalize: ``rows``: each softmax runs along the rows of its matrix, so every row of H L sums to one and Y is a
            weighted mean of the values. ``columns``: the letter of the paper's proof, whose normalisers are column
            sums: H over the n tokens and L over the c channels; rows of H L then sum to no fixed number.
    """

    k: Lengths | None = None
    sharing: Sharing = "key_value"
    projection: Projection = Linear()
    normalize: Normalize = "rows"

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        if self.normalize not in get_args(Normalize):
            raise ValueError(f"normalize must be rows or columns, got {self.normalize!r}; choose one of them")
        mix = verma_mix if self.normalize == "rows" else verma_mix_by_columns
        if self.k is None:
            return [AttentionLayer(trained, mix) for trained in stack]
        pairs = shared_projections(self.projection, self.sharing, k=self.k, grid=grid, stack=stack)
        return [AttentionLayer(trained, mix, *pair) for trained, pair in zip(stack, pairs, strict=True)]


def verma_mix(
    queries: Float[Tensor, "b h n c"],
    keys: Float[Tensor, "b h k c"],
    values: Float[Tensor, "b h k c"],
    query_mask: Bool[Tensor, "b 1 n 1"] | None,
    key_mask: Bool[Tensor, "b 1 1 k"] | None,
    dropout: float,
) -> Float[Tensor, "b h n c"]:
    """H (L V), rows normalised; dropout falls on L, the weights of the tokens, as it does on softmax attention's."""
    scale = queries.shape[-1] ** -0.5
    H = (queries * scale).softmax(dim=-1)
    scores = keys.mT * scale
    L = (scores if key_mask is None else scores.masked_fill(~key_mask, -float("inf"))).softmax(dim=-1)
    return H @ (F.dropout(L, dropout) @ values)


def verma_mix_by_columns(
    queries: Float[Tensor, "b h n c"],
    keys: Float[Tensor, "b h k c"],
    values: Float[Tensor, "b h k c"],
    query_mask: Bool[Tensor, "b 1 n 1"] | None,
    key_mask: Bool[Tensor, "b 1 1 k"] | None,
    dropout: float,
) -> Float[Tensor, "b h n c"]:
    """H (L V), columns normalised: H over the n tokens, L over the c channels; absent values are zero already."""
    scale = queries.shape[-1] ** -0.5
    scores = queries * scale
    H = (scores if query_mask is None else scores.masked_fill(~query_mask, -float("inf"))).softmax(dim=-2)
    L = (keys.mT * scale).softmax(dim=-2)
    return H @ (F.dropout(L, dropout) @ values)
