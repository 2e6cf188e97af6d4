"""Blockwise attention (arXiv:1911.02972): each head lets every block of tokens attend to one block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from longseq.arguments import require, require_positive
from longseq.attention.grid import TokenGrid
from longseq.attention.heads import Heads
from longseq.attention.layer import AttentionLayer, Stack, softmax_formula
from longseq.attention.mechanism import Mechanism
from longseq.attention.mixer import length_with_gaps


@dataclass(frozen=True)
class Blockwise(Mechanism):
    """Y_i = softmax(Q_i K_j' / sqrt(c)) V_j of block i, with j = (i + s) mod g for a head of shift s (section 3).

    The sequence is cut into g blocks of m = ceil(n / num_blocks) tokens. A head has one shift s of 0..num_blocks - 1:
    with s = 0 every block attends to itself, otherwise to the block that lies s further on. The paper allows any
    permutation of the blocks, and uses these. Prefix tokens are the first tokens of the first block, as in the paper.

    A layer costs 8 n d^2 FLOPs for queries, keys, values and output, and 4 n m d for scores and weights, so time still
    grows with n^2. A sequence of another length has blocks of the same m tokens, and g follows from its own tokens.

    Args:
        num_blocks: Blocks of the configured n.
        heads: How many heads have the shifts 0, 1, 2 and so on. None for a sixth of the heads (at least one) for each
            shift but 0, and shift 0 for all others: of 12 heads the paper's 10 and 2, or 8, 2 and 2.
    """

    num_blocks: int = 2
    heads: list[int] | None = None

    any_length: ClassVar[bool] = True

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls(), cls(3)]

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        require_positive("2 and 3 are the paper's", num_blocks=self.num_blocks)
        what = f"must be at most {grid.num_tokens} (the tokens), got {self.num_blocks}; 2 and 3 are the paper's"
        require(self.num_blocks <= grid.num_tokens, "num_blocks", what)
        size = -(-grid.num_tokens // self.num_blocks)
        formulas = [_BlockFormula(size, self._heads_of_shifts(trained.num_heads)) for trained in stack]
        return [
            AttentionLayer(trained, formula, independent_queries=True)
            for trained, formula in zip(stack, formulas, strict=True)
        ]

    def _heads_of_shifts(self, num_heads: int) -> list[int]:
        if self.heads is None:
            shifted = max(1, num_heads // 6)
            counts = [shifted] * min(self.num_blocks - 1, (num_heads - 1) // shifted)
            return [num_heads - sum(counts), *counts]
        what = f"must be 1 to {self.num_blocks} numbers (the blocks), 0 or more, that sum to {num_heads} (the heads)"
        is_possible = 1 <= len(self.heads) <= self.num_blocks and min(self.heads) >= 0 and sum(self.heads) == num_heads
        require(is_possible, "heads", f"{what}, got {self.heads}; leave it out")
        return self.heads


class _BlockFormula:
    """Softmax attention of each block to the block that its head's shift chooses.

    Args:
        size: m, the tokens of a block.
        heads_of_shifts: How many heads have the shifts 0, 1, 2 and so on.
    """

    def __init__(self, size: int, heads_of_shifts: list[int]) -> None:
        self.size, self.heads_of_shifts = size, heads_of_shifts

    def __call__(self, heads: Heads) -> Float[Tensor, "b h q c"]:
        mixed, parts = [], zip(*(part.split(self.heads_of_shifts, dim=1) for part in heads[:3]), strict=True)
        for shift, (queries, keys, values) in enumerate(parts):
            if queries.shape[1]:
                mixed.append(self._of_shift(heads._replace(queries=queries, keys=keys, values=values), shift))
        return torch.cat(mixed, dim=1)

    def _of_shift(self, heads: Heads, shift: int) -> Float[Tensor, "b h q c"]:
        queries, keys, values, _, key_mask, _ = heads
        b, q, n = keys.shape[0], queries.shape[2], keys.shape[2]
        # an exporter's symbol is no int; comparing it would restrict the exported program to a range of lengths
        size = min(self.size, n) if isinstance(n, int) else self.size
        rows = min(size, q) if isinstance(q, int) else size  # few queries are not padded to a whole block
        here, K, V, present = _in_blocks(queries, rows), _in_blocks(keys, size), _in_blocks(values, size), None
        if key_mask is not None or not isinstance(n, int) or n % size:
            present = keys.new_ones(b, 1, n, 1, dtype=torch.bool) if key_mask is None else key_mask.mT
            present = _in_blocks(present, size)
        chosen = (torch.arange(here.shape[1], device=keys.device) + shift) % _num_blocks(keys, key_mask, size)
        places = (torch.arange(b, device=keys.device)[:, None] * K.shape[1] + chosen).flatten()
        K, V = (x.flatten(0, 1).index_select(0, places) for x in (K, V))
        mask = None if present is None else present.flatten(0, 1).index_select(0, places).mT
        if mask is not None and key_mask is not None:  # a block may lie in a gap: without keys its sum is 0
            V = V.masked_fill(~mask.mT, 0)
            mask = mask | ~mask.any(-1, keepdim=True)
        mixed = softmax_formula(Heads(here.flatten(0, 1), K, V, None, mask, heads.dropout))
        return mixed.unflatten(0, here.shape[:2]).transpose(1, 2).flatten(2, 3)[:, :, :q]


def _in_blocks(x: Shaped[Tensor, "b h n c"], size: int) -> Shaped[Tensor, "b g h m c"]:
    """The tokens of each block, zeros or False beyond the last."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size)).transpose(1, 2)


def _num_blocks(
    keys: Float[Tensor, "b h n c"], key_mask: Bool[Tensor, "b 1 1 n"] | None, size: int
) -> "int | Int[Tensor, 'b 1']":
    """g, the blocks up to that of the last token: padding adds none and a gap takes none away, so that they change no
    shift."""
    if key_mask is None:
        return -(-keys.shape[2] // size)
    return ((length_with_gaps(key_mask[:, 0]) + size - 1) // size).clamp(min=1)
