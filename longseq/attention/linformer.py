"""Linformer (arXiv:2006.04768), equation 7: softmax attention over k shortened keys and values."""

from dataclasses import dataclass

from longseq.attention.layer import AttentionLayer, Stack, softmax_mix
from longseq.attention.mechanism import Mechanism, TokenGrid
from longseq.attention.projection import Linear, Projection
from longseq.attention.sharing import Sharing, shared_projections


@dataclass(frozen=True)
class Linformer(Mechanism):
    """Y = softmax_k(Q (E K)' / sqrt(c)) (F V), with E and F of k x n: time and memory grow with n k, not n^2.

    Args:
        k: Length of the shortened sequence, 1 <= k <= n.
        sharing: Which heads, keys and values, and layers share a matrix.
        projection: What E and F are.
    """

    k: int
    sharing: Sharing = "key_value"
    projection: Projection = Linear()

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        pairs = shared_projections(
            self.projection, self.sharing, n=grid.num_tokens, k=self.k, heads=stack[0].num_heads, depth=len(stack)
        )
        return [AttentionLayer(trained, softmax_mix, *pair) for trained, pair in zip(stack, pairs, strict=True)]
