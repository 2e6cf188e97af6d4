"""No attention: every token sees only itself. This control shows what attention adds to all other parts."""

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
class NoAttention(Mechanism):
    """Y = V: two linear maps at every token, at the cost of 4 n d^2 FLOPs. Its name in flags and YAML is also ``None``.

    Only local mixing and the pooling mix tokens then. The layer keeps all weights of attention, with their names and
    shapes, although those of queries and keys do nothing: a trained ViT fits it, another mechanism can take its place,
    and the same seed gives both the same first weights.
    """

    any_length: ClassVar[bool] = True
    mixes_tokens: ClassVar[bool] = False

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls()]

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        return [_ValuesAlone(trained, _values, independent_queries=True) for trained in stack]


class _ValuesAlone(AttentionLayer):
    """Computes neither queries nor keys, unless a wrapped ``qkv`` does."""

    @property
    def can_be_sharded(self) -> bool:
        return is_plain(self.qkv, nn.Linear)  # it has no sum over tokens

    def queries_keys_values(self, tokens: Tokens, *projections: Any):
        if not is_plain(self.qkv, nn.Linear):
            return super().queries_keys_values(tokens, *projections)
        values = self.linear(tokens.queried, slice(2 * self.attn_dim, 3 * self.attn_dim))
        return values.unflatten(-1, (self.num_heads, -1)).transpose(1, 2), values, values


def _values(heads: Heads) -> Float[Tensor, "b h q c"]:
    """V, of the tokens that have queries."""
    return F.dropout(heads.values[:, :, : heads.queries.shape[2]], heads.dropout)
