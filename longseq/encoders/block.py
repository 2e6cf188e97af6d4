"""A transformer block as timm has it, computed for fewer tokens and with less memory."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from timm.layers.mlp import Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_TILE = 1 << 20  # numbers of the hidden layer that are at work at once: 4 MiB in float32, which a cache holds


def run_block(
    block: Any, tokens: Float[Tensor, "b n d"], mask: Bool[Tensor, "b 1 1 n"] | None, num_queries: int | None
) -> Float[Tensor, "b q d"]:
    """What a block makes of the first q tokens, or of all where num_queries is None.

    A block of another class, or one into whose parts someone has hooked, is run as it is, for all tokens.
    """
    if type(block) is not Block or _is_hooked(block):
        return block(tokens, attn_mask=mask)
    mixed = block.attn(block.norm1(tokens), attn_mask=mask, num_queries=num_queries)
    tokens = tokens[:, :num_queries] + block.drop_path1(block.ls1(mixed))
    if _is_plain(block.norm2, block.mlp) and tokens.device.type == "cpu" and not torch.compiler.is_compiling():
        out = _perceive(block.norm2, block.mlp, tokens)  # type: ignore[arg-type]
    else:
        out = block.mlp(block.norm2(tokens))
    return tokens + block.drop_path2(block.ls2(out))


def _is_hooked(block: Block) -> bool:
    """Whether hooks hang on modules that the short cuts do not call."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        for module in (block, block.norm2, *block.mlp.modules())
    )


def _is_plain(norm: nn.Module, mlp: nn.Module) -> bool:
    """Whether it is what Perceptron computes: two linear maps with a GELU between, and no dropout."""
    if not (isinstance(norm, nn.LayerNorm) and type(mlp) is Mlp and isinstance(mlp.norm, nn.Identity)):
        return False
    if not type(mlp.fc1) is type(mlp.fc2) is nn.Linear:  # a wrapper's weight is not all that it does
        return False
    is_gelu = isinstance(mlp.act, nn.GELU) and mlp.act.approximate == "none"
    has_biases = mlp.fc1.bias is not None and mlp.fc2.bias is not None and norm.bias is not None
    return is_gelu and has_biases and not (mlp.training and max(mlp.drop1.p, mlp.drop2.p) > 0)


def _perceive(norm: nn.LayerNorm, mlp: Mlp, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else tokens.dtype
    weights: Any = [mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias]
    weights = [weight.to(dtype) for weight in weights]
    with torch.autocast("cpu", enabled=False):
        given = tokens.flatten(0, -2), norm.weight, norm.bias, norm.eps
        return Perceptron.apply(*given, *weights, torch.is_grad_enabled()).view(tokens.shape)


class Perceptron(torch.autograd.Function):
    """GELU(LayerNorm(x) W1' + b1) W2' + b2, tile of tokens by tile, keeping x and the hidden layer before the GELU.

    Autograd would keep the normalised tokens and the hidden layer after the GELU too, d + 4 d numbers a token, which
    are as soon computed again as read from memory. Where no gradient is wanted, nothing is kept but a tile. In low
    precision the weights' gradients are summed over the tiles in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        gamma, beta, eps, W1, b1, W2, b2, keeps_hidden = rest
        tiles = _tiles(len(x), len(W1))
        hidden = W1.new_empty(len(x) if keeps_hidden else tiles[0].stop, len(W1))
        out = W2.new_empty(len(x), len(W2))
        for rows in tiles:
            normed = F.layer_norm(x[rows], gamma.shape, gamma, beta, eps).to(W1.dtype)
            of_tile = hidden[rows] if keeps_hidden else hidden[: len(normed)]
            torch.addmm(b1, normed, W1.T, out=of_tile)
            torch.addmm(b2, F.gelu(of_tile), W2.T, out=out[rows])
        ctx.save_for_backward(x, hidden, gamma, beta, W1, W2)
        ctx.eps = eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, gamma, beta, W1, W2 = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = torch.empty_like(x)
        exact = torch.promote_types(W1.dtype, torch.float32)
        grad_W1, grad_W2 = torch.zeros_like(W1, dtype=exact), torch.zeros_like(W2, dtype=exact)
        grad_b1 = W1.new_zeros(len(W1), dtype=exact)
        grad_gamma, grad_beta = torch.zeros_like(gamma, dtype=exact), torch.zeros_like(beta, dtype=exact)
        for rows in _tiles(len(x), len(W1)):
            normed, mean, rstd = torch.native_layer_norm(x[rows], gamma.shape, gamma, beta, ctx.eps)
            low = normed.to(W1.dtype)
            active = F.gelu(hidden[rows])
            _add_product(grad_W2, grad[rows].T, active)
            grad_hidden = torch.ops.aten.gelu_backward(torch.mm(grad[rows], W2, out=active), hidden[rows])
            _add_product(grad_W1, grad_hidden.T, low)
            grad_b1 += grad_hidden.sum(0)
            grad_x[rows], of_gamma, of_beta = torch.ops.aten.native_layer_norm_backward(
                (grad_hidden @ W1).to(x.dtype), x[rows], gamma.shape, mean, rstd, gamma, beta, [True, True, True]
            )
            grad_gamma += of_gamma
            grad_beta += of_beta
        of_norm = grad_gamma.to(gamma.dtype), grad_beta.to(beta.dtype)
        of_weights = grad_W1.to(W1.dtype), grad_b1.to(W1.dtype), grad_W2.to(W2.dtype), grad.sum(0)
        return grad_x, *of_norm, None, *of_weights, None


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
