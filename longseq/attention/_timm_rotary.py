"""timm's attention with rotary positions (EVA, DINOv3), converted to the plain attention that mechanisms replace."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from timm.layers.attention import Attention, AttentionRope
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.eva import EvaAttention
from torch import Tensor


@dataclass(frozen=True)
class Turn:
    """Rotates each pair of channels of queries or keys by the angles that a trunk gives for its grid of tokens.

    Args:
        num_prefix_tokens: Number of first tokens, which are not rotated.
        half: Whether a pair is channels i and i + c / 2; otherwise it is channels 2 i and 2 i + 1.
    """

    num_prefix_tokens: int
    half: bool

    def __call__(self, tokens: Float[Tensor, "b h n c"], rope: Float[Tensor, "..."]) -> Float[Tensor, "b h n c"]:
        prefix = tokens[:, :, : self.num_prefix_tokens]
        turned = apply_rot_embed_cat(tokens[:, :, self.num_prefix_tokens :], rope, half=self.half)
        return torch.cat([prefix, turned.to(tokens.dtype)], dim=2)


@torch.no_grad()
def as_plain(trained: EvaAttention | AttentionRope) -> Attention:
    """timm's Attention with the weights of a layer that has rotary positions, and with a ``turn``.

    Matrices of queries, keys and values become one. If keys have no bias, theirs becomes zero. Keys and values that
    several heads share are repeated for each head, so they can then learn to differ. Other parts are the same objects.
    """
    heads, channels = trained.num_heads, trained.head_dim
    if trained.qkv is None:
        linears: list[Any] = [trained.q_proj, trained.k_proj, trained.v_proj]
        matrices, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
    else:
        matrices, bias = trained.qkv.weight.chunk(3), trained.qkv.bias
        biases = [trained.q_bias, trained.k_bias, trained.v_bias] if bias is None else bias.chunk(3)
    matrix = torch.cat([_for_all_heads(rows, heads, channels) for rows in matrices])
    has_bias = any(bias is not None for bias in biases)
    plain = Attention(matrix.shape[1], heads, channels, qkv_bias=has_bias, device=matrix.device, dtype=matrix.dtype)
    plain.qkv.weight.copy_(matrix)
    if has_bias:
        pairs = zip(matrices, biases, strict=True)
        full = [rows.new_zeros(len(rows)) if bias is None else bias for rows, bias in pairs]
        plain.qkv.bias.copy_(torch.cat([_for_all_heads(bias, heads, channels) for bias in full]))
    for name in ("q_norm", "k_norm", "attn_drop", "norm", "gate", "proj", "proj_drop"):
        setattr(plain, name, getattr(trained, name))
    plain.turn = Turn(trained.num_prefix_tokens, trained.rotate_half)  # type: ignore[assignment]
    plain.qkv.requires_grad_(any(weight.requires_grad for weight in matrices))  # a frozen trunk stays frozen
    return plain.train(trained.training)


def _for_all_heads(rows: Tensor, heads: int, channels: int) -> Tensor:
    """The rows of a matrix or a bias, (heads * channels, ...); rows that a group of heads shares are repeated."""
    of_groups = rows.unflatten(0, (-1, channels))
    return of_groups.repeat_interleave(heads // len(of_groups), dim=0).flatten(0, 1)
