"""Exact attention, the reference: Y = softmax(Q K' / sqrt(c)) V (arXiv:1706.03762, equation 1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from jaxtyping import Float
from torch import Tensor

from longseq.attention.grid import TokenGrid
from longseq.attention.heads import Heads
from longseq.attention.layer import AttentionLayer, Stack, softmax_formula
from longseq.attention.mechanism import Mechanism
from longseq.attention.rotary import Rotary
from longseq.attention.scaling import refuse_wrong_power, scaled_by_length


@dataclass(frozen=True)
class Softmax(Mechanism):
    """Exact attention through torch's scaled_dot_product_attention; its time grows with n^2 d.

    Args:
        length_scaling: The scores are multiplied by (log(n) / log(1000)) to this power, so that the weights do not
            become flatter in sequences longer than those of the training (attention/scaling.py); 0 turns it off.
        rotary: Whether queries and keys are rotated by their positions (attention/rotary.py). It helps much where there
            is no local mixing: accuracy on digits 0.77 with it, 0.44 without, after 15 epochs. (Verma without E gained
            nothing from it.)
    """

    length_scaling: float = 0.0
    rotary: bool = False

    @property
    def any_length(self) -> bool:
        return not self.rotary  # rows and columns of a grid are counted from its size

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls(), cls(length_scaling=1.0), cls(rotary=True)]

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        refuse_wrong_power(self.length_scaling)
        formula = softmax_formula
        if self.length_scaling:
            formula = partial(_softmax_formula_by_length, length_scaling=self.length_scaling)
        turns = [Rotary(grid, trained.attn_dim // trained.num_heads) if self.rotary else None for trained in stack]
        return [
            AttentionLayer(trained, formula, independent_queries=True, rotary=turn)
            for trained, turn in zip(stack, turns, strict=True)
        ]


def _softmax_formula_by_length(heads: Heads, length_scaling: float) -> Float[Tensor, "b h q c"]:
    """softmax(Q K' / sqrt(c)) V, the scores scaled by the number of tokens."""
    queries = scaled_by_length(heads.queries, heads.keys.shape[-2], heads.key_mask, length_scaling)
    return softmax_formula(heads._replace(queries=queries))
