"""The control of attention whose weights do not depend on the tokens: Y = P (E V)."""

from typing import Any

import pytest
import torch
from small_vit import vit
from timm.layers.attention import Attention

from longseq.attention import Linformer, StaticMixing, TokenGrid, carry, plug
from longseq.encoders import ImageEncoder
from longseq.encoders.sharding import refuse_unsharded

B, N, K, D, H = 2, 24, 5, 12, 3
C = D // H


def layer_of() -> Any:
    torch.manual_seed(0)
    (layer,) = StaticMixing(K).layers([Attention(D, num_heads=H, qkv_bias=True)], TokenGrid((4, N // 4)))
    layer = layer.double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def naive(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """A clip and a head at a time, with biases before the products over tokens."""
    n, E, P = x.shape[1], layer.project_values.weight, layer.formula.weight
    of_values, bias = layer.qkv.weight[2 * D :], layer.qkv.bias[2 * D :]
    clips = []
    for clip in x:
        V = (clip @ of_values.T + bias).split(C, dim=1)
        clips.append(torch.cat([P[h, :n] @ (E[:, :n] @ V[h]) for h in range(H)], dim=1))
    return torch.stack(clips) @ layer.proj.weight.T + layer.proj.bias


def test_value_and_gradients_are_those_of_two_products_with_learned_matrices() -> None:
    layer = layer_of()
    x = torch.randn(B, N, D, dtype=torch.float64, requires_grad=True)
    inputs, cotangent = [x, *layer.parameters()], torch.randn(B, N, D, dtype=torch.float64)
    ours, expected = layer(x), naive(layer, x)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    both = (torch.autograd.grad(y, inputs, cotangent) for y in (ours, expected))
    for mine, theirs in zip(*both, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_its_weights_do_not_depend_on_the_tokens() -> None:
    layer = layer_of()
    with torch.no_grad():
        layer.qkv.bias.zero_()
        layer.proj.bias.zero_()
    first, second = torch.randn(2, B, N, D, dtype=torch.float64)
    torch.testing.assert_close(layer(2 * first - second), 2 * layer(first) - layer(second), rtol=1e-10, atol=1e-10)


def test_a_padded_clip_gives_what_the_first_columns_of_e_and_rows_of_p_give() -> None:
    layer, n = layer_of(), N - 7
    clip = torch.randn(1, n, D, dtype=torch.float64)
    batch = torch.cat([clip, torch.randn(1, N - n, D, dtype=torch.float64)], dim=1)
    present = (torch.arange(N) < n)[None, None, None]
    torch.testing.assert_close(layer(batch, present)[:, :n], naive(layer, clip), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match=rf"^tokens must be the {N} that E was built for, got {n}"):
        layer(clip)


def test_it_has_a_matrix_for_each_head_and_linformers_e_fits_it() -> None:
    trained, new = plug(vit(), Linformer(K)), plug(vit(), StaticMixing(K))
    for block in trained.blocks:
        torch.nn.init.normal_(block.attn.project_values.weight)
    assert carry(trained, new) == ["blocks.0.attn.formula.weight", "blocks.1.attn.formula.weight"]
    for ours, theirs in zip(new.blocks, trained.blocks, strict=True):
        assert ours.attn.formula.weight.shape == (4, 65, K)
        assert torch.equal(ours.attn.project_values.weight, theirs.attn.project_values.weight)
    assert carry(plug(vit(), StaticMixing(K + 1)), new) == [
        f"blocks.{depth}.attn.{name}"
        for depth in (0, 1)
        for name in ("project_keys", "project_values", "formula.weight")
    ]


def test_what_it_cannot_do_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^k must be in 1..24 .* got 25"):
        StaticMixing(25).layers([Attention(D, num_heads=H)], TokenGrid((4, 6)))
    with pytest.raises(ValueError, match=r"^attention must take sequences of any length, but StaticMixing is bound"):
        ImageEncoder((1, 8, 8), StaticMixing(4), dim=8, depth=1, heads=2, positions="none", any_length=True)
    with pytest.raises(ValueError, match=r"^attention must meet all tokens in a sum to be shared by several processes"):
        refuse_unsharded(ImageEncoder((1, 8, 8), StaticMixing(4), dim=8, depth=1, heads=2))
