"""What the guide "Add a mechanism" promises to a mechanism of the user's own, which no contract test has tried."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from small_vit import model
from torch import Tensor, nn

from longseq import ImageEncoder, Softmax, Verma
from longseq.arguments import ArgumentError
from longseq.attention import Mechanism
from longseq.attention.grid import TokenGrid
from longseq.attention.heads import Heads
from longseq.attention.layer import AttentionLayer, Stack, softmax_formula


@dataclass(frozen=True)
class Agent(Mechanism):
    """Agent attention (arXiv:2312.08874): Y = softmax(Q A') softmax(A K') V, A the means of the queries in windows."""

    agents: int = 4

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls()]

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        return [AttentionLayer(trained, partial(by_agents, agents=self.agents)) for trained in stack]


def by_agents(heads: Heads, agents: int) -> Tensor:
    means = torch.stack([part.mean(2) for part in heads.queries.tensor_split(agents, dim=2) if part.shape[2]], dim=2)
    gathered = softmax_formula(heads._replace(queries=means))
    return softmax_formula(Heads(heads.queries, means, gathered))


@pytest.mark.parametrize("mechanism", [Agent(), Softmax(), Verma(normalize="columns")], ids=repr)
def test_a_mechanism_of_the_guide_gives_with_a_class_token_the_features_of_its_own_trunk(mechanism: Mechanism) -> None:
    torch.manual_seed(0)
    encoder = ImageEncoder((1, 6, 6), mechanism, dim=16, depth=2, heads=4, pool="token").double().eval()
    inputs = torch.rand(3, 1, 6, 6)
    with torch.no_grad():
        of_all = encoder.trunk.forward_features(encoder.prepared(inputs)[0])  # timm's way, where all queries are there
        torch.testing.assert_close(encoder(inputs), encoder.trunk.forward_head(of_all), rtol=1e-12, atol=1e-12)


def test_one_query_alone_would_be_another_result_for_agents() -> None:
    layer, x = model(Agent()).blocks[0].attn.eval(), torch.randn(2, 65, 32)
    assert torch.equal(layer(x, num_queries=1), layer(x)[:, :1])
    layer.independent_queries = True  # a wrong claim, which the guide's comparison shows
    assert (layer(x, num_queries=1) - layer(x)[:, :1]).abs().max() > 1e-5


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
