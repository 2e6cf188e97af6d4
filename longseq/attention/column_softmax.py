"""Softmax over many tokens on a GPU. Tokens lie one after the other, so torch's kernel gives 64 columns to one of the
GPU's processors, and the others wait: a layer of 64 channels has one at work, however many tokens there are."""

from typing import Any

import torch
from torch import Tensor

from longseq.compat.torch import at_least_float32, is_transformed

_FEWEST = 2048  # tokens; with fewer the host takes longer to start the reductions than the GPU gains


def suits_columns(scores: Tensor, dim: int) -> bool:
    """Whether ColumnSoftmax is faster than torch's softmax over this dimension. A compiler makes reductions itself."""
    is_long = dim not in (-1, scores.ndim - 1) and scores.shape[dim] >= _FEWEST
    return is_long and scores.is_cuda and not torch.compiler.is_compiling() and not is_transformed()


class ColumnSoftmax(torch.autograd.Function):
    """softmax over a dimension, by reductions that all of a GPU's processors share; in float32 at least, as torch's."""

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
