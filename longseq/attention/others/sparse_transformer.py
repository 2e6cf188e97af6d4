"""Sparse Transformer (arXiv:1904.10509): attention in two factors, near tokens and tokens spread over the sequence."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longseq.arguments import require, require_choice, require_positive
from longseq.attention.grid import TokenGrid
from longseq.attention.heads import Heads
from longseq.attention.layer import AttentionLayer, Stack
from longseq.attention.mechanism import Mechanism
from longseq.attention.others.pattern import Blocks, KeySet, PatternFormula

Pattern = Literal["strided", "fixed"]
Factors = Literal["merged", "interleaved", "heads"]


@dataclass(frozen=True)
class SparseTransformer(Mechanism):
    """Y_t = softmax(q_t K_S(t)' / sqrt(c)) V_S(t), S(t) of about sqrt(n) tokens, not causal (sections 4.2 and 4.3).

    The sequence is read in rows of l tokens. Two factors, A1 and A2, connect any two tokens in two steps:

    - ``strided``: A1 are the tokens at most l from t; A2 is the column of t, every l-th token.
    - ``fixed``: A1 is the row of t; A2 are the last tokens of every row.

    Prefix tokens are global: they attend to all tokens, and all tokens attend to them. If a sequence reaches no last
    token of a row and has no prefix token, A2 is empty and its result zero. A layer costs 8 n d^2 FLOPs for queries,
    keys, values and output. With r = n / l rows and s last tokens, scores and weights cost 12 n l d (A1) and 4 n r d
    (A2) if strided, 4 n l d (A1) and 4 n r s d (A2) if fixed. So time and memory grow with n sqrt(n).

    Args:
        pattern: ``strided`` or ``fixed``.
        stride: l; None for the length of one or more whole rows of the token grid that is closest to sqrt(n): one row
            of a square image. For a sequence (one column), and for rows of more than 2 sqrt(n) tokens, it is sqrt(n).
        last: s (c in the paper), the last tokens of a row.
        factors: ``merged``: every head attends to A1 and A2; ``interleaved``: layers attend to A1 and A2 in turns;
            ``heads``: the first half of the heads attends to A1 and the second to A2.
    """

    pattern: Pattern = "strided"
    stride: int | None = None
    last: int = 8
    factors: Factors = "merged"

    any_length: ClassVar[bool] = True

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls(), cls("fixed", stride=6, last=2), cls(factors="interleaved")]

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        require_choice("pattern", self.pattern, Pattern)
        require_choice("factors", self.factors, Factors)
        if self.stride is not None:
            require_positive("leave it out for about sqrt(n)", stride=self.stride)
        stride = self.stride or _near_square_root(grid)
        is_last = self.pattern != "fixed" or 1 <= self.last <= stride
        require(is_last, "last", f"must be in 1..{stride} (the stride), got {self.last}; lower it")
        is_halved = self.factors != "heads" or not any(trained.num_heads % 2 for trained in stack)
        what = "must be merged or interleaved with an odd number of heads, got heads; change one of them"
        require(is_halved, "factors", what)

        def formula(near: bool, far: bool) -> _FactorFormula:
            last = self.last if self.pattern == "fixed" else None
            return _FactorFormula(grid.num_prefix_tokens, stride, last, near, far)

        near, far = formula(True, False), formula(False, True)
        if self.factors == "interleaved":
            formulas = [far if depth % 2 else near for depth in range(len(stack))]
        else:
            formulas = [_HalvesFormula(near, far) if self.factors == "heads" else formula(True, True)] * len(stack)
        return [
            AttentionLayer(trained, of_layer, independent_queries=True)
            for trained, of_layer in zip(stack, formulas, strict=True)
        ]


def _near_square_root(grid: TokenGrid) -> int:
    """The number of tokens in whole rows of the grid that is closest to the square root of n; the square root itself if
    a row is more than twice as long."""
    columns, root = grid.size[1], math.sqrt(math.prod(grid.size))
    return round(root) if columns > 2 * root else columns * max(1, round(root / columns))


class _FactorFormula(PatternFormula):
    """Softmax attention over A1, A2 or both.

    Args:
        num_prefix_tokens: Prefix tokens.
        stride: l.
        last: s, or None for the strided pattern.
        near: Whether A1 is attended to.
        far: Whether A2 is attended to.
    """

    def __init__(self, num_prefix_tokens: int, stride: int, last: int | None, near: bool, far: bool) -> None:
        blocks = Blocks(1, ((stride, stride if last is None else 0), (1, 0)))
        super().__init__(num_prefix_tokens, blocks, is_banded=last is None)
        self.last, self.near, self.far = last, near, far

    @property
    def window(self) -> int | None:
        return None if self.far else super().window

    def fitted(self, num_tokens: int) -> Blocks:
        """A2 is read from blocks that are rows; a sequence of one row has one block."""
        is_one_row = isinstance(num_tokens, int) and num_tokens <= self.blocks.along[0][0]
        return super().fitted(num_tokens) if is_one_row or not self.far else self.blocks

    def key_sets(
        self, blocks: Blocks, keys: Tensor, values: Tensor, there: Bool[Tensor, "b 1 m 1"]
    ) -> Iterator[KeySet]:
        if self.near:
            yield self.beside(blocks, keys, values, there)
        if self.far:
            yield self._spread(blocks, keys, values, there)
        yield from self.everywhere(keys, values, there)

    def _spread(self, blocks: Blocks, keys: Tensor, values: Tensor, there: Tensor) -> KeySet:
        """A2, without the keys that A1 has already."""
        rows = blocks if self.last is None else self.blocks  # a shorter block lacks the last tokens of its row
        K, V, present = (rows.split(self.of_grid(x), beside=False) for x in (keys, values, there))
        row = torch.arange(K.shape[2], device=keys.device)
        if self.last is None:
            dims, of_key, reach = "bhuxtc", row, 1
            present = present.squeeze(-1).movedim(2, -1).unsqueeze(2)  # (b, 1, 1, x, t, u)
        else:
            K, V, present = (x[:, :, :, 0, -self.last :].flatten(2, 3) for x in (K, V, present))
            dims, of_key, reach = "bhuc", row.repeat_interleave(self.last), 0
            present = present.mT[:, :, None, None]  # (b, 1, 1, 1, 1, u)
        if self.near:
            present = present & ((row[:, None] - of_key).abs() > reach)[:, None, None]
        return K, V, dims, present


class _HalvesFormula:
    """One formula for the first half of the heads, and another for the second."""

    def __init__(self, first: PatternFormula, second: PatternFormula) -> None:
        self.first, self.second = first, second

    def __call__(self, heads: Heads) -> Float[Tensor, "b h q c"]:
        halves = zip(*(part.chunk(2, dim=1) for part in heads[:3]), strict=True)
        mixed = [
            formula(heads._replace(queries=Q, keys=K, values=V))
            for formula, (Q, K, V) in zip((self.first, self.second), halves, strict=True)
        ]
        return torch.cat(mixed, dim=1)
