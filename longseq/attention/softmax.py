"""Exact attention, the reference: Y = softmax(Q K' / sqrt(c)) V (arXiv:1706.03762, equation 1)."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from longseq.attention.grid import TokenGrid
from longseq.attention.layer import AttentionLayer, Stack, softmax_formula
from longseq.attention.mechanism import Mechanism
from longseq.attention.scaling import scaled_by_length


@dataclass(frozen=True)
class Softmax(Mechanism):
    """Exact attention through torch's scaled_dot_product_attention; its time grows with n^2 d.

    Args:
        length_scaling: Whether the scores are multiplied by log(n) / log(1000), so that in longer sequences than those
            of the training the weights are not flatter (attention/scaling.py).
    """

    length_scaling: bool = False

    @property
    def any_length(self) -> bool:
        return True

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls(), cls(length_scaling=True)]

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        formula = softmax_formula_by_length if self.length_scaling else softmax_formula
        return [AttentionLayer(trained, formula) for trained in stack]


def softmax_formula_by_length(
    queries: Float[Tensor, "b h q c"],
    keys: Float[Tensor, "b h n c"],
    values: Float[Tensor, "b h n c"],
    query_mask: Bool[Tensor, "b 1 q 1"] | None,
    key_mask: Bool[Tensor, "b 1 1 n"] | None,
    dropout: float,
) -> Float[Tensor, "b h q c"]:
    """softmax(Q K' / sqrt(c)) V, the scores scaled by the number of tokens."""
    queries = scaled_by_length(queries, keys.shape[-2], key_mask)
    return softmax_formula(queries, keys, values, query_mask, key_mask, dropout)
