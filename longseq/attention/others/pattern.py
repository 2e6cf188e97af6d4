"""Softmax attention where each token attends to few others: one softmax over several sets of keys, never n x n."""

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from longseq.attention.heads import Heads
from longseq.attention.layer import softmax_formula
from longseq.attention.others.flex import attend_in_window, suits_flex

# The keys and values of a set, (b, h, ..., c), its dimensions as letters of einsum (b, h; y and x count blocks of
# queries, t the queries of one and u its keys), and a mask that broadcasts against the scores (b, h, y, x, t, u).
KeySet = tuple[Tensor, Tensor, str, Tensor]

Sizes = tuple[tuple[int, int], tuple[int, int]]  # of a block, and on each side of it: along rows, and along columns


class Blocks:
    """Tokens of a grid as blocks that tile it; a block of keys also holds the tokens beside it.

    Args:
        columns: Columns of the grid; 1 for a sequence.
        along: Tokens of a block and tokens on each side of it (at most a block), along rows and along columns.
        cut: How tokens are cut into blocks, if not as ``along`` says: into fewer and larger ones.
    """

    def __init__(self, columns: int, along: Sizes, cut: Sizes | None = None) -> None:
        self.columns, self.along, self.cut = columns, along, cut or along

    @classmethod
    def of_windows(cls, columns: int, block: int, beside: int) -> "Blocks":
        """Blocks of as many rows as columns."""
        return cls(columns, ((block, beside), (block, beside)))

    def fitted(self, num_tokens: int) -> "Blocks":
        """The blocks for this number of tokens. An axis that is no longer than a block with the tokens beside it
        becomes a single block: this takes no more scores, and often far fewer. A mask then keeps the windows."""

        def cut(size: int, block: int, beside: int) -> tuple[int, int]:
            # an exporter's symbol is no int; comparing it would restrict the exported program to a range of lengths
            return (size, 0) if isinstance(size, int) and size <= block + 2 * beside else (block, beside)

        of_rows, of_columns = self.along
        rows = -(-num_tokens // self.columns)
        return Blocks(self.columns, self.along, (cut(rows, *of_rows), cut(self.columns, *of_columns)))

    def split(self, x: Shaped[Tensor, "b h m c"], beside: bool) -> Shaped[Tensor, "b h y x u c"]:
        """The tokens of each block, zeros beyond the last, with or without those beside it."""
        rows = -(-x.shape[2] // self.columns)
        x = F.pad(x, (0, 0, 0, rows * self.columns - x.shape[2])).unflatten(2, (rows, self.columns))
        for dim, (block, width) in zip((2, 4), self.cut, strict=True):
            x = _in_blocks(x, dim, block, width if beside else 0)
        return x.transpose(3, 4).flatten(4, 5)

    def join(self, blocks: Shaped[Tensor, "b h y x t c"], num_tokens: int) -> Shaped[Tensor, "b h m c"]:
        """The tokens of blocks, row by row."""
        grid = blocks.unflatten(4, tuple(block for block, _ in self.cut)).transpose(3, 4).flatten(4, 5).flatten(2, 3)
        return grid[:, :, :, : self.columns].flatten(2, 3)[:, :, :num_tokens]

    def windows(self, is_banded: bool, device: torch.device) -> Bool[Tensor, "t u"] | None:
        """Whether a key is in a query's window (``is_banded`` as in PatternFormula); None if all keys are."""
        if not is_banded and self.cut == self.along:
            return None
        masks = []
        for (block, beside), (size, width) in zip(self.along, self.cut, strict=True):
            here, there = torch.arange(size, device=device)[:, None], torch.arange(-width, size + width, device=device)
            step = 1 if is_banded else block
            first = here // step * step
            masks.append((first - beside <= there) & (there < first + step + beside))
        rows, columns = masks
        return (rows[:, None, :, None] & columns[None, :, None]).flatten(2).flatten(0, 1)


class PatternFormula:
    """Softmax attention of each token over its set of blocks, the prefix tokens, and k more keys after the n tokens.

    Prefix tokens are global: they attend to everything, and everything attends to them.

    Args:
        num_prefix_tokens: Prefix tokens.
        blocks: The blocks of the other tokens.
        num_summaries: k.
        is_banded: Whether a token attends only to tokens within the width of what lies beside a block. Otherwise it
            attends to its whole block and all tokens beside that.
    """

    def __init__(self, num_prefix_tokens: int, blocks: Blocks, num_summaries: int = 0, is_banded: bool = False) -> None:
        self.num_prefix_tokens, self.blocks = num_prefix_tokens, blocks
        self.num_summaries, self.is_banded = num_summaries, is_banded

    def __call__(self, heads: Heads) -> Float[Tensor, "b h q c"]:
        prefix = self.num_prefix_tokens
        if not prefix:
            return self.of_rest(heads)
        of_prefix = softmax_formula(heads._replace(queries=heads.queries[:, :, :prefix]))
        if heads.queries.shape[2] <= prefix:
            return of_prefix
        rest = self.of_rest(heads._replace(queries=heads.queries[:, :, prefix:]))
        return torch.cat([of_prefix, rest], dim=2)

    def of_rest(self, heads: Heads) -> Float[Tensor, "b h q c"]:
        """The result for the queries after the prefix tokens."""
        window = self.window
        if window is not None and suits_flex(heads.queries, heads.dropout):
            return attend_in_window(heads, window, self.num_prefix_tokens)
        return self.by_blocks(heads)

    @property
    def window(self) -> int | None:
        """The largest distance of a token's keys from it, if it attends only to a window of the sequence and to prefix
        tokens; else None."""
        is_window = self.is_banded and self.blocks.columns == 1 and not self.num_summaries
        return self.blocks.along[0][1] if is_window else None

    def by_blocks(self, heads: Heads) -> Float[Tensor, "b h q c"]:
        """What ``of_rest`` returns, by products of blocks."""
        queries, keys, values, _, key_mask, dropout = heads
        num_queries, num_tokens = queries.shape[2], keys.shape[2] - self.num_summaries - self.num_prefix_tokens
        there = torch.ones_like(keys[:1, :1, :, :1], dtype=torch.bool) if key_mask is None else key_mask.mT
        blocks = self.fitted(num_tokens)
        here = blocks.split(F.pad(queries, (0, 0, 0, num_tokens - num_queries)), beside=False)
        here = here * here.shape[-1] ** -0.5
        sets = list(self.key_sets(blocks, keys, values, there))
        scores = [_scores(here, K, dims, mask) for K, _, dims, mask in sets]
        scores = torch.cat(scores, dim=-1)
        weights = F.dropout(scores.softmax(-1, dtype=scores.dtype), dropout)
        sizes = [K.shape[dims.index("u")] for K, _, dims, _ in sets]
        mixed = [
            torch.einsum(f"bhyxtu,{dims}->bhyxtc", part, V)
            for part, (_, V, dims, _) in zip(weights.split(sizes, dim=-1), sets, strict=True)
        ]
        return blocks.join(functools.reduce(torch.add, mixed), num_tokens)[:, :, :num_queries]

    def fitted(self, num_tokens: int) -> Blocks:
        """The blocks into which this number of tokens is cut."""
        return self.blocks.fitted(num_tokens)

    def key_sets(
        self, blocks: Blocks, keys: Tensor, values: Tensor, there: Bool[Tensor, "b 1 m 1"]
    ) -> Iterator[KeySet]:
        """The sets of keys, which do not overlap; ``there`` is False at padding."""
        yield self.beside(blocks, keys, values, there)
        yield from self.everywhere(keys, values, there)

    def beside(self, blocks: Blocks, keys: Tensor, values: Tensor, there: Tensor) -> KeySet:
        """The tokens of each block and those beside it."""
        K, V, present = (blocks.split(self.of_grid(x), beside=True) for x in (keys, values, there))
        windows = blocks.windows(self.is_banded, keys.device)
        return K, V, "bhyxuc", present.mT if windows is None else present.mT & windows

    def everywhere(self, keys: Tensor, values: Tensor, there: Tensor) -> Iterator[KeySet]:
        """What every token attends to: the prefix tokens, and the k keys after the n tokens."""
        prefix, n = self.num_prefix_tokens, keys.shape[2] - self.num_summaries
        if prefix + self.num_summaries:
            K, V, present = (torch.cat([x[:, :, :prefix], x[:, :, n:]], dim=2) for x in (keys, values, there))
            yield K, V, "bhuc", present.mT[:, :, None, None]

    def of_grid(self, x: Tensor) -> Tensor:
        """The tokens of the grid: all but the prefix tokens and the k summaries."""
        return x[:, :, self.num_prefix_tokens : x.shape[2] - self.num_summaries]


def _scores(queries: Tensor, keys: Tensor, dims: str, mask: Tensor) -> Tensor:
    """The scores of a set of keys. Masked ones are finite, because a query that is padding may have no key at all."""
    scores = torch.einsum(f"bhyxtc,{dims}->bhyxtu", queries, keys)
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)  # autocast changes the precision of the scores


def _in_blocks(x: Tensor, dim: int, block: int, beside: int) -> Tensor:
    """Cut a dimension into blocks that also hold the ends of their neighbours, or zeros at the border: (..., blocks,
    tokens, ...)."""
    missing = -x.shape[dim] % block
    x = F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)).unflatten(dim, (-1, block))
    if not beside:
        return x
    first, last = x.narrow(dim + 1, 0, beside), x.narrow(dim + 1, block - beside, beside)
    zeros = torch.zeros_like(first.narrow(dim, 0, 1))
    count = x.shape[dim] - 1
    before = torch.cat([zeros, last.narrow(dim, 0, count)], dim)
    after = torch.cat([first.narrow(dim, 1, count), zeros], dim)
    return torch.cat([before, x, after], dim + 1)
