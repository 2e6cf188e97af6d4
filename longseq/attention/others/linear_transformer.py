"""Linear Transformer (arXiv:2006.16236): the softmax's exponential of a product becomes a product of features."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from longseq.attention.grid import TokenGrid
from longseq.attention.heads import Heads
from longseq.attention.layer import AttentionLayer, Stack
from longseq.attention.mechanism import Mechanism
from longseq.compat.torch import without_autocast


@dataclass(frozen=True)
class LinearTransformer(Mechanism):
    """Y = (p(Q) (p(K)' V)) / (p(Q) p(K)' 1) with p(x) = elu(x) + 1, not causal (equations 5 to 7).

    A layer costs 8 n d^2 FLOPs for queries, keys, values and output, and 4 n d c for p(K)' V and its product with p(Q):
    no term grows with n^2. There is no scale, and no weights besides timm's, so it takes sequences of any length. Every
    row of attention weights is positive and sums to one.
    """

    any_length: ClassVar[bool] = True

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls()]

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        return [AttentionLayer(trained, linear_formula, independent_queries=True) for trained in stack]


def linear_formula(heads: Heads) -> Float[Tensor, "b h n c"]:
    """Attention with the features elu(x) + 1."""
    of_keys = absent_as_zero(_elu_plus_one(heads.keys), heads.key_mask)
    return mean_by_features(_elu_plus_one(heads.queries), of_keys, heads.values, heads.dropout)


def _elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1 without its rounding: far below zero, elu(x) is -1 in bfloat16, and the sum would be 0, not e^x."""
    return x.clamp(max=0).exp() + x.relu()


def absent_as_zero(
    features: Float[Tensor, "b h k r"], key_mask: Bool[Tensor, "b 1 1 k"] | None
) -> Float[Tensor, "b h k r"]:
    """Features of keys, zero at padding, so that padding adds nothing to any sum."""
    return features if key_mask is None else features.masked_fill(~key_mask.mT, 0)


def mean_by_features(
    of_queries: Float[Tensor, "b h n r"],
    of_keys: Float[Tensor, "b h k r"],
    values: Float[Tensor, "b h k c"],
    dropout: float,
) -> Float[Tensor, "b h n c"]:
    """The mean of the values with the weights of_queries of_keys' / its row sums, in time n r c.

    Dropout is applied to the features of the keys but not to their sum, just as softmax attention applies it to the
    weights after the division. Sums over more than a thousand tokens can overflow float16, so they are computed in
    float32.

    Args:
        of_queries, of_keys: r features of each query and key, not negative.
        values: The values, zero at padding.
        dropout: The dropout rate.
    """
    if values.dtype == torch.float16:
        with without_autocast(values):
            means = mean_by_features(of_queries.float(), of_keys.float(), values.float(), dropout)
        return means.to(values.dtype)
    context = F.dropout(of_keys, dropout).mT @ values
    sums = of_queries @ of_keys.sum(-2, keepdim=True).mT
    return of_queries @ context / sums.clamp(min=torch.finfo(sums.dtype).tiny)
