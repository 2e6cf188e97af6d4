"""The dynamic projection: its formula, and its independence of places and lengths."""

import math

import pytest
import torch
from small_vit import vit

from longseq import resize
from longseq.attention import Dynamic, Linformer, TokenGrid, Verma, plug
from longseq.attention.dynamic import DynamicProjection


def naive(x, W, tokens, scale=1.0):
    """For one sample and one head: the softmax of X W over the n tokens of x weights the means of `tokens`."""
    E = torch.stack([torch.softmax(torch.stack([scale * w @ token for token in x]), dim=0) for w in W])
    return torch.stack([sum(share * token for share, token in zip(row, tokens, strict=True)) for row in E])


@pytest.mark.parametrize(("norm", "power"), [(False, 0.0), (True, 0.0), (False, 1.5)])
@pytest.mark.parametrize("heads", [None, 4])
def test_each_row_is_a_softmax_over_the_tokens(heads: int | None, norm: bool, power: float) -> None:
    torch.manual_seed(0)
    layer = Dynamic(norm, power).build(TokenGrid((3, 4)), 5, 8, heads).double()
    x, values = torch.randn(2, 2, 12, 8, dtype=torch.float64)
    scale = (math.log(12) / math.log(1000)) ** power
    W = layer.weight.detach() if heads else layer.weight.detach()[None]
    expected = [
        torch.cat(
            [naive(sample, w, part, scale) for w, part in zip(W, value.chunk(len(W), dim=-1), strict=True)], dim=-1
        )
        for sample, value in zip(x, values, strict=True)
    ]
    short = torch.stack(expected)
    if norm:
        short = (short - short.mean(-1, keepdim=True)) / (short.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(layer.given(x, None)(values), short, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "mechanism",
    [Linformer(5, projection=Dynamic()), Linformer(5, projection=Dynamic(norm=True)), Verma(5, "none", Dynamic())],
    ids=repr,
)
def test_keys_and_values_are_shortened_as_the_tokens_say_whatever_wraps_the_layer(mechanism) -> None:
    layer = plug(vit(), mechanism).double().eval().blocks[0].attn
    x = torch.randn(2, 65, 32, dtype=torch.float64)
    plain = layer(x)
    layer.qkv.register_forward_hook(lambda *_: None)  # with a hook, the layer computes in the paper's order
    torch.testing.assert_close(layer(x), plain, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("power", [0.0, 2.0])
@pytest.mark.parametrize("heads", [None, 4])
def test_padding_counts_nothing_at_any_length(heads: int | None, power: float) -> None:
    torch.manual_seed(0)
    layer = Dynamic(length_scaling=power).build(TokenGrid((3, 4)), 5, 8, heads).double()
    tokens = torch.randn(1, 40, 8, dtype=torch.float64)
    present = torch.arange(40)[None, :, None] < 7
    torch.testing.assert_close(layer(tokens, present), layer(tokens[:, :7]), rtol=1e-12, atol=1e-12)


def test_no_weight_knows_the_length() -> None:
    small, large = (plug(vit(size), Linformer(7, projection=Dynamic())) for size in (8, 16))
    shapes = [
        {name: tuple(weight.shape) for name, weight in model.named_parameters() if name != "pos_embed"}
        for model in (small, large)
    ]
    assert shapes[0] == shapes[1]
    assert shapes[0]["blocks.0.attn.project_keys.weight"] == (7, 32)
    carried = resize(small, (1, 16, 16))
    for name, part in small.named_modules():
        if isinstance(part, DynamicProjection):
            assert torch.equal(carried.get_submodule(name).weight, part.weight)


def test_heads_share_one_length() -> None:
    with pytest.raises(ValueError, match=r"^k must be one number per layer with Dynamic, got \[3, 4, 5, 6\]; give one"):
        plug(vit(), Linformer([[3, 4, 5, 6], [7, 7, 7, 7]], "none", Dynamic()))
