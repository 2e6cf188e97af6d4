"""Transformer-LS (arXiv:2107.02192): one softmax over the tokens nearby and over summaries of all tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longseq.arguments import require, require_positive
from longseq.attention.dynamic import DynamicProjection, GivenMatrix
from longseq.attention.grid import TokenGrid
from longseq.attention.layer import AttentionLayer, Stack
from longseq.attention.mechanism import Mechanism
from longseq.attention.others.pattern import Blocks, PatternFormula
from longseq.attention.projection import Shortening


@dataclass(frozen=True)
class TransformerLS(Mechanism):
    """Y_t = softmax(q_t [N_L(K_t); N_G(E K)]' / sqrt(c)) [N_L(V_t); N_G(E V)], E = softmax_n(X W)' (section 3).

    K_t and V_t belong to a window around the token t: its block of w tokens, and w / 2 more on each side. E is that of
    ``Dynamic``, with one W per head. N_L and N_G are layer norms over the width (section 3.4). Prefix tokens are
    global: they attend to all tokens, and all tokens attend to them.

    A layer costs 8 n d^2 FLOPs for queries, keys, values and output, 2 n k h d for X W, 4 n k d for E K and E V, 4 n k
    d for the scores and weights of summaries, and 8 n w d (on a grid 16 n w^2 d) for those of windows.

    Args:
        k: Number of summaries, r in the paper.
        window: w, the tokens of a block.
        grid: Whether a block is w x w tokens of the token grid, as in the paper's image models. Otherwise it is w
            tokens of the sequence, as in its Long Range Arena, and the sequence may have any length.
        norm: Whether keys and values are normalised.
    """

    k: int = 32
    window: int = 8
    grid: bool = False
    norm: bool = True

    @property
    def any_length(self) -> bool:
        return not self.grid  # the columns of a grid are those that it was built for

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls(7, window=4), cls(7, window=3, grid=True, norm=False)]

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        n = grid.num_tokens
        require(1 <= self.k <= n, "k", f"must be in 1..{n} (the sequence length), got {self.k}; lower it")
        require_positive("8 is usual", window=self.window)
        blocks = Blocks.of_windows(grid.size[1] if self.grid else 1, self.window, beside=max(self.window // 2, 1))
        formula = PatternFormula(grid.num_prefix_tokens, blocks, num_summaries=self.k)
        projections = [
            _LongShortProjection(trained.num_heads, self.k, trained.qkv.in_features, self.norm) for trained in stack
        ]
        return [
            AttentionLayer(trained, formula, projection, projection, independent_queries=True)
            for trained, projection in zip(stack, projections, strict=True)
        ]


class _LongShortProjection(DynamicProjection):
    """n tokens followed by k summaries, each normalised: (b, n, d) -> (b, n + k, d).

    Args:
        heads, k, dim: h, k and d.
        norm: As TransformerLS takes it.
    """

    can_be_sharded = False

    def __init__(self, heads: int, k: int, dim: int, norm: bool) -> None:
        super().__init__(4 * torch.randn(heads, k, dim) * dim**-0.5, norm=False, length_scaling=0.0)
        self.norm_of_window = nn.LayerNorm(dim) if norm else nn.Identity()
        self.norm_of_summaries = nn.LayerNorm(dim) if norm else nn.Identity()

    def given(self, x: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None) -> Shortening:
        summaries = super().given(x, present)
        assert isinstance(summaries, GivenMatrix)
        return _WithSummaries(summaries, self.norm_of_window, self.norm_of_summaries)


class _WithSummaries:
    """Tokens and their summaries, once E is known.

    Args:
        summaries: E.
        norm_of_window, norm_of_summaries: Applied to the tokens and to their summaries.
    """

    commutes = False

    def __init__(self, summaries: GivenMatrix, norm_of_window: nn.Module, norm_of_summaries: nn.Module) -> None:
        self.summaries = summaries
        self.norm_of_window, self.norm_of_summaries = norm_of_window, norm_of_summaries

    @property
    def unnormed(self) -> "_WithSummaries":
        return _WithSummaries(self.summaries, nn.Identity(), nn.Identity())

    def __call__(
        self, tokens: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None = None
    ) -> Float[Tensor, "b m d"]:
        near, far = self.norm_of_window(tokens), self.norm_of_summaries(self.summaries(tokens, present))
        return torch.cat([near.to(tokens.dtype), far.to(tokens.dtype)], dim=1)

    def filled(self, present: Bool[Tensor, "b n 1"]) -> Bool[Tensor, "b m 1"]:
        return F.pad(present, (0, 0, 0, self.summaries.matrix.shape[-2]), value=True)
