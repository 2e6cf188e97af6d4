"""Static mixing: what remains of Linformer if its weights do not depend on the tokens. This control shows what queries
and keys add to a learned mixing of places."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor, nn

from longseq.attention.grid import TokenGrid
from longseq.attention.heads import Heads, Tokens
from longseq.attention.layer import AttentionLayer, Stack
from longseq.attention.mechanism import Mechanism
from longseq.attention.mixer import copy_weights
from longseq.attention.projection import Linear, Shortening, carry_projections
from longseq.attention.sharing import shared_projections
from longseq.compat.torch import is_plain


@dataclass(frozen=True)
class StaticMixing(Mechanism):
    """Y = P (E V): learned matrices E of k x n and P of n x k in place of attention, linear in the tokens.

    E is Linformer's with its default sharing, one for each layer, and P, one for each head, is in the place of its
    softmax_k(Q (E K)' / sqrt(c)). P has no softmax, so that its weights may be negative and learn as fast as E's: every
    static softmax is such a P. A shorter sequence uses the first columns of E and rows of P. Weights of queries and
    keys stay, as in NoAttention, and do nothing.

    A layer costs 2 n d^2 FLOPs for the output, 2 k d^2 for the values, and 4 n k d for the products with E and P. E has
    n k weights, and P has h n k.

    Args:
        k: Length of the shortened sequence, 1 <= k <= n.
    """

    k: int

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls(7)]

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        pairs: Any = shared_projections(Linear(), "key_value", k=self.k, grid=grid, stack=stack)
        return [
            _StaticLayer(trained, _Places(trained.num_heads, grid.num_tokens, self.k), *pair, independent_queries=True)
            for trained, pair in zip(stack, pairs, strict=True)
        ]


class _Places(nn.Module):
    """P, (h, n, k). It starts as N(0, 1/k), which keeps the variance."""

    def __init__(self, heads: int, n: int, k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(heads, n, k) * k**-0.5)

    def forward(self, heads: Heads) -> Float[Tensor, "b h q c"]:
        """P E V. Dropout is applied to P, as to the weights of attention."""
        return F.dropout(self.weight[:, : heads.queries.shape[2]], heads.dropout) @ heads.values


class _StaticLayer(AttentionLayer):
    """Computes neither queries nor keys, unless a wrapped ``qkv`` does."""

    formula: _Places

    @property
    def can_be_sharded(self) -> bool:
        return False  # every process would have all rows of P

    def queries_keys_values(self, tokens: Tokens, project_keys: Any, project_values: Any):
        if not is_plain(self.qkv, nn.Linear):
            return super().queries_keys_values(tokens, project_keys, project_values)
        project: Shortening = project_values
        values = self._shortened(tokens, project, slice(2 * self.attn_dim, 3 * self.attn_dim))
        places = tokens.queried.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # the formula only counts them
        return places, values, values

    @torch.no_grad()
    def carry(self, trained: nn.Module, old: TokenGrid, new: TokenGrid) -> list[str]:
        """Copy all weights, except that E is resampled as Linformer's, and the rows of P are interpolated as position
        embeddings are."""
        fresh = copy_weights(self, trained, {"project_keys", "project_values", "formula"})
        for name in ("project_keys", "project_values"):
            fresh += [name] * bool(carry_projections(getattr(self, name), getattr(trained, name, None), old, new))
        ours, theirs = self.formula.weight, getattr(getattr(trained, "formula", None), "weight", None)
        if not isinstance(trained, _StaticLayer) or theirs is None or theirs.shape[::2] != ours.shape[::2]:
            return [*fresh, "formula.weight"]
        if new.num_prefix_tokens != old.num_prefix_tokens:
            what = f"must stay {old.num_prefix_tokens}, got {new.num_prefix_tokens}; keep the pool"
            raise ValueError(f"formula.weight: prefix tokens {what}")
        if new != old:
            rows = theirs.transpose(0, 1).flatten(1)[None]  # (1, n, h k)
            rows = resample_abs_pos_embed(rows, list(new.size), list(old.size), new.num_prefix_tokens)
            theirs = rows[0].unflatten(1, ours.shape[::2]).transpose(0, 1)
        ours.copy_(theirs)
        return fresh
