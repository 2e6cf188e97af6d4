"""Attention of many queries to few keys on a GPU: queries in groups, so that the backward pass has enough blocks.

FlashAttention-2's backward pass starts one block per 128 keys, head and sample. With 128 keys and 12 heads these are
12 blocks for the 132 processors of an H100. Queries do not depend on each other, so s groups of them can be treated as
s samples with the same keys. This gives s times as many blocks, and the keys' gradients are summed over the groups.
Tokens are contiguous in memory, so the groups are a view; as heads of grouped-query attention they would be copied.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longseq.attention.heads import Heads
from longseq.compat.torch import processors

_KEYS_OF_A_BLOCK = 128
_BLOCKS_A_PROCESSOR = 4  # so that the last round, which leaves some processors idle, is a small part of the time
_FEWEST_QUERIES = 4096  # of a group; with fewer, starting the kernels takes longer than the GPU gains (docs/results)


def num_groups(samples: int, heads: int, queries: int, keys: int, processors: int) -> int:
    """The smallest number of groups, a power of two, that gives each processor its blocks.

    Args:
        samples: b.
        heads: h.
        queries: n.
        keys: k.
        processors: Of the device (streaming multiprocessors); 0 for no groups.
    """
    blocks, groups = samples * heads * -(-keys // _KEYS_OF_A_BLOCK), 1
    while blocks * groups < _BLOCKS_A_PROCESSOR * processors and queries >= 2 * groups * _FEWEST_QUERIES:
        groups *= 2
    return groups


def groups_for(queries: Float[Tensor, "b h n c"], keys: Float[Tensor, "b h k c"]) -> int:
    """The number of groups on the device of these queries: 1 unless it is a CUDA GPU."""
    if queries.device.type != "cuda":
        return 1
    b, h, n, _ = queries.shape
    return num_groups(b, h, n, keys.shape[2], _processors(queries.device.index or 0))


@torch.compiler.assume_constant_result
def _processors(index: int) -> int:
    return processors(torch.device("cuda", index)) if torch.cuda.is_available() else 0


def attend_in_groups(heads: Heads, groups: int) -> Float[Tensor, "b h q c"]:
    """softmax(Q K' / sqrt(c)) V by torch's fused kernel, with this number of groups of queries."""
    queries, keys, values, _, key_mask, dropout = heads
    if groups == 1:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=key_mask, dropout_p=dropout)
    b, n = len(queries), queries.shape[2]
    if missing := -n % groups:
        queries = F.pad(queries, (0, 0, 0, missing))
    of_groups = queries.transpose(1, 2).unflatten(1, (groups, -1)).flatten(0, 1).transpose(1, 2)
    keys, values = _repeated(keys, groups), _repeated(values, groups)
    mask = None if key_mask is None else _repeated(key_mask, groups)
    mixed = F.scaled_dot_product_attention(of_groups, keys, values, attn_mask=mask, dropout_p=dropout)
    return mixed.transpose(1, 2).unflatten(0, (b, groups)).flatten(1, 2).transpose(1, 2)[:, :, :n]


def _repeated(part: Tensor, groups: int) -> Tensor:
    return part[:, None].expand(-1, groups, -1, -1, -1).flatten(0, 1)
