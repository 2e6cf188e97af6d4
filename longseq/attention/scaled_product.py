"""Attention without a softmax: Q (K' V) / n, what is left if the softmax is a scaling function f(x) = x / sqrt(n)."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longseq.attention.heads import Heads
from longseq.attention.shard import SplitSums, summed


class ScaledProduct(SplitSums):
    """f(Q) (f(K)' V) with f(x) = x / sqrt(n), where n is the number of keys: of tokens, or of the k to which E has
    shortened them (arXiv:2101.10277, section 2, from Efficient Attention, arXiv:1812.01243).

    A query's product with the mean of key times value: an average over keys, so padding and the length of a sequence do
    not change its size. Weights may be negative and have no fixed sum. It costs 4 n d c FLOPs.
    """

    def forward(self, heads: Heads) -> Float[Tensor, "b h q c"]:
        queries, keys, values, _, key_mask, dropout = heads
        count = keys.new_ones(1, 1, 1, keys.shape[2]) if key_mask is None else key_mask.to(keys.dtype)
        count = summed(count.sum(-1, keepdim=True), self.shard_of_sums).clamp(min=1)
        keys = keys if key_mask is None else keys.masked_fill(~key_mask.mT, 0)
        context = summed(F.dropout(keys.mT / count, dropout) @ values, self.shard_of_sums)
        return queries @ context
