"""Projections shorten a sequence from n to k tokens before it becomes keys and values (Linformer, section 4)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn


class ProjectionLayer(nn.Module, ABC):
    """Shortens tokens: (b, n, d) -> (b, k, d).

    Attributes:
        commutes: Whether shortening commutes with a linear map of the features, E (X W) = (E X) W. Only then may keys
            and values be made from k shortened tokens; otherwise they are made from n tokens and shortened after.
    """

    commutes: bool

    @abstractmethod
    def forward(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b k d"]:
        """Shorten; a sequence shorter than the configured n meets the projection's first columns."""


class Projection(ABC):
    """A description of a projection, chosen in YAML; it builds the layers once n, k and the heads are known."""

    @abstractmethod
    def build(self, n: int, k: int, heads: int | None = None) -> ProjectionLayer:
        """Build one projection of n to k tokens: one for all heads, or with ``heads`` one for each of them."""


class LinearProjection(ProjectionLayer):
    """Shorten a sequence with a learned matrix: E or F of Linformer (arXiv:2006.04768), equation 7.

    Args:
        n: Tokens in; the matrix fixes the longest sequence.
        k: Tokens out, 1 <= k <= n.
        heads: None for one matrix (k, n), or the number of heads for a matrix each, (h, k, n). A matrix a head treats
            channels differently, so it does not commute with the key and value projections.
    """

    def __init__(self, n: int, k: int, heads: int | None = None) -> None:
        super().__init__()
        self.commutes = heads is None
        self.weight = nn.Parameter(torch.empty((k, n) if heads is None else (heads, k, n)))
        nn.init.normal_(self.weight, std=n**-0.5)  # fan-in keeps the keys' variance; 1/k would raise it by n/k

    def forward(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b k d"]:
        weight = self.weight[..., : tokens.shape[1]]
        if self.commutes:
            return weight @ tokens
        by_head = tokens.unflatten(-1, (len(weight), -1)).transpose(1, 2)
        return (weight @ by_head).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Linear(Projection):
    """Learned matrices E and F, as in the paper's main experiments (Linformer, equation 7)."""

    def build(self, n: int, k: int, heads: int | None = None) -> LinearProjection:
        return LinearProjection(n, k, heads)
