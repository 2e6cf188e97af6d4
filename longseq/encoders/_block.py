"""timm's transformer block, computed for fewer tokens and with less memory."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from timm.layers.mlp import Mlp
from timm.layers.norm import LayerNorm
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from longseq.attention.mixer import TokenMixer
from longseq.compat.torch import (
    gelu_backward,
    gradients_by_autograd,
    is_hooked,
    is_plain,
    is_transformed,
    layer_norm_backward,
)
from longseq.encoders.local import LocalBlock

_TILE = 1 << 20  # numbers of the hidden layer in a tile: 4 MiB in float32, which fit into a cache


def run_block(
    block: Any,
    tokens: Float[Tensor, "b n d"],
    mask: Bool[Tensor, "b 1 1 n"] | None,
    num_queries: int | None,
    columns: int | None = None,
    **given: Any,
) -> Float[Tensor, "b q d"]:
    """Run a block for the first q tokens.

    A block of another class, with an attention that is no TokenMixer, or with hooks in its parts is simply called, for
    all tokens.

    Args:
        block: timm's block, or another one.
        tokens: The tokens.
        mask: False at padding; None without padding.
        num_queries: q; None for all tokens.
        columns: Columns of the grid of tokens; None for those that the block was built for.
        given: Further arguments for a block that is simply called.
    """
    if not is_ours(block) or any(map(is_hooked, (block, block.norm2, *block.attn.modules(), *block.mlp.modules()))):
        return block(tokens, attn_mask=mask, **given, **({"columns": columns} if isinstance(block, LocalBlock) else {}))
    tokens, change = attention_change(block, tokens, mask, columns, num_queries)
    tokens = _added(tokens, change)
    return _added(*mlp_change(block, tokens, mask if num_queries is None else None, columns))


def _added(tokens: Tensor, change: Tensor) -> Tensor:
    """Their sum in the tokens' precision, which learned scales (LayerScale) of another one would change."""
    return (tokens + change).to(tokens.dtype)


def is_ours(block: Any) -> bool:
    """Whether ``attention_change`` and ``mlp_change`` are what the block computes, if it has no hooks."""
    return type(block) in (Block, LocalBlock) and isinstance(block.attn, TokenMixer)


def attention_change(
    block: Any,
    tokens: Float[Tensor, "b n d"],
    mask: Bool[Tensor, "b 1 1 n"] | None,
    columns: int | None,
    num_queries: int | None = None,
) -> tuple[Float[Tensor, "b q d"], Float[Tensor, "b q d"]]:
    """The tokens after a block's first local mixing, and what the attention adds to them."""
    if type(block) is LocalBlock:
        tokens = block.local1(tokens, mask, columns)
    change = block.attn(block.norm1(tokens), attn_mask=mask, num_queries=num_queries)
    queried = tokens if num_queries is None else tokens[:, :num_queries]
    return queried, block.drop_path1(block.ls1(change))


def mlp_change(
    block: Any, tokens: Float[Tensor, "b n d"], mask: Bool[Tensor, "b 1 1 n"] | None, columns: int | None
) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b n d"]]:
    """The tokens after a block's second local mixing, and what the MLP adds to them."""
    if type(block) is LocalBlock and block.local2 is not None:
        tokens = block.local2(tokens, mask, columns)
    if tokens.device.type == "cpu" and not torch.compiler.is_compiling() and _suits_tiles(block.norm2, block.mlp):
        change = _mlp_in_tiles(block.norm2, block.mlp, tokens)  # type: ignore[arg-type]
    else:
        change = block.mlp(block.norm2(tokens))
    return tokens, block.drop_path2(block.ls2(change))


def _suits_tiles(norm: nn.Module, mlp: nn.Module) -> bool:
    """Whether _TiledMLP computes the same as these layers: two linear maps, a GELU between them, and no dropout."""
    if type(mlp) is not Mlp or is_transformed():
        return False
    plain = is_plain(norm, nn.LayerNorm, LayerNorm) and is_plain(mlp.norm, nn.Identity)
    if not plain or not all(is_plain(linear, nn.Linear) and linear.bias is not None for linear in (mlp.fc1, mlp.fc2)):
        return False
    drops = any(not is_plain(drop, nn.Identity) and not _drops_nothing(drop) for drop in (mlp.drop1, mlp.drop2))
    return is_plain(mlp.act, nn.GELU) and mlp.act.approximate == "none" and norm.bias is not None and not drops


def _drops_nothing(drop: Any) -> bool:
    return is_plain(drop, nn.Dropout) and not (drop.training and drop.p > 0)


def _mlp_in_tiles(norm: nn.LayerNorm, mlp: Mlp, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else tokens.dtype
    weights: Any = [mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias]
    weights = [weight.to(dtype) for weight in weights]
    with torch.autocast("cpu", enabled=False):
        norm_inputs = tokens.flatten(0, -2), norm.weight, norm.bias, norm.eps
        return _TiledMLP.apply(*norm_inputs, *weights, torch.is_grad_enabled()).view(tokens.shape)


class _TiledMLP(torch.autograd.Function):
    """GELU(LayerNorm(x) W1' + b1) W2' + b2, in tiles of tokens; it stores x and the hidden layer before the GELU.

    Autograd would also store the normalised tokens and the hidden layer after the GELU, d + 4 d numbers per token.
    Recomputing these is as fast as reading them from memory. Each tile of the hidden layer is a tensor of its own,
    because glibc finds room for tiles where it has none for the whole. Without gradients no tile is stored. In low
    precision the gradients of the weights are summed over the tiles in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        gamma, beta, eps, W1, b1, W2, b2, keeps_hidden = rest
        tiles = _tiles(len(x), len(W1))
        hidden: list[Tensor] = []
        out = W2.new_empty(len(x), len(W2))
        for rows in tiles:
            normed = F.layer_norm(x[rows], gamma.shape, gamma, beta, eps).to(W1.dtype)
            tile = torch.addmm(b1, normed, W1.T)
            torch.addmm(b2, F.gelu(tile), W2.T, out=out[rows])
            if keeps_hidden:
                hidden.append(tile)
        ctx.save_for_backward(x, gamma, beta, W1, b1, W2, b2, *hidden)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)  # read once: under checkpointing a second reading is an error
        tensors, hidden = saved[:7], saved[7:]
        if torch.is_grad_enabled():  # for second derivatives, which only autograd can compute
            needed = *ctx.needs_input_grad[:3], *ctx.needs_input_grad[4:8]  # eps, at index 3, has no gradient
            gradients = gradients_by_autograd(partial(_by_layers, eps=ctx.eps), tensors, grads[0], needed)
        else:
            gradients = _gradients(tensors, hidden, ctx.eps, grads[0])
        of_x, of_gamma, of_beta, *of_weights = gradients
        return of_x, of_gamma, of_beta, None, *of_weights, None


def _by_layers(
    x: Tensor, gamma: Tensor, beta: Tensor, W1: Tensor, b1: Tensor, W2: Tensor, b2: Tensor, eps: float
) -> Tensor:
    normed = F.layer_norm(x, gamma.shape, gamma, beta, eps).to(W1.dtype)
    return F.linear(F.gelu(F.linear(normed, W1, b1)), W2, b2)


def _gradients(tensors: list[Tensor], hidden: list[Tensor], eps: float, grad: Tensor) -> list[Tensor]:
    x, gamma, beta, W1, b1, W2, b2 = tensors
    grad = grad.contiguous()
    grad_x = torch.empty_like(x)
    exact = torch.promote_types(W1.dtype, torch.float32)
    grad_W1, grad_W2 = torch.zeros_like(W1, dtype=exact), torch.zeros_like(W2, dtype=exact)
    grad_b1 = torch.zeros_like(b1, dtype=exact)
    grad_gamma, grad_beta = torch.zeros_like(gamma, dtype=exact), torch.zeros_like(beta, dtype=exact)
    for rows, tile in zip(_tiles(len(x), len(W1)), hidden, strict=True):
        normed, mean, rstd = torch.native_layer_norm(x[rows], gamma.shape, gamma, beta, eps)
        low = normed.to(W1.dtype)
        active = F.gelu(tile)
        _add_product(grad_W2, grad[rows].T, active)
        grad_hidden = gelu_backward(torch.mm(grad[rows], W2, out=active), tile)
        _add_product(grad_W1, grad_hidden.T, low)
        grad_b1 += grad_hidden.sum(0)
        grad_x[rows], of_gamma, of_beta = layer_norm_backward(
            (grad_hidden @ W1).to(x.dtype), x[rows], mean, rstd, gamma, beta
        )
        grad_gamma += of_gamma
        grad_beta += of_beta
    of_norm = grad_gamma.to(gamma.dtype), grad_beta.to(beta.dtype)
    return [grad_x, *of_norm, grad_W1.to(W1.dtype), grad_b1.to(W1.dtype), grad_W2.to(W2.dtype), grad.sum(0).to(b2)]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _tiles(num_tokens: int, hidden: int) -> list[slice]:
    count = max(round(num_tokens * hidden / _TILE), 1)
    size = max(-(-num_tokens // count), 1)
    return [slice(begin, begin + size) for begin in range(0, max(num_tokens, 1), size)]
