"""No attention: every token sees only itself. This control shows what attention adds to all other parts.

    python train.py fit --config image/digits --model.encoder.attention benchmarks.pointwise.Pointwise \\
        --allow_class benchmarks.pointwise

longseq does not include it, because a mechanism must mix tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longseq.attention.grid import TokenGrid
from longseq.attention.heads import Heads, Tokens
from longseq.attention.layer import AttentionLayer, Stack
from longseq.attention.mechanism import Mechanism
from longseq.compat.torch import is_plain


@dataclass(frozen=True)
class Pointwise(Mechanism):
    """Y = V: no attention, a linear layer at every token, at the cost of 4 n d^2 FLOPs.

    Only local mixing and the mean over the tokens mix tokens then. The weights keep attention's names and
    shapes, but those of queries and keys do nothing.
    """

    any_length: ClassVar[bool] = True

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls()]

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        return [PointwiseLayer(trained, pointwise_formula, independent_queries=True) for trained in stack]


class PointwiseLayer(AttentionLayer):
    """Computes neither queries nor keys, unless a wrapped ``qkv`` does."""

    def queries_keys_values(self, tokens: Tokens, *projections: Any):
        if not is_plain(self.qkv, nn.Linear):
            return super().queries_keys_values(tokens, *projections)
        values = self.linear(tokens.x, slice(2 * self.attn_dim, 3 * self.attn_dim))
        return self.turned(tokens, values, values, values)


def pointwise_formula(heads: Heads) -> Float[Tensor, "b h q c"]:
    """V, of the tokens that have queries."""
    return F.dropout(heads.values[:, :, : heads.queries.shape[2]], heads.dropout)
