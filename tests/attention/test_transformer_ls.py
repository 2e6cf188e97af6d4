"""Long-short attention equals the paper's formula, written token by token in float64."""

import pytest
import torch
import torch.nn.functional as F
from long_short_transformer.long_short_transformer import LongShortAttention
from timm.layers.attention import Attention
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.attention import Softmax, TokenGrid, TransformerLS
from longseq.attention.layer import AttentionLayer

D, H, K, PREFIX = 12, 3, 4, 2
C = D // H
GRID = TokenGrid((7, 5), PREFIX)


def layer_of(mechanism: TransformerLS | Softmax, grid: TokenGrid = GRID) -> AttentionLayer:
    torch.manual_seed(0)
    (layer,) = mechanism.layers([Attention(D, H, qkv_bias=True)], grid)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer.double().eval()


def nearby(token: int, other: int, mechanism: TransformerLS) -> bool:
    """Whether the other token is in the block of a token or at most half a block away from it."""

    def is_near(at: int, there: int) -> bool:
        w = mechanism.window
        first = at // w * w
        return first - max(w // 2, 1) <= there < first + w + max(w // 2, 1)

    if not mechanism.grid:
        return is_near(token, other)
    columns = GRID.size[1]
    rows_near = is_near(token // columns, other // columns)
    return rows_near and (mechanism.window >= columns or is_near(token % columns, other % columns))


def naive(layer: AttentionLayer, mechanism: TransformerLS, clip: Tensor) -> Tensor:
    project = layer.project_keys
    E = (clip @ project.weight.mT).softmax(1).mT  # (h, k, n)
    queries, keys, values = layer.qkv(clip).split(D, dim=1)

    def with_summaries(tokens: Tensor) -> list[Tensor]:
        short = torch.cat([E[head] @ part for head, part in enumerate(tokens.split(C, dim=1))], dim=1)
        if mechanism.norm:
            near, far = project.norm_of_window, project.norm_of_summaries
            tokens = F.layer_norm(tokens, (D,), near.weight, near.bias)
            short = F.layer_norm(short, (D,), far.weight, far.bias)
        return list(torch.cat([tokens, short]).split(C, dim=1))

    heads = []
    for Q, K_, V in zip(queries.split(C, dim=1), with_summaries(keys), with_summaries(values), strict=True):
        rows = []
        for token in range(len(clip)):
            seen = [
                token < PREFIX or other < PREFIX or nearby(token - PREFIX, other - PREFIX, mechanism)
                for other in range(len(clip))
            ]
            seen = torch.tensor([*seen, *[True] * K])
            rows.append((Q[token] @ K_[seen].T / C**0.5).softmax(0) @ V[seen])
        heads.append(torch.stack(rows))
    return layer.proj(torch.cat(heads, dim=1))


MECHANISMS = [
    TransformerLS(K, window=4),
    TransformerLS(K, window=3, grid=True),
    TransformerLS(K, window=2, grid=True, norm=False),
    TransformerLS(K, window=1),
    TransformerLS(K, window=6, grid=True),
    TransformerLS(K, window=4, grid=True),
    TransformerLS(K, window=20),
]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
def test_values_and_gradients_are_those_of_the_formula(mechanism: TransformerLS) -> None:
    layer = layer_of(mechanism)
    x = torch.randn(2, GRID.num_tokens, D, dtype=torch.float64, requires_grad=True)
    ours, papers = layer(x), torch.stack([naive(layer, mechanism, clip) for clip in x])
    torch.testing.assert_close(ours, papers, rtol=1e-10, atol=1e-10)
    cotangent, inputs = torch.randn_like(x), [x, *layer.parameters()]
    for mine, theirs in zip(
        torch.autograd.grad(ours, inputs, cotangent), torch.autograd.grad(papers, inputs, cotangent), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
@pytest.mark.parametrize("length", [PREFIX + 1, PREFIX + 13])
def test_a_padded_clip_gives_what_it_gives_alone(mechanism: TransformerLS, length: int) -> None:
    layer = layer_of(mechanism)
    batch = torch.randn(1, GRID.num_tokens, D, dtype=torch.float64)
    present = (torch.arange(GRID.num_tokens) < length)[None, None, None]
    padded, alone = layer(batch, present)[0, :length], layer(batch[:, :length], present[..., :length])[0]
    torch.testing.assert_close(padded, alone, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(alone, naive(layer, mechanism, batch[0, :length]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("window", [1, 21], ids=["the token and its neighbours", "the whole sequence"])
@pytest.mark.parametrize(("heads", "norm"), [(1, True), (3, False)])
def test_values_and_gradients_are_those_of_long_short_transformer(window: int, heads: int, norm: bool) -> None:
    """In that package keys are values, E comes from them, a norm is one of a head, and a window has a block more on
    each side: weights are tied here, norms are those of one head, and both windows are tokens that it has too."""
    torch.manual_seed(0)
    n, c = 21, D // heads
    theirs = LongShortAttention(dim=D, heads=heads, dim_head=c, causal=False, window_size=window, r=K).double()
    theirs.pos_emb = None
    if not norm:
        theirs.local_norm = theirs.global_norm = torch.nn.Identity()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    (layer,) = TransformerLS(K, window, norm=norm).layers([Attention(D, heads)], TokenGrid((n, 1)))
    shared, E = theirs.to_kv.weight, theirs.to_dynamic_proj.weight
    weights = {
        "qkv.weight": torch.cat([theirs.to_q.weight, shared, shared]),
        "project_keys.weight": torch.stack([E @ of_head for of_head in shared.split(c)]),
        **{f"proj.{name}": weight for name, weight in theirs.to_out.named_parameters()},
        **{f"project_keys.norm_of_window.{name}": weight for name, weight in theirs.local_norm.named_parameters()},
        **{f"project_keys.norm_of_summaries.{name}": weight for name, weight in theirs.global_norm.named_parameters()},
    }
    x = torch.randn(2, n, D, dtype=torch.float64, requires_grad=True)
    ours, expected = torch.func.functional_call(layer.double(), weights, x), theirs(x)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    inputs, cotangent = [x, *theirs.parameters()], torch.randn_like(x)
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, cotangent), torch.autograd.grad(expected, inputs, cotangent), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def test_costs_grow_with_the_tokens_and_not_with_their_square() -> None:
    costs = []
    for n in (512, 1024, 2048):
        layer = layer_of(TransformerLS(K, window=4), TokenGrid((n, 1)))
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            layer.to("meta")(torch.empty(1, n, D, device="meta", dtype=torch.float64))
        costs.append(counter.get_total_flops())
    assert costs[1] == 2 * costs[0] and costs[2] == 4 * costs[0]


@pytest.mark.parametrize("argument", [{"k": 0}, {"k": 38}, {"window": 0}], ids=str)
def test_what_it_cannot_be_is_named(argument: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match=rf"^{next(iter(argument))} must be"):
        layer_of(TransformerLS(**argument))
