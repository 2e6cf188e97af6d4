"""Local mixing by one kernel on a GPU: X + W * X, where the tokens lie, without a copy of the grid.

A convolution of torch wants the grid alone, in its own precision and memory layout, so the grid is copied before and
behind it, and the prefix tokens are cut off and put back. The kernels read each token once from memory and compute in
float32. The gradients of the weights are sums over tokens: each program of the GPU writes a partial sum, so nothing
depends on the order in which programs finish.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from longseq.compat.torch import (
    HAS_TRITON,
    bytes_of_mask,
    gradients_by_autograd,
    is_transformed,
    with_adjacent_channels,
)

# How the kernels are launched: the fastest on an H200 of 32 that were tried for `mix`, and of 60 for `sum_gradients`.
_BLOCK, _CHANNELS = 16, 64  # tokens and channels of a tile
_SUMMED = 128  # channels of a tile that sums gradients
_NUMBERS = 8192  # of such a tile: taps, rounded up, times tokens and channels; they must fit into registers
_PROGRAMS = 2560  # that sum gradients
_MOST_TAPS = 64


class Place(NamedTuple):
    """Where the grid lies in a sequence.

    Attributes:
        prefix: Tokens before the grid.
        columns: Columns of the grid.
        height, width: Those of the convolution's kernel, both odd.
    """

    prefix: int
    columns: int
    height: int
    width: int


def suits_local_kernel(tokens: Tensor, num_taps: int) -> bool:
    """Whether ``mixed_locally`` can compute it. It depends on shapes, types and the device only, so a compiler sees no
    branch."""
    is_fast = tokens.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if tokens.device.type != "cuda" or not HAS_TRITON or not is_fast or num_taps > _MOST_TAPS or is_transformed():
        return False
    return not torch.compiler.is_exporting()  # an exported program must run without longseq


def mixed_locally(
    tokens: Float[Tensor, "b n d"],
    weight: Float[Tensor, "d 1 height width"],
    bias: Float[Tensor, " d"],
    mask: Bool[Tensor, "b n"] | None,
    prefix: int,
    columns: int,
) -> Float[Tensor, "b n d"]:
    """X + W * X + bias on the grid, in the tokens' precision; prefix tokens stay unchanged.

    Args:
        tokens: Prefix tokens, and then the rows of the grid.
        weight, bias: Those of the depthwise convolution.
        mask: False at padding, which the convolution reads as zero; None without padding.
        prefix: The number of prefix tokens.
        columns: Columns of the grid.
    """
    place = Place(prefix, columns, *weight.shape[2:])
    return local_mixing(tokens, weight.flatten(1).T.contiguous(), bias, mask, list(place))


def by_convolution(
    tokens: Tensor, taps: Float[Tensor, "taps d"], bias: Tensor, mask: Tensor | None, place: Place
) -> Tensor:
    """The same by torch's convolution."""
    prefix, columns, height, width = place
    grid = tokens[:, prefix:]
    if mask is not None:
        grid = grid.masked_fill(~mask[:, prefix:, None], 0)
    weight = taps.T.unflatten(1, (1, height, width)).to(tokens.dtype)
    image = grid.mT.unflatten(2, (-1, columns))
    padding = height // 2, width // 2
    change = F.conv2d(image, weight, bias.to(tokens.dtype), padding=padding, groups=len(weight)).flatten(2).mT
    return torch.cat([tokens[:, :prefix], tokens[:, prefix:] + change], dim=1)


@torch.library.custom_op("longseq::local_mixing", mutates_args=())
def local_mixing(tokens: Tensor, taps: Tensor, bias: Tensor, mask: Tensor | None, place: list[int]) -> Tensor:
    """mixed_locally, with the weights as (taps, d) and a Place."""
    return _run_mix(tokens, taps, bias, mask, Place(*place), is_backward=False)


@torch.library.custom_op("longseq::local_mixing_inputs", mutates_args=())
def local_mixing_inputs(grad: Tensor, taps: Tensor, mask: Tensor | None, place: list[int]) -> Tensor:
    """The gradient of the tokens."""
    return _run_mix(grad, taps, taps, mask, Place(*place), is_backward=True)


@torch.library.custom_op("longseq::local_mixing_weights", mutates_args=())
def local_mixing_weights(grad: Tensor, tokens: Tensor, mask: Tensor | None, place: list[int]) -> Tensor:
    """Partial sums of the gradients of the taps, and behind them of the bias, (parts, taps + 1, d), in float32."""
    at = Place(*place)
    (b, n, d), num_taps = tokens.shape, at.height * at.width
    grad, tokens = with_adjacent_channels(grad), with_adjacent_channels(tokens)
    block, of_sample, per_program, programs = _share(tokens, at)
    rounded = 1 << (num_taps - 1).bit_length()
    parts = tokens.new_empty(programs, num_taps + 1, d, dtype=torch.float32)
    pointer, step = bytes_of_mask(mask, tokens)
    channels = _channels(d, _SUMMED)
    with torch.cuda.device_of(tokens):
        _kernels().sum_gradients[(programs * -(-d // channels),)](
            grad, tokens, pointer, parts, n, b * of_sample, of_sample, at.prefix, at.columns, d, per_program,
            *grad.stride()[:2], *tokens.stride()[:2], step,
            HEIGHT=at.height, WIDTH=at.width, IS_MASKED=mask is not None, TAPS=rounded, BLOCK=block, CHANNELS=channels,
            num_warps=2,
        )  # fmt: skip
    return parts


def _run_mix(x: Tensor, taps: Tensor, bias: Tensor, mask: Tensor | None, place: Place, is_backward: bool) -> Tensor:
    x = with_adjacent_channels(x)
    b, n, d = x.shape
    out = x.new_empty(b, n, d)
    tiles, channels = -(-n // _BLOCK), _channels(d, _CHANNELS)
    pointer, step = bytes_of_mask(mask, x)
    with torch.cuda.device_of(x):
        _kernels().mix[(b * tiles * -(-d // channels),)](
            x, taps.contiguous(), bias, pointer, out,
            n, tiles, place.prefix, place.columns, d, *x.stride()[:2], step, *out.stride()[:2],
            HEIGHT=place.height, WIDTH=place.width, IS_MASKED=mask is not None, IS_BACKWARD=is_backward,
            BLOCK=_BLOCK, CHANNELS=channels, num_warps=4,
        )  # fmt: skip
    return out


@local_mixing.register_fake
def _(tokens: Tensor, taps: Tensor, bias: Tensor, mask: Tensor | None, place: list[int]) -> Tensor:
    return tokens.new_empty(tokens.shape)


@local_mixing_inputs.register_fake
def _(grad: Tensor, taps: Tensor, mask: Tensor | None, place: list[int]) -> Tensor:
    return grad.new_empty(grad.shape)


@local_mixing_weights.register_fake
def _(grad: Tensor, tokens: Tensor, mask: Tensor | None, place: list[int]) -> Tensor:
    at = Place(*place)
    return tokens.new_empty(_share(tokens, at)[-1], at.height * at.width + 1, tokens.shape[2], dtype=torch.float32)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.place = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tokens, taps, bias, mask = ctx.saved_tensors
    if torch.is_grad_enabled():  # for second derivatives, which only autograd can compute
        formula = partial(by_convolution, mask=mask, place=Place(*ctx.place))
        return *gradients_by_autograd(formula, (tokens, taps, bias), grad, ctx.needs_input_grad[:3]), None, None
    of_tokens = local_mixing_inputs(grad, taps, mask, ctx.place)
    of_taps, of_bias = local_mixing_weights(grad, tokens, mask, ctx.place).sum(0).split([len(taps), 1])
    return of_tokens, of_taps.to(taps.dtype), of_bias[0].to(bias.dtype), None, None


local_mixing.register_autograd(_gradients, setup_context=_keep_inputs)


@register_flop_formula(torch.ops.longseq.local_mixing)
def _flops(tokens: torch.Size, taps: torch.Size, bias: Any, mask: Any, place: Any, *_: Any, **__: Any) -> int:
    b, n, _d = tokens
    return 2 * b * (n - place[0]) * math.prod(taps)


@register_flop_formula(torch.ops.longseq.local_mixing_inputs)
def _flops_of_inputs(grad: torch.Size, taps: torch.Size, mask: Any, place: Any, *_: Any, **__: Any) -> int:
    return _flops(grad, taps, None, mask, place)


@register_flop_formula(torch.ops.longseq.local_mixing_weights)
def _flops_of_weights(grad: torch.Size, tokens: torch.Size, mask: Any, place: Any, *_: Any, **__: Any) -> int:
    return _flops(grad, torch.Size([place[2] * place[3], tokens[2]]), None, mask, place)


def _kernels() -> Any:
    from longseq.encoders import _local_kernels  # here, because torch for CPUs comes without Triton

    return _local_kernels


def _channels(d: int, most: int) -> int:
    """Channels of a tile, a power of two; the last tile may be partly empty."""
    return min(most, 1 << (d - 1).bit_length())


def _share(tokens: Tensor, place: Place) -> tuple[int, int, int, int]:
    """How the sum over the grid's tokens is divided: tokens of a tile, tiles of a sample and of a program, and the
    number of programs for some channels."""
    b, n, d = tokens.shape
    channels = _channels(d, _SUMMED)
    block = max(1, _NUMBERS // channels >> (place.height * place.width - 1).bit_length())
    of_sample = -(-(n - place.prefix) // block)
    tiles = b * of_sample
    wanted = max(1, _PROGRAMS // -(-d // channels))
    per_program = -(-tiles // wanted)
    return block, of_sample, per_program, -(-tiles // per_program)
