"""Compare Verma without E with fla-core's linear attention, whose Triton kernel Triton's interpreter runs on a CPU."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import torch
import triton
from timm.layers.attention import Attention
from torch import Tensor

autotune = triton.autotune
triton.autotune = lambda configs, **others: autotune(configs[:1], **others)  # there is no GPU to time the others on
from fla.ops.linear_attn import fused_recurrent_linear_attn  # noqa: E402

from longseq.attention import TokenGrid, Verma  # noqa: E402

B, H, N, C = 1, 2, 20, 8


def both_ways(*parts: Tensor) -> Tensor:
    """The kernel is causal: forwards and backwards together, less each token's own share, are all tokens."""
    queries, keys, values = parts
    forwards, backwards = (
        fused_recurrent_linear_attn(*(part.flip(turn) for part in parts), scale=1.0, normalize=False)[0].flip(turn)
        for turn in ([], [1])
    )
    return forwards + backwards - (queries * keys).sum(-1, keepdim=True) * values


if __name__ == "__main__":
    torch.manual_seed(0)
    (layer,) = Verma().layers([Attention(H * C, H)], TokenGrid((N, 1)))
    x = torch.randn(B, N, H * C, requires_grad=True)
    queries, keys, values = layer.qkv(x).view(B, N, 3, H, C).unbind(2)
    mixed = both_ways((queries / C**0.5).softmax(-1), (keys / C**0.5).softmax(1), values)
    ours, theirs = layer(x), layer.proj(mixed.flatten(2))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    cotangent, inputs = torch.randn_like(x), [x, *layer.parameters()]
    gradients = (torch.autograd.grad(result, inputs, cotangent) for result in (ours, theirs))
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    print(f"{len(inputs)} gradients are equal")
