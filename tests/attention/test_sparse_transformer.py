"""The Sparse Transformer's two patterns equal softmax attention with a mask of all pairs, in float64."""

import pytest
import torch
from timm.layers.attention import Attention
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.flop_counter import FlopCounterMode

from longseq.arguments import ArgumentError
from longseq.attention import SparseTransformer, TokenGrid
from longseq.attention.layer import AttentionLayer

D, H = 12, 2
GRID = TokenGrid((7, 5))


def layers_of(mechanism: SparseTransformer, grid: TokenGrid, heads: int = H) -> list[AttentionLayer]:
    torch.manual_seed(0)
    layers = mechanism.layers([Attention(D, heads, qkv_bias=True) for _ in range(2)], grid)
    for parameter in (parameter for layer in layers for parameter in layer.parameters()):
        torch.nn.init.normal_(parameter)
    return [layer.double().eval() for layer in layers]


def factors(mechanism: SparseTransformer, n: int, prefix: int, stride: int) -> tuple[Tensor, Tensor]:
    """Which tokens are in A1 and in A2 of each, or global: two matrices (n, n), pair by pair."""
    near, far = torch.ones(2, n, n, dtype=torch.bool)
    for i in range(n - prefix):
        for j in range(n - prefix):
            if mechanism.pattern == "strided":
                pair = abs(i - j) <= stride, (i - j) % stride == 0
            else:
                pair = i // stride == j // stride, j % stride >= stride - mechanism.last
            near[prefix + i, prefix + j], far[prefix + i, prefix + j] = pair
    return near, far


def masks(mechanism: SparseTransformer, n: int, prefix: int, stride: int) -> list[Tensor]:
    """The mask (h, n, n) of each of two layers."""
    near, far = factors(mechanism, n, prefix, stride)
    if mechanism.factors == "heads":
        return [torch.stack([near, far])] * 2
    if mechanism.factors == "interleaved":
        return [torch.stack([mask] * H) for mask in (near, far)]
    return [torch.stack([near | far] * H)] * 2


MECHANISMS = [
    (pattern, stride, last, factor)
    for pattern, stride, last in (("strided", None, 8), ("strided", 1, 8), ("strided", 8, 8), ("fixed", None, 2),
                                  ("strided", 20, 8), ("strided", 40, 8), ("fixed", 8, 8), ("fixed", 40, 3))
    for factor in ("merged", "interleaved", "heads")
]  # fmt: skip


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("arguments", MECHANISMS, ids=str)
def test_values_and_gradients_are_those_of_a_mask_of_all_pairs(arguments: tuple, prefix: int) -> None:
    mechanism, grid = SparseTransformer(*arguments), TokenGrid(GRID.size, prefix)
    n = grid.num_tokens
    for layer, mask in zip(layers_of(mechanism, grid), masks(mechanism, n, prefix, mechanism.stride or 5), strict=True):
        # the mask of a token that attends to none has no softmax: its outcome is left out
        is_seen = mask.any(-1).all(0)
        x = torch.randn(2, n, D, dtype=torch.float64, requires_grad=True)
        Q, K, V = layer.qkv(x).unflatten(-1, (3, H, D // H)).permute(2, 0, 3, 1, 4)
        scores = (Q @ K.mT * (D // H) ** -0.5).masked_fill(~mask, -1e300)
        expected = layer.proj((scores.softmax(-1) @ V).transpose(1, 2).flatten(2))[:, is_seen]
        ours, inputs = layer(x)[:, is_seen], [x, *layer.parameters()]
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
        cotangent = torch.randn_like(ours)
        for mine, other in zip(
            torch.autograd.grad(ours, inputs, cotangent), torch.autograd.grad(expected, inputs, cotangent), strict=True
        ):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
        assert is_seen.all() or (mechanism.pattern == "fixed" and mechanism.stride == 40 and not prefix)


@pytest.mark.thorough
@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_the_values_are_those_of_flex_attention_with_the_papers_pattern(pattern: str) -> None:
    stride, last = 5, 2

    def attends(_: Tensor, __: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if pattern == "strided":
            return ((i - j).abs() <= stride) | ((i - j) % stride == 0)
        return (i // stride == j // stride) | (j % stride >= stride - last)

    n = GRID.num_tokens
    layer = layers_of(SparseTransformer(pattern, stride, last), GRID)[0].requires_grad_(False)
    x = torch.randn(2, n, D, dtype=torch.float64)
    heads = layer.qkv(x).unflatten(-1, (3, H, D // H)).permute(2, 0, 3, 1, 4)
    mask = create_block_mask(attends, None, None, n, n, device="cpu")
    expected = layer.proj(flex_attention(*heads, block_mask=mask).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [1, 13])
@pytest.mark.parametrize(
    "mechanism",
    [SparseTransformer(), SparseTransformer("fixed", 6, 2), SparseTransformer("fixed", 6, 2, "interleaved"),
     SparseTransformer(factors="heads")],
    ids=repr,
)  # fmt: skip
def test_a_padded_clip_gives_what_it_gives_alone_without_prefix_tokens_too(
    mechanism: SparseTransformer, length: int
) -> None:
    for layer in layers_of(mechanism, GRID):
        batch = torch.randn(1, GRID.num_tokens, D, dtype=torch.float64, requires_grad=True)
        padded = layer(batch, (torch.arange(GRID.num_tokens) < length)[None, None, None])
        torch.testing.assert_close(padded[:, :length], layer(batch[:, :length]), rtol=1e-10, atol=1e-10)
        assert torch.autograd.grad(padded.sum(), batch)[0].isfinite().all()


@pytest.mark.parametrize(
    "sizes",
    [((64, 64), (128, 128)), ((4096, 1), (16384, 1)), ((1024, 4), (4096, 4)), ((4, 1024), (4, 4096))],
    ids=str,
)
def test_costs_of_attention_grow_with_n_times_the_square_root_of_n(sizes: tuple) -> None:
    costs = []
    for size in sizes:
        grid = TokenGrid(size)
        n, layer = grid.num_tokens, layers_of(SparseTransformer(), grid)[0]
        with FlopCounterMode(display=False) as counter:
            layer.to("meta")(torch.empty(1, n, D, device="meta", dtype=torch.float64))
        costs.append(counter.get_total_flops() - 8 * n * D * D)
        assert costs[-1] == 16 * n**1.5 * D
    assert costs[1] == 8 * costs[0]  # of four times the tokens


@pytest.mark.parametrize(
    "argument",
    [{"stride": 0}, {"pattern": "fixed", "last": 0}, {"pattern": "fixed", "last": 6}],
    ids=str,
)
def test_what_it_cannot_be_is_named(argument: dict) -> None:
    with pytest.raises(ArgumentError, match=rf"^{list(argument)[-1]} must be"):
        layers_of(SparseTransformer(**argument), GRID)


def test_an_odd_number_of_heads_has_no_halves() -> None:
    with pytest.raises(ArgumentError, match="^factors must be merged or interleaved with an odd number of heads"):
        layers_of(SparseTransformer(factors="heads"), GRID, heads=3)
