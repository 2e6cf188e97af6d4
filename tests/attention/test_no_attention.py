"""The control without attention: every token is treated as if it were the only one."""

import pytest
import torch
from small_vit import vit

from longseq.attention import NoAttention, Softmax, carry, plug
from longseq.encoders import ImageEncoder


def test_a_token_is_treated_as_attention_treats_a_sequence_of_one() -> None:
    attention = plug(vit(), Softmax()).double().eval()
    alone = plug(vit(), NoAttention()).double().eval()
    assert carry(attention, alone) == []
    x = torch.randn(2, 65, 32, dtype=torch.float64)
    for ours, theirs in zip(alone.blocks, attention.blocks, strict=True):
        expected = torch.cat([theirs.attn(token) for token in x.split(1, dim=1)], dim=1)
        torch.testing.assert_close(ours.attn(x), expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(ours.attn(x, num_queries=3), expected[:, :3], rtol=1e-10, atol=1e-10)


def test_a_class_token_that_would_see_no_other_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^attention must mix tokens for a class token.* NoAttention; give pool avg"):
        ImageEncoder((1, 8, 8), NoAttention(), dim=8, depth=2, heads=2, pool="token")
