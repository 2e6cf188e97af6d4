"""What layers without queries, keys and values share: masks, dropout, and the backward direction.

They read the tokens in order: class and register tokens first, then the grid, row by row. So information reaches a
prefix token only through the backward direction.
"""

from abc import abstractmethod

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longseq.arguments import ArgumentError
from longseq.attention.mixer import TokenMixer, blank, length_with_gaps, present_tokens
from longseq.compat.torch import at_least_float32, without_autocast


class SequenceLayer(TokenMixer):
    """Mixes the tokens of a sequence in both directions.

    Args:
        dim: d, the width of a token.
        proj_drop: The dropout of the result, that of timm's attention.
    """

    def __init__(self, dim: int, proj_drop: nn.Module) -> None:
        super().__init__()
        self.dim, self.proj_drop = dim, proj_drop

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        num_queries: int | None = None,
        rope: Tensor | None = None,
    ) -> Float[Tensor, "b q d"]:
        """Mix, as a TokenMixer. ``rope`` is ignored: it rotates queries and keys, and the layer has none.

        Raises:
            ValueError: If is_causal is True, or the mask is not a padding mask.
        """
        if is_causal:
            raise ArgumentError("is_causal", "must be False: the layer reads a sequence in both directions")
        present = None if attn_mask is None else present_tokens(attn_mask, x.shape[1])
        return self.proj_drop(self.mix(blank(x, present), present, num_queries))

    @abstractmethod
    def mix(
        self, x: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None, num_queries: int | None
    ) -> Float[Tensor, "b q d"]:
        """The result for the first q tokens.

        Args:
            x: The tokens; padding is zero.
            present: False where a token is padding, which comes after all other tokens; None without padding.
            num_queries: q; None for all.
        """


class FilterLayer(SequenceLayer):
    """A filter along the tokens in the block of S4 (arXiv:2111.00396): Y = GLU(GELU(filter(X) + D X) W).

    The filter is computed in float32 even under autocast, because torch has no bfloat16 FFT.

    Args:
        dim, proj_drop: As SequenceLayer takes them.
    """

    def __init__(self, dim: int, proj_drop: nn.Module) -> None:
        super().__init__(dim, proj_drop)
        self.D = nn.Parameter(torch.randn(dim))
        self.output = nn.Linear(dim, 2 * dim)

    def mix(
        self, x: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None, num_queries: int | None
    ) -> Float[Tensor, "b q d"]:
        with without_autocast(x):
            filtered = self.filter(at_least_float32(x)) + at_least_float32(self.D) * x
        return F.glu(self.output(F.gelu(filtered[:, :num_queries].to(x.dtype))), dim=-1)

    @abstractmethod
    def filter(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """A linear map along the tokens in which zeros change nothing; x is float32 or float64."""


def backwards(tokens: Float[Tensor, "b n c"], present: Bool[Tensor, "b n 1"] | None) -> Float[Tensor, "b n c"]:
    """The tokens from the last to the first, with padding still at the end, and gaps between the others. Applied twice
    it changes nothing."""
    if present is None:
        return tokens.flip(1)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    count = length_with_gaps(present[..., 0])[:, None]
    places = torch.where(places < count, count - 1 - places, places)
    return tokens.gather(1, places[..., None].expand_as(tokens))
