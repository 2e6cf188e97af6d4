"""What the guide "Add a mechanism" promises to a mechanism of the user's own, which no contract test has tried."""

from functools import partial
from typing import Any

import pytest
from small_vit import model
from torch import Tensor, nn

from longseq import Softmax
from longseq.arguments import ArgumentError
from longseq.attention.heads import Heads
from longseq.attention.layer import AttentionLayer


def old(queries: Tensor, keys: Tensor, values: Tensor, query_mask: Any, key_mask: Any, dropout: float) -> Tensor:
    return values


class Old(nn.Module):
    def forward(self, queries, keys, values, query_mask, key_mask, dropout):
        return values


@pytest.mark.parametrize("formula", [old, Old(), partial(old, dropout=0.0)], ids=["function", "module", "partial"])
def test_a_formula_with_the_six_arguments_of_before_is_refused_in_one_line(formula: Any) -> None:
    trained = model(Softmax()).blocks[0].attn
    with pytest.raises(ArgumentError, match="^formula must take one argument, Heads.*; write def .*queries, keys, val"):
        AttentionLayer(trained, formula)


def test_the_names_and_the_order_in_heads_are_those_of_the_arguments_of_before() -> None:
    assert Heads._fields == tuple(name for name in old.__annotations__ if name != "return")
