"""Longformer equals transformers' self-attention and the formula written token by token, in float64."""

from types import SimpleNamespace

import pytest
import torch
from timm.layers.attention import Attention
from torch import Tensor
from transformers import LongformerConfig
from transformers.models.longformer import modeling_longformer

from longseq.arguments import ArgumentError
from longseq.attention import Longformer, TokenGrid
from longseq.attention.layer import AttentionLayer

D, H = 12, 3
C = D // H
GRID = TokenGrid((7, 5))


def layer_of(mechanism: Longformer, grid: TokenGrid) -> AttentionLayer:
    torch.manual_seed(0)
    (layer,) = mechanism.layers([Attention(D, H, qkv_bias=True)], grid)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer.double().eval()


def assert_equal_with_gradients(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(ours)
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, cotangent), torch.autograd.grad(theirs, inputs, cotangent), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_global", [0, 3])
@pytest.mark.parametrize("num_padded", [0, 5])
def test_values_and_gradients_are_those_of_transformers(
    num_global: int, num_padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, window = 32, 8
    layer = layer_of(Longformer(window), TokenGrid((n - num_global, 1), num_global))
    config = LongformerConfig(
        attention_window=[window], hidden_size=D, num_attention_heads=H, attention_probs_dropout_prob=0.0
    )
    # it casts to float32 by this name
    doubles = SimpleNamespace(**{**vars(torch), "float32": torch.float64})
    monkeypatch.setattr(modeling_longformer, "torch", doubles)
    theirs = modeling_longformer.LongformerSelfAttention(config, 0).double().eval()
    weights = {}
    for linear, suffix in ((layer.qkv, ""), (getattr(layer, "qkv_global", layer.qkv), "_global")):
        for name, weight, bias in zip(
            ("query", "key", "value"), linear.weight.chunk(3), linear.bias.chunk(3), strict=True
        ):
            weights |= {f"{name}{suffix}.weight": weight, f"{name}{suffix}.bias": bias}
    layer.proj = torch.nn.Identity()
    x = torch.randn(2, n, D, dtype=torch.float64, requires_grad=True)
    present = torch.arange(n) < torch.tensor([[n], [n - num_padded]])
    mask = torch.zeros(2, n, dtype=torch.float64).masked_fill(~present, -1e4)
    mask[:, :num_global] = 1e4
    given = {"is_index_masked": mask < 0, "is_index_global_attn": mask > 0, "is_global_attn": num_global > 0}
    expected = torch.func.functional_call(theirs, weights, (x, mask), given)[0]
    ours = layer(x, present[:, None, None] if num_padded else None)
    assert_equal_with_gradients(ours[present], expected[present], [x, *layer.parameters()])


def attended(mechanism: Longformer, grid: TokenGrid) -> Tensor:
    """Which tokens behind the prefix each attends to, token by token: (n, n)."""
    places = torch.arange(grid.num_tokens - grid.num_prefix_tokens)
    if not mechanism.grid:
        return (places[:, None] - places).abs() <= mechanism.window // 2
    rows, columns = places // grid.size[1], places % grid.size[1]
    distances = torch.stack([(along[:, None] - along).abs() for along in (rows, columns)])
    return (distances <= mechanism.window // 2).all(0)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize(
    "mechanism",
    [Longformer(4), Longformer(2), Longformer(2, grid=True), Longformer(4, grid=True), Longformer(8, grid=True),
     Longformer(12, grid=True), Longformer(512), Longformer(512, grid=True), Longformer(24), Longformer(68),
     Longformer(6, grid=True)],
    ids=repr,
)  # fmt: skip
def test_windows_of_the_sequence_and_of_the_grid_are_those_of_a_mask_of_all_pairs(
    mechanism: Longformer, prefix: int
) -> None:
    grid = TokenGrid(GRID.size, prefix)
    layer = layer_of(mechanism, grid)
    x = torch.randn(2, grid.num_tokens, D, dtype=torch.float64, requires_grad=True)

    def heads(linear: torch.nn.Module) -> Tensor:
        return linear(x).unflatten(-1, (3, H, C)).permute(2, 0, 3, 1, 4)

    (Q, K, V), (GQ, GK, GV) = heads(layer.qkv), heads(getattr(layer, "qkv_global", layer.qkv))
    mask = torch.ones(grid.num_tokens, grid.num_tokens, dtype=torch.bool)
    mask[prefix:, prefix:] = attended(mechanism, grid)
    dense = (Q @ K.mT * C**-0.5).masked_fill(~mask, -float("inf")).softmax(-1) @ V
    of_prefix = (GQ[:, :, :prefix] @ GK.mT * C**-0.5).softmax(-1) @ GV
    expected = layer.proj(torch.cat([of_prefix, dense[:, :, prefix:]], 2).transpose(1, 2).flatten(2))
    assert_equal_with_gradients(layer(x), expected, [x, *layer.parameters()])


@pytest.mark.parametrize("length", [1, 13])
@pytest.mark.parametrize("mechanism", [Longformer(4), Longformer(4, grid=True)], ids=repr)
def test_a_padded_clip_gives_what_it_gives_alone_without_global_tokens_too(mechanism: Longformer, length: int) -> None:
    layer = layer_of(mechanism, GRID)
    batch = torch.randn(1, GRID.num_tokens, D, dtype=torch.float64, requires_grad=True)
    padded = layer(batch, (torch.arange(GRID.num_tokens) < length)[None, None, None])
    torch.testing.assert_close(padded[:, :length], layer(batch[:, :length]), rtol=1e-10, atol=1e-10)
    assert torch.autograd.grad(padded.sum(), batch)[0].isfinite().all()


def test_costs_grow_with_the_tokens_and_not_with_their_square() -> None:
    costs = []
    for n in (512, 1024, 2048):
        layer = layer_of(Longformer(16), TokenGrid((n, 1)))
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            layer.to("meta")(torch.empty(1, n, D, device="meta", dtype=torch.float64))
        assert counter.get_total_flops() == 8 * n * D * D + 6 * n * 16 * D
        costs.append(counter.get_total_flops())
    assert costs[1] == 2 * costs[0] and costs[2] == 4 * costs[0]


@pytest.mark.parametrize("window", [0, 7, -2])
def test_a_window_that_is_not_even_is_refused(window: int) -> None:
    with pytest.raises(ArgumentError, match=r"^window must be even and positive"):
        layer_of(Longformer(window), GRID)
