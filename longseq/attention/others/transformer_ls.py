"""Transformer-LS (arXiv:2107.02192): one softmax over the tokens nearby and over summaries of all tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from longseq.arguments import ArgumentError
from longseq.attention.dynamic import DynamicProjection, GivenMatrix
from longseq.attention.grid import TokenGrid
from longseq.attention.layer import AttentionLayer, Stack, softmax_formula
from longseq.attention.mechanism import Mechanism
from longseq.attention.projection import Shortening


@dataclass(frozen=True)
class TransformerLS(Mechanism):
    """Y_t = softmax(q_t [N_L(K_t); N_G(E K)]' / sqrt(c)) [N_L(V_t); N_G(E V)], E = softmax_n(X W)' (section 3).

    K_t and V_t belong to a window round the token t: its block of w tokens, and w / 2 more on each side. E is that of
    ``Dynamic``, with a W for each head. N_L and N_G are layer norms over the width (section 3.4). Prefix tokens are
    global: they attend to all tokens, and all tokens attend to them.

    A layer costs 8 n d^2 FLOPs for queries, keys, values and output, 2 n k h d for X W, 4 n k d for E K and E V, 4 n k
    d for the scores and weights of summaries, and 8 n w d (on a grid 16 n w^2 d) for those of windows.

    Args:
        k: Summaries, r in the paper.
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
        if not 1 <= self.k <= grid.num_tokens:
            raise ArgumentError("k", f"must be in 1..{grid.num_tokens} (the sequence length), got {self.k}; lower it")
        if self.window < 1:
            raise ArgumentError("window", f"must be positive, got {self.window}; 8 is usual")
        formula = LongShortFormula(grid, self.k, self.window, self.grid)
        projections = [
            LongShortProjection(trained.num_heads, self.k, trained.qkv.in_features, self.norm) for trained in stack
        ]
        return [
            AttentionLayer(trained, formula, projection, projection)
            for trained, projection in zip(stack, projections, strict=True)
        ]


class LongShortProjection(DynamicProjection):
    """n tokens, and k summaries behind them, each normalised: (b, n, d) -> (b, n + k, d).

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
        return WithSummaries(summaries, self.norm_of_window, self.norm_of_summaries)

    @torch.no_grad()
    def carry(self, trained: "LongShortProjection", old: TokenGrid, new: TokenGrid) -> None:
        self.load_state_dict(trained.state_dict())


class WithSummaries:
    """Tokens and their summaries, once E is known.

    Args:
        summaries: E.
        norm_of_window, norm_of_summaries: What each goes through.
    """

    commutes = False

    def __init__(self, summaries: GivenMatrix, norm_of_window: nn.Module, norm_of_summaries: nn.Module) -> None:
        self.summaries = summaries
        self.norm_of_window, self.norm_of_summaries = norm_of_window, norm_of_summaries

    @property
    def unnormed(self) -> "WithSummaries":
        return WithSummaries(self.summaries, nn.Identity(), nn.Identity())

    def __call__(
        self, tokens: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None = None
    ) -> Float[Tensor, "b m d"]:
        near, far = self.norm_of_window(tokens), self.norm_of_summaries(self.summaries(tokens, present))
        return torch.cat([near.to(tokens.dtype), far.to(tokens.dtype)], dim=1)

    def filled(self, present: Bool[Tensor, "b n 1"]) -> Bool[Tensor, "b m 1"]:
        return F.pad(present, (0, 0, 0, self.summaries.matrix.shape[-2]), value=True)


class LongShortFormula:
    """Softmax attention of each token over its window, the prefix tokens and k summaries.

    Args:
        grid: The tokens.
        k: Summaries, which follow the n keys and values.
        window: w.
        on_grid: Whether windows are windows of the grid.
    """

    def __init__(self, grid: TokenGrid, k: int, window: int, on_grid: bool) -> None:
        self.num_prefix_tokens, self.k = grid.num_prefix_tokens, k
        self.columns = grid.size[1] if on_grid else 1
        beside = max(window // 2, 1)
        # (tokens of a block, tokens on each side of it), along rows and along columns
        self.along = (window, beside), (window, beside) if self.columns > window else (self.columns, 0)

    def __call__(
        self,
        queries: Float[Tensor, "b h q c"],
        keys: Float[Tensor, "b h m c"],
        values: Float[Tensor, "b h m c"],
        query_mask: Bool[Tensor, "b 1 q 1"] | None,
        key_mask: Bool[Tensor, "b 1 1 m"] | None,
        dropout: float,
    ) -> Float[Tensor, "b h q c"]:
        prefix, n = self.num_prefix_tokens, keys.shape[2] - self.k
        of_prefix = softmax_formula(queries[:, :, :prefix], keys, values, None, key_mask, dropout)
        if queries.shape[2] <= prefix:
            return of_prefix
        num_queries = queries.shape[2] - prefix
        here = self._blocks(F.pad(queries[:, :, prefix:], (0, 0, 0, n - prefix - num_queries)), is_query=True)
        near_keys, near_values = self._blocks(keys[:, :, prefix:n]), self._blocks(values[:, :, prefix:n])
        everywhere = torch.ones_like(keys[:1, :1, :, :1], dtype=torch.bool) if key_mask is None else key_mask.mT
        near_mask, far_mask = self._blocks(everywhere[:, :, prefix:n]).mT, _global(everywhere, prefix, n).mT
        here = here * here.shape[-1] ** -0.5
        near = (here @ near_keys.mT).masked_fill(~near_mask, -float("inf"))
        blocks = here.shape[2:5]
        far = (here.flatten(2, 4) @ _global(keys, prefix, n).mT).masked_fill(~far_mask, -float("inf"))
        scores = torch.cat([near, far.unflatten(2, blocks)], dim=-1)
        weights = F.dropout(scores.softmax(-1, dtype=scores.dtype), dropout)
        of_near, of_far = weights.split([near.shape[-1], far.shape[-1]], dim=-1)
        mixed = of_near @ near_values + (of_far.flatten(2, 4) @ _global(values, prefix, n)).unflatten(2, blocks)
        return torch.cat([of_prefix, self._sequence(mixed, n - prefix)[:, :, :num_queries]], dim=2)

    def _blocks(self, x: Shaped[Tensor, "b h m c"], is_query: bool = False) -> Tensor:
        """The tokens of each block, for keys and values with those beside it: (b, h, rows, columns of blocks, _, c)."""
        rows = -(-x.shape[2] // self.columns)
        x = F.pad(x, (0, 0, 0, rows * self.columns - x.shape[2])).unflatten(2, (rows, self.columns))
        for dim, (block, beside) in zip((2, 4), self.along, strict=True):
            x = _in_blocks(x, dim, block, 0 if is_query else beside)
        return x.transpose(3, 4).flatten(4, 5)

    def _sequence(self, blocks: Float[Tensor, "b h y x t c"], num_tokens: int) -> Float[Tensor, "b h m c"]:
        """The tokens of blocks, row by row."""
        grid = blocks.unflatten(4, tuple(block for block, _ in self.along)).transpose(3, 4).flatten(4, 5).flatten(2, 3)
        return grid[:, :, :, : self.columns].flatten(2, 3)[:, :, :num_tokens]


def _global(x: Tensor, prefix: int, n: int) -> Tensor:
    """What every token attends to: the prefix tokens, and the summaries behind the n tokens."""
    return torch.cat([x[:, :, :prefix], x[:, :, n:]], dim=2)


def _in_blocks(x: Tensor, dim: int, block: int, beside: int) -> Tensor:
    """A dimension as blocks, each with the ends of its neighbours, zeros at the border: (..., blocks, tokens, ...)."""
    missing = -x.shape[dim] % block
    x = F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)).unflatten(dim, (-1, block))
    if not beside:
        return x
    first, last = x.narrow(dim + 1, 0, beside), x.narrow(dim + 1, block - beside, beside)
    nothing = torch.zeros_like(first.narrow(dim, 0, 1))
    count = x.shape[dim] - 1
    before = torch.cat([nothing, last.narrow(dim, 0, count)], dim)
    behind = torch.cat([first.narrow(dim, 1, count), nothing], dim)
    return torch.cat([before, x, behind], dim + 1)
