"""No attention: every token sees itself alone. The control that tells what attention adds to all other parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longseq.attention.grid import TokenGrid
from longseq.attention.layer import AttentionLayer, Stack
from longseq.attention.mechanism import Mechanism
from longseq.attention.mixer import TokenMixer, copy_weights


class PointwiseLayer(TokenMixer):
    """X -> (X W_v) W_o, where W_v and W_o are attention's matrices of values and outputs.

    Args:
        trained: The attention layer whose matrices this one takes over.
    """

    def __init__(self, trained: Any) -> None:
        super().__init__()
        d = trained.attn_dim
        self.value = nn.Linear(trained.qkv.in_features, d, bias=trained.qkv.bias is not None)
        _copy_values(trained.qkv, self.value)
        self.attn_drop, self.proj, self.proj_drop = trained.attn_drop, trained.proj, trained.proj_drop

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        num_queries: int | None = None,
    ) -> Float[Tensor, "b q d"]:
        return self.proj_drop(self.proj(self.attn_drop(self.value(x[:, :num_queries]))))

    @torch.no_grad()
    def carry(self, trained: nn.Module, old: TokenGrid, new: TokenGrid) -> list[str]:
        """Copy the weights; those of the values may be a part of attention's ``qkv``."""
        if not isinstance(trained, AttentionLayer):
            return copy_weights(self, trained, set())
        _copy_values(trained.qkv, self.value)
        return copy_weights(self, trained, {"value"})


@torch.no_grad()
def _copy_values(qkv: nn.Module, value: nn.Linear) -> None:
    """Copy the last third of the rows of a matrix of queries, keys and values."""
    for name, weight in value.named_parameters():
        weight.copy_(getattr(qkv, name)[-len(weight) :])


@dataclass(frozen=True)
class Pointwise(Mechanism):
    """No attention: a linear layer at every token, at the cost of 4 n d^2 FLOPs.

    Only local mixing and the mean over the tokens bring tokens together then. Train it beside a mechanism to see what
    attention adds.
    """

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls()]

    def layers(self, stack: Stack, grid: TokenGrid) -> list[PointwiseLayer]:
        return [PointwiseLayer(trained) for trained in stack]
