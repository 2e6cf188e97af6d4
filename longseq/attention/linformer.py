"""Linformer (arXiv:2006.04768), equation 7: softmax attention over k shortened keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass

from longseq.attention.grid import TokenGrid
from longseq.attention.layer import AttentionLayer, Stack, softmax_formula
from longseq.attention.mechanism import Mechanism
from longseq.attention.projection import Linear, Projection
from longseq.attention.sharing import Lengths, Sharing, examples_of_lengths, shared_projections


@dataclass(frozen=True)
class Linformer(Mechanism):
    """Y = softmax_k(Q (E K)' / sqrt(c)) (F V), with E and F of k x n: time and memory grow with n k, not n^2.

    A layer costs 4 n d^2 FLOPs for queries and output, 2 n k d for E (twice that if F is another matrix), 4 k d^2 for
    keys and values, and 4 n k d for the scores and their product with the values. Each matrix has n k weights.

    Args:
        k: Length of the shortened sequence, 1 <= k <= n: one number, a list with one number per layer, or, with sharing
            ``none``, a list of lists with one number per head of each layer.
        sharing: Which heads, keys and values, and layers share a matrix.
        projection: What E and F are.
    """

    k: Lengths
    sharing: Sharing = "key_value"
    projection: Projection = Linear()

    @property
    def any_length(self) -> bool:
        return self.projection.any_length

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return examples_of_lengths(cls)

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        pairs = shared_projections(self.projection, self.sharing, k=self.k, grid=grid, stack=stack)
        return [
            AttentionLayer(trained, softmax_formula, *pair, independent_queries=True)
            for trained, pair in zip(stack, pairs, strict=True)
        ]
