"""Softmax over many tokens on a GPU. torch's kernel gives 64 columns to one processor of the GPU: in a layer of 64
channels a single processor works, however many tokens there are, and all others wait.

With Triton, scores are read twice and weights are written once, 6 bytes a number in bfloat16. torch's reductions and
elementwise operations, which are used without Triton and in float64, read and write 44 bytes.
"""

from typing import Any

import torch
from torch import Tensor

from longseq.compat.torch import HAS_TRITON, at_least_float32, is_transformed, processors, with_adjacent_channels

_FEWEST = 2048  # tokens; with fewer, starting the reductions takes longer than the GPU gains
_COLUMNS, _TILE = 64, 128  # of a program, and the tokens that it reads at once. Not yet measured on a GPU.
_PROGRAMS, _MOST_CHUNKS = 4, 128  # wanted programs a processor, and the most parts of the tokens


def suits_columns(scores: Tensor, dim: int) -> bool:
    """Whether ColumnSoftmax is faster than torch's softmax over this dimension. A compiler writes such reductions
    itself."""
    is_long = dim not in (-1, scores.ndim - 1) and scores.shape[dim] >= _FEWEST
    return is_long and scores.is_cuda and not torch.compiler.is_compiling() and not is_transformed()


class ColumnSoftmax(torch.autograd.Function):
    """Softmax over a dimension, by reductions that use all processors of a GPU; in float32 at least, as in torch."""

    @staticmethod
    def forward(scores: Tensor, dim: int) -> Tensor:
        is_known = scores.ndim in (3, 4) and dim % scores.ndim == scores.ndim - 2 and scores.dtype != torch.float64
        if is_known and scores.is_cuda and HAS_TRITON:
            return column_softmax(scores)
        numbers = at_least_float32(scores)
        weights = (numbers - numbers.amax(dim, keepdim=True)).exp_()
        return weights.div_(weights.sum(dim, keepdim=True)).to(scores.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.dim = inputs[1]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        numbers = at_least_float32(weights)
        product = numbers * grads[0]
        return (product - numbers * product.sum(ctx.dim, keepdim=True)).to(weights.dtype), None


@torch.library.custom_op("longseq::column_softmax", mutates_args=())
def column_softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension but one of (b, n, c) or (b, h, n, c), in the memory layout of its input."""
    from longseq.attention import _column_kernels  # here, because torch for CPUs comes without Triton

    kernels: Any = _column_kernels
    weights = _empty(scores)
    scores = with_adjacent_channels(scores)
    of_heads, to_heads = (part if part.ndim == 4 else part[:, None] for part in (scores, weights))
    b, h, n, c = of_heads.shape
    blocks, tiles = -(-c // _COLUMNS), -(-n // _TILE)
    wanted = -(-_PROGRAMS * processors(scores.device) // (b * h * blocks))
    rows = _TILE * -(-tiles // min(wanted, _MOST_CHUNKS, tiles))
    chunks = -(-n // rows)
    highest, sums = scores.new_empty(2, b, h, chunks, c, dtype=torch.float32)
    grid, sizes, strides = (b * h * blocks * chunks,), (n, rows, chunks, h, blocks), of_heads.stride()[:3]
    constants = {"C": c, "COLUMNS": _COLUMNS, "TILE": _TILE, "num_warps": 4}
    with torch.cuda.device_of(scores):
        kernels.column_sums[grid](of_heads, highest, sums, *sizes, *strides, **constants)
        constants["CHUNKS"] = 1 << (chunks - 1).bit_length()
        strides = *strides, *to_heads.stride()[:3]
        kernels.column_weights[grid](of_heads, highest, sums, to_heads, *sizes, *strides, **constants)
    return weights


@column_softmax.register_fake
def _empty(scores: Tensor) -> Tensor:
    """The kernels need channels side by side."""
    has_layout = scores.stride(-1) == 1
    return torch.empty_like(scores, memory_format=torch.preserve_format if has_layout else torch.contiguous_format)
