"""Reversible blocks (Reformer, arXiv:2001.04451, section 3): activations are computed from outputs, and not kept."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from longseq.arguments import ArgumentError
from longseq.compat.torch import is_hooked, is_transformed
from longseq.encoders._block import attention_change, is_ours, mlp_change

_Half = Callable[..., tuple[Tensor, Tensor]]  # attention_change or mlp_change


def run_reversible(
    blocks: Sequence[Any],
    tokens: Float[Tensor, "b n d"],
    mask: Bool[Tensor, "b 1 1 n"] | None,
    columns: int | None,
) -> Float[Tensor, "b n d"]:
    """Run blocks as y1 = x1 + F(x2), y2 = x2 + G(y1), from x1 = x2 = tokens to the mean of the last y1 and y2.

    F and G are what the halves of a block add to their tokens: F(x) = Attention(Norm(x)), G(x) = MLP(Norm(x)); with
    local mixing F(x) = W * x + Attention(Norm(x + W * x)), and similarly G. The backward pass recomputes
    x2 = y2 - G(y1) and x1 = y1 - F(x2), so only the last y1 and y2 are stored, for any number of blocks.

    Gradients are those of autograd for the same forward pass, up to the rounding of these differences; dropout draws
    the same numbers again. The hashes of ``Reformer`` may differ if rounding moves a token to another bucket.

    Args:
        blocks: timm's blocks, or LocalBlocks, without hooks.
        tokens, mask, columns: As run_block takes them.

    Raises:
        ValueError: If a block is another one, or second derivatives are wanted.
    """
    for block in blocks:
        if not is_ours(block) or is_hooked(block):
            what = f"must have timm's blocks without hooks where they are reversible, got {type(block).__name__}"
            raise ArgumentError("trunk", f"{what}; hook into their parts")
    known: list[Tensor] = []
    first = second = tokens
    for number, block in enumerate(blocks, start=1):
        weights = _weights(block)
        if torch.compiler.is_compiling() or is_transformed() or not torch.is_grad_enabled():
            first = first + _added(attention_change, block, second, mask, columns)
            second = second + _added(mlp_change, block, first, mask, columns)
        else:
            is_last = number == len(blocks)
            first, second = _Reversible.apply(block, mask, columns, known, is_last, first, second, *weights)
    return (first + second) / 2


def _weights(block: nn.Module) -> list[Tensor]:
    return [weight for weight in block.parameters() if weight.requires_grad]


def _added(half: _Half, block: Any, tokens: Tensor, mask: Tensor | None, columns: int | None) -> Tensor:
    """What a half of a block adds to its tokens, including its local mixing."""
    local, change = half(block, tokens, mask, columns)
    return change if local is tokens else change + (local - tokens)


class _Reversible(torch.autograd.Function):
    """A block: (x1, x2) -> (y1, y2). It stores neither, except for the outputs of the last block.

    In the backward pass ``known`` holds the outputs of a block, which are then replaced by its recomputed inputs: the
    outputs of the previous block. Weights are arguments, so their gradients reach torch.autograd.grad and the hooks of
    DistributedDataParallel in the usual way.
    """

    @staticmethod
    def forward(
        ctx: Any,
        block: Any,
        mask: Tensor | None,
        columns: int | None,
        known: list[Tensor],
        is_last: bool,
        first: Tensor,
        second: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        kind = "cpu" if first.is_meta else first.device.type  # the meta device has no autocast
        precision = {"dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}
        # without the cache, because a cached copy of a weight would have no gradient
        ctx.autocast = partial(torch.autocast, kind, **precision, cache_enabled=False)
        ctx.block, ctx.given, ctx.known, ctx.is_last, ctx.weights = block, (mask, columns), known, is_last, weights
        ctx.draws = [_generators(first)]
        first = first + _added(attention_change, block, second, mask, columns)
        ctx.draws.append(_generators(first))
        second = second + _added(mlp_change, block, first, mask, columns)
        ctx.save_for_backward(*weights, *((first, second) if is_last else ()))
        return first, second

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise ArgumentError("reversible", "must be false for second derivatives; leave it out")
        weights = _weights(ctx.block)
        if any(now is not before for now, before in zip(weights, ctx.weights, strict=True)):
            raise RuntimeError("the weights of reversible blocks must stay until the backward pass")
        saved = ctx.saved_tensors  # torch raises an error here if weights were changed in the meantime
        y1, y2 = saved[-2:] if ctx.is_last else ctx.known
        of_y1, of_y2 = grads
        added, of_tokens, of_mlp = _gradients(ctx, mlp_change, 1, y1, of_y2, weights)
        x2, of_x1 = y2 - added, of_y1 + of_tokens
        added, of_tokens, of_attention = _gradients(ctx, attention_change, 0, x2, of_x1, weights)
        ctx.known[:] = y1 - added, x2
        of_weights = [a if b is None else b if a is None else a + b for a, b in zip(of_mlp, of_attention, strict=True)]
        return None, None, None, None, None, of_x1, of_y2 + of_tokens, *of_weights


def _gradients(
    ctx: Any, half: _Half, number: int, tokens: Tensor, gradient: Tensor, weights: list[Tensor]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """What a half of a block adds, and the gradients of its tokens and of the weights."""
    tokens = tokens.detach().requires_grad_()
    with _drawing_again(*ctx.draws[number]), ctx.autocast(), torch.enable_grad():
        added = _added(half, ctx.block, tokens, *ctx.given)
    gradients = torch.autograd.grad(added, [tokens, *weights], gradient.to(added.dtype), allow_unused=True)
    return added.detach(), gradients[0], list(gradients[1:])


def _generators(tokens: Tensor) -> tuple[Tensor, list[int], list[Tensor]]:
    """The states of the random number generators of the CPU and of the tokens' device."""
    return torch.get_rng_state(), *get_device_states(tokens)


@contextmanager
def _drawing_again(state: Tensor, devices: list[int], states: list[Tensor]) -> Iterator[None]:
    """Draw the same numbers as after these states of the generators, and restore the generators afterwards."""
    with torch.random.fork_rng(devices):
        torch.set_rng_state(state)
        set_device_states(devices, states)
        yield
