"""Windows of softmax attention on a GPU, by torch's flex_attention: it never writes scores to memory.

The tests run it on a CPU, where it has no gradients; docs/results has its speed and its values on a GPU.
"""

import functools
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from longseq.attention.heads import Heads

_BLOCK = 128  # tokens of a block of scores that the kernel computes or skips
_FEWEST = 8192  # tokens of a batch; at 4,096, where a GPU waits for its host, products of blocks were faster


def suits_flex(queries: Float[Tensor, "b h q c"], dropout: float) -> bool:
    """Whether the kernel supports these queries and is faster: on a GPU, with 32 bits at most, with 16, 32, 64 ...
    channels, without dropout, and with many tokens."""
    b, _, n, c = queries.shape
    suits = queries.dtype != torch.float64 and c >= 16 and c & (c - 1) == 0 and b * n >= _FEWEST
    return suits and queries.is_cuda and not dropout and _is_there()


@torch.compiler.assume_constant_result
def _is_there() -> bool:
    return torch.cuda.is_available()


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention  # imports torch._dynamo, which takes a second

    return torch.compile(flex_attention)


def attend_in_window(
    heads: Heads, window: int, num_prefix_tokens: int, attend: Callable[..., Tensor] | None = None
) -> Float[Tensor, "b h q c"]:
    """softmax(q_t [K_G; K_t]' / sqrt(c)) [V_G; V_t], K_t the keys at most a window from t, K_G those of prefix tokens.

    The queries are those of the first q tokens after the prefix tokens; a query without any key gets zeros. Blocks of
    scores without a pair are skipped, so time grows with n (window + 128).

    Args:
        heads: What a formula gets.
        window: Tokens on each side of t.
        num_prefix_tokens: How many of the first tokens are prefix tokens.
        attend: flex_attention; None for the compiled one.
    """
    from torch.nn.attention.flex_attention import BlockMask

    queries, keys, values, _, key_mask, _ = heads
    q, m, prefix = queries.shape[2], keys.shape[2], num_prefix_tokens
    there = None if key_mask is None else key_mask[:, 0, 0]

    def is_seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (j < prefix) | ((i + prefix - j).abs() <= window)
        return seen if there is None else seen & there[b, j]

    firsts, first_keys = (torch.arange(0, end, _BLOCK, device=queries.device) for end in (q, m))
    firsts = firsts[:, None] + prefix
    is_near = (first_keys <= firsts + _BLOCK - 1 + window) & (first_keys + _BLOCK - 1 >= firsts - window)
    blocks = is_near | (first_keys < prefix)
    counts = blocks.sum(-1, dtype=torch.int32)
    places = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    mask = BlockMask.from_kv_blocks(
        counts[None, None], places[None, None], BLOCK_SIZE=_BLOCK, mask_mod=is_seen, seq_lengths=(q, m)
    )
    return (attend or _compiled())(queries, keys, values, block_mask=mask)
