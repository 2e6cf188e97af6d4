"""Longformer (arXiv:2004.05150): softmax attention over a window around each token, and over global tokens."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longseq.arguments import require
from longseq.attention.grid import TokenGrid
from longseq.attention.heads import Heads, Tokens
from longseq.attention.layer import AttentionLayer, Stack, softmax_formula
from longseq.attention.mechanism import Mechanism
from longseq.attention.others.pattern import Blocks, PatternFormula


@dataclass(frozen=True)
class Longformer(Mechanism):
    """Y_t = softmax(q_t [K_G; K_t]' / sqrt(c)) [V_G; V_t], K_t and V_t at most w / 2 tokens from t (section 3.1).

    Prefix tokens are the global tokens G: all tokens attend to them, and they attend to all tokens. For that they have
    a second matrix of queries, keys and values, which starts as a copy of the first (section 3.1, "Linear
    Projections"). Windows are not dilated.

    A layer costs 8 n d^2 FLOPs for queries, keys, values and output, 6 n w d for the scores and weights of windows (on
    a grid 9 n w^2 d). With g global tokens it costs 8 n g d and 6 n d^2 more, and has 3 d^2 more weights. Scores are
    computed for blocks of w / 2 tokens, so time and memory grow with n w. An axis of at most 1.5 w tokens is a single
    block, so that windows never cost much more than attention to all n tokens. On a GPU, flex_attention computes the
    windows of a sequence (flex.py).

    Args:
        window: w, even; a token attends to w / 2 tokens on each side of it.
        grid: Whether a window is w + 1 rows by w + 1 columns of the token grid. Otherwise it is a window of the
            sequence, which may have any length.
    """

    window: int = 512
    grid: bool = False

    @property
    def any_length(self) -> bool:
        return not self.grid  # the columns of a grid are those that it was built for

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls(8), cls(4, grid=True)]

    def layers(self, stack: Stack, grid: TokenGrid) -> "list[AttentionLayer]":
        is_even = self.window >= 2 and self.window % 2 == 0
        require(is_even, "window", f"must be even and positive, got {self.window}; 512 is the paper's")
        beside = self.window // 2
        blocks = Blocks.of_windows(grid.size[1] if self.grid else 1, beside, beside)
        if not grid.num_prefix_tokens:
            formula = PatternFormula(0, blocks, is_banded=True)
            return [AttentionLayer(trained, formula, independent_queries=True) for trained in stack]
        formula = _LongformerFormula(grid.num_prefix_tokens, blocks, is_banded=True)
        return [LongformerLayer(trained, formula) for trained in stack]


class LongformerLayer(AttentionLayer):
    """A layer with global tokens. Its formula gets the keys and values of both matrices, 2 n of them.

    Args:
        trained, formula: As AttentionLayer takes them.

    Attributes:
        qkv_global: The matrix for the queries of global tokens, and for the keys and values that they attend to.
    """

    def __init__(self, trained: "nn.Module", formula: "_LongformerFormula") -> None:
        super().__init__(trained, formula, independent_queries=True)  # type: ignore[arg-type]
        self.qkv_global = trained.qkv_global if isinstance(trained, LongformerLayer) else copy.deepcopy(self.qkv)
        self.num_prefix_tokens = formula.num_prefix_tokens

    def queries_keys_values(self, tokens: Tokens, project_keys: None, project_values: None) -> list[Tensor]:
        """Queries of prefix tokens by the second matrix, of all others by the first; keys and values by both."""
        queries, *of_windows = super().queries_keys_values(tokens, project_keys, project_values)
        of_prefix, *everywhere = self.turned(tokens, *self.qkv_global(tokens.x).split(self.attn_dim, dim=-1))
        prefix = self.num_prefix_tokens
        both = (torch.cat(pair, dim=1) for pair in zip(of_windows, everywhere, strict=True))
        return [torch.cat([of_prefix[:, :, :prefix], queries[:, :, prefix:]], dim=2), *both]

    @torch.no_grad()
    def carry(self, trained: nn.Module, old: TokenGrid, new: TokenGrid) -> list[str]:
        """Copy all weights. If the trained layer has no global tokens, ``qkv_global`` starts as a copy of ``qkv``."""
        fresh = super().carry(trained, old, new)
        if any(name.startswith("qkv_global.") for name in fresh):
            self.qkv_global.load_state_dict(self.qkv.state_dict())
        return fresh


class _LongformerFormula(PatternFormula):
    """Windows, and global tokens. The global tokens' own n keys and values come after the n of the windows."""

    def __call__(self, heads: Heads) -> Float[Tensor, "b h q c"]:
        of_prefix, rest = heads.queries.tensor_split([self.num_prefix_tokens], dim=2)
        (keys, global_keys), (values, global_values) = heads.keys.chunk(2, dim=2), heads.values.chunk(2, dim=2)
        of_prefix = softmax_formula(heads._replace(queries=of_prefix, keys=global_keys, values=global_values))
        if not rest.shape[2]:
            return of_prefix
        return torch.cat([of_prefix, self.of_rest(heads._replace(queries=rest, keys=keys, values=values))], dim=2)
