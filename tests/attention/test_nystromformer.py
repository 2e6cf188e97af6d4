"""Nystrom attention, against implementations that no one here wrote and against exact attention."""

import pytest
import torch
from nystrom_attention import NystromAttention
from timm.layers.attention import Attention
from torch import Tensor
from transformers import NystromformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

from longseq.arguments import ArgumentError
from longseq.attention import Nystromformer, Softmax, TokenGrid
from longseq.attention.layer import AttentionLayer
from longseq.attention.others.nystromformer import iterative_inverse

N, D = 24, 12


def layer_of(mechanism: Nystromformer | Softmax, heads: int = 3, qkv_bias: bool = True) -> AttentionLayer:
    torch.manual_seed(0)
    (layer,) = mechanism.layers([Attention(D, heads, qkv_bias=qkv_bias)], TokenGrid((N, 1)))
    return layer.double().eval()


def gradients(out: Tensor, weights: list[Tensor]) -> list[Tensor]:
    cotangent = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    return list(torch.autograd.grad(out, weights, cotangent))


def assert_close(results: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel_size", [0, 5])
def test_values_and_gradients_are_those_of_transformers(kernel_size: int) -> None:
    layer = layer_of(Nystromformer(6, iterations=6, kernel_size=kernel_size))
    config = NystromformerConfig(
        hidden_size=D, num_attention_heads=3, num_landmarks=6, segment_means_seq_len=N,
        conv_kernel_size=5, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = NystromformerSelfAttention(config).double().eval()
    theirs.conv_kernel_size = kernel_size or None  # its configuration takes no None
    theirs.init_option = "exact"  # by the norms of each matrix, as in the paper; its default mixes samples and heads
    for linear, weight, bias in zip(
        (theirs.query, theirs.key, theirs.value), layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3), strict=True
    ):
        linear.weight, linear.bias = torch.nn.Parameter(weight.detach()), torch.nn.Parameter(bias.detach())
    kernels: list[list[Tensor]] = [[], []]
    if kernel_size:
        theirs.conv.weight = torch.nn.Parameter(layer.formula.convolution.weight.detach())
        kernels = [[layer.formula.convolution.weight], [theirs.conv.weight]]
    x = torch.randn(2, N, D, dtype=torch.float64, requires_grad=True)
    layer.proj = torch.nn.Identity()
    ours, expected = layer(x), theirs(x)[0]
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    of_qkv = [theirs.query.weight, theirs.key.weight, theirs.value.weight]
    of_x, *rest, queries, keys, values = gradients(expected, [x, *kernels[1], *of_qkv])
    assert_close(gradients(ours, [x, *kernels[0], layer.qkv.weight]), [of_x, *rest, torch.cat([queries, keys, values])])


def test_one_head_is_that_of_nystrom_attention() -> None:
    """It takes the largest sums over all samples and heads, so there is one of each."""
    layer = layer_of(Nystromformer(6, kernel_size=33), heads=1, qkv_bias=False)
    theirs = NystromAttention(D, dim_head=D, heads=1, num_landmarks=6, pinv_iterations=6).double().eval()
    theirs.to_qkv, theirs.to_out[0], theirs.res_conv = layer.qkv, layer.proj, layer.formula.convolution
    x = torch.randn(1, N, D, dtype=torch.float64, requires_grad=True)
    inputs = [x, *layer.parameters()]
    torch.testing.assert_close(layer(x), theirs(x), rtol=1e-10, atol=1e-10)
    assert_close(gradients(layer(x), inputs), gradients(theirs(x), inputs))


def test_with_a_landmark_for_each_token_it_is_exact_attention() -> None:
    nystrom, exact = layer_of(Nystromformer(N, iterations=60)), layer_of(Softmax())
    nystrom.load_state_dict(exact.state_dict())
    x = torch.randn(2, N, D, dtype=torch.float64)
    torch.testing.assert_close(nystrom(x), exact(x), rtol=1e-6, atol=1e-6)


def test_the_iterations_lead_to_the_pseudo_inverse() -> None:
    torch.manual_seed(0)
    A = torch.randn(3, 6, 6, dtype=torch.float64).mul(3).softmax(-1)
    torch.testing.assert_close(iterative_inverse(A, 40), torch.linalg.pinv(A), rtol=1e-8, atol=1e-8)


def test_padding_is_in_no_landmark() -> None:
    """13 tokens fill three windows of four and a part of the fourth; the last two hold padding alone."""
    layer = layer_of(Nystromformer(6, kernel_size=5))
    clip = torch.randn(1, 13, D, dtype=torch.float64)
    batch = torch.cat([clip, torch.randn(1, N - 13, D, dtype=torch.float64)], dim=1)
    present = (torch.arange(N) < 13)[None, None, None]
    torch.testing.assert_close(layer(batch, present)[:, :13], layer(clip), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("argument", [{"k": 25}, {"k": 0}, {"iterations": 0}, {"kernel_size": 4}], ids=str)
def test_what_it_cannot_be_is_named(argument: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match=rf"^{next(iter(argument))} must be"):
        layer_of(Nystromformer(**{"k": 6, **argument}))
