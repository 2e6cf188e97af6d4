"""Exact attention, the reference: Y = softmax(Q K' / sqrt(c)) V (arXiv:1706.03762, equation 1)."""

from collections.abc import Sequence
from dataclasses import dataclass

from longseq.attention.grid import TokenGrid
from longseq.attention.layer import AttentionLayer, Stack, softmax_formula
from longseq.attention.mechanism import Mechanism


@dataclass(frozen=True)
class Softmax(Mechanism):
    """Exact attention through torch's scaled_dot_product_attention; its time grows with n^2 d."""

    @property
    def any_length(self) -> bool:
        return True

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls()]

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        return [AttentionLayer(trained, softmax_formula) for trained in stack]
