"""Verma's attention (arXiv:2101.10277): the softmax taken apart, so that nothing of size n x k is ever made."""

from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from longseq.attention.layer import AttentionLayer, Stack
from longseq.attention.mechanism import Mechanism, TokenGrid
from longseq.attention.projection import Linear, Projection
from longseq.attention.sharing import Sharing, shared_projections


@dataclass(frozen=True)
class Verma(Mechanism):
    """H = softmax_c(Q / sqrt(c)), L = softmax_k((E K)' / sqrt(c)), Y = H (L (F V)).

    Each softmax runs along the rows of its matrix, so every row of H L sums to one and Y is a weighted mean of the
    values. Multiplied as H (L X), the product costs (n + k) d c; learned E and F cost n k d more, which the paper's
    O(n d^2) leaves out. With k absent there is no projection at all: the mechanism is then the Efficient Attention of
    Shen et al. (arXiv:1812.01243) with a scale of 1/sqrt(c) on either side, and costs 2 n d c.

    Args:
        k: Length of the shortened sequence, 1 <= k <= n; None keeps all n tokens.
        sharing: Which heads, keys and values, and layers share a matrix; of no effect without k.
        projection: What E and F are; of no effect without k.
    """

    k: int | None = None
    sharing: Sharing = "key_value"
    projection: Projection = Linear()

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        if self.k is None:
            return [AttentionLayer(trained, verma_mix) for trained in stack]
        pairs = shared_projections(
            self.projection, self.sharing, n=grid.num_tokens, k=self.k, heads=stack[0].num_heads, depth=len(stack)
        )
        return [AttentionLayer(trained, verma_mix, *pair) for trained, pair in zip(stack, pairs, strict=True)]


def verma_mix(
    queries: Float[Tensor, "b h n c"],
    keys: Float[Tensor, "b h k c"],
    values: Float[Tensor, "b h k c"],
    mask: Bool[Tensor, "b 1 1 k"] | None,
    dropout: float,
) -> Float[Tensor, "b h n c"]:
    """H (L V); dropout falls on L, the weights of the tokens, as it does on softmax attention's."""
    scale = queries.shape[-1] ** -0.5
    features = (queries * scale).softmax(dim=-1)  # H
    scores = keys.mT * scale
    weights = (scores if mask is None else scores.masked_fill(~mask, -float("inf"))).softmax(dim=-1)  # L
    return features @ (F.dropout(weights, dropout) @ values)
