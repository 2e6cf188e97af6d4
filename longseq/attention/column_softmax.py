"""Softmax over many tokens on a GPU. torch's kernel gives 64 columns to one processor of the GPU: in a layer of 64
channels a single processor works, however many tokens there are, and all others wait."""

from typing import Any

import torch
from torch import Tensor

from longseq.compat.torch import at_least_float32, is_transformed

_FEWEST = 2048  # tokens; with fewer, starting the reductions takes longer than the GPU gains


def suits_columns(scores: Tensor, dim: int) -> bool:
    """Whether ColumnSoftmax is faster than torch's softmax over this dimension. A compiler writes such reductions
    itself."""
    is_long = dim not in (-1, scores.ndim - 1) and scores.shape[dim] >= _FEWEST
    return is_long and scores.is_cuda and not torch.compiler.is_compiling() and not is_transformed()


class ColumnSoftmax(torch.autograd.Function):
    """Softmax over a dimension, by reductions that use all processors of a GPU; in float32 at least, as in torch."""

    @staticmethod
    def forward(scores: Tensor, dim: int) -> Tensor:
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
