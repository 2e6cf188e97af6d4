"""Attention without a softmax: Q (K' V) / n, what is left if the softmax is a scaling function f(x) = x / sqrt(n)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longseq.attention.heads import Heads
from longseq.attention.shard import SplitSums, summed


class ScaledProduct(SplitSums):
    """f(Q) (f(K)' V) with f(x) = x / sqrt(n), where n is the number of keys: of tokens, or of the k to which E has
    shortened them (arXiv:2101.10277, section 2, from Efficient Attention, arXiv:1812.01243). f(K)' V is divided by the
    second root instead of Q, which is longer.

    A query's product with the mean of key times value: an average over keys, so padding and the length of a sequence do
    not change its size. Weights may be negative and have no fixed sum. It costs 4 n d c FLOPs.
    """

    def forward(self, heads: Heads) -> Float[Tensor, "b h q c"]:
        queries, keys, values, _, key_mask, dropout = heads
        there = keys.new_ones(1, 1, 1, keys.shape[2], dtype=torch.bool) if key_mask is None else key_mask
        exact = torch.promote_types(keys.dtype, torch.float32)  # float16 ends at 65,504
        root = summed(there.sum(-1, keepdim=True).to(exact), self.shard_of_sums).clamp(min=1).sqrt().to(keys.dtype)
        keys = keys if key_mask is None else keys.masked_fill(~key_mask.mT, 0)
        context = summed(F.dropout(keys.mT / root, dropout) @ values, self.shard_of_sums)
        return queries @ (context / root)
