"""The control without attention (benchmarks/pointwise.py): every token is treated as if it were the only one."""

import torch
from small_vit import vit

from benchmarks.pointwise import Pointwise
from longseq.attention import Softmax, carry, plug


def test_a_token_is_treated_as_attention_treats_a_sequence_of_one() -> None:
    attention = plug(vit(), Softmax()).double().eval()
    alone = plug(vit(), Pointwise()).double().eval()
    assert carry(attention, alone) == []
    x = torch.randn(2, 65, 32, dtype=torch.float64)
    for ours, theirs in zip(alone.blocks, attention.blocks, strict=True):
        expected = torch.cat([theirs.attn(token) for token in x.split(1, dim=1)], dim=1)
        torch.testing.assert_close(ours.attn(x), expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(ours.attn(x, num_queries=3), expected[:, :3], rtol=1e-10, atol=1e-10)
