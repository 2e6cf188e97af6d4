"""Convolution along the tokens by FFT, and what an FFT costs."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def convolve(
    x: Float[Tensor, "b n d"], after: Float[Tensor, "d n"], before: Float[Tensor, "d n"]
) -> Float[Tensor, "b n d"]:
    """y_l = sum_j after_j x_(l-j) + sum_j before_j x_(l+1+j), by FFTs of length 2 n; x is zero beyond its ends."""
    n = x.shape[1]
    kernel = torch.fft.rfft(torch.cat([after, before.flip(-1)], dim=-1))
    return torch.fft.irfft(torch.fft.rfft(x.mT, 2 * n) * kernel, 2 * n)[..., :n].mT


def _of_fft(shape: Sequence[int], dims: Sequence[int], share: float, length: int | None = None) -> int:
    """5 m log2(m) FLOPs for m complex points, half as many for real ones."""
    shape = list(shape)
    if length is not None:
        shape[dims[-1]] = length
    return round(share * 5 * math.prod(shape) * sum(math.log2(shape[dim]) for dim in dims))


# torch counts no FLOPs of FFTs: formulas for FlopCounterMode's custom_mapping, from shapes.
FFT_FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._fft_r2c: lambda x, dims, *_, **__: _of_fft(x, dims, 0.5),
    torch.ops.aten._fft_c2r: lambda x, dims, _, length, **__: _of_fft(x, dims, 0.5, length),
    torch.ops.aten._fft_c2c: lambda x, dims, *_, **__: _of_fft(x, dims, 1.0),
}
