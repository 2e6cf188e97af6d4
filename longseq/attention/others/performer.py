"""Performer (arXiv:2009.14794): softmax attention estimated with positive orthogonal random features, FAVOR+."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longseq.arguments import require, require_choice, require_positive
from longseq.attention.grid import TokenGrid
from longseq.attention.heads import Heads
from longseq.attention.layer import AttentionLayer, Stack
from longseq.attention.mechanism import Mechanism
from longseq.attention.others._redrawn import Redrawn, RedrawnLayer
from longseq.attention.others.linear_transformer import absent_as_zero, mean_by_features
from longseq.compat.torch import at_least_float32, without_autocast

Kernel = Literal["softmax", "relu"]
# added to features so that no row of weights is zero, as in the authors' code
EPSILON = {"softmax": 1e-6, "relu": 1e-3}


@dataclass(frozen=True)
class Performer(Mechanism):
    """Y = (p(Q) (p(K)' V)) / (p(Q) p(K)' 1) with random features p, E[p(q) p(k)'] = exp(q k' / sqrt(c)).

    p(x) = exp(W x - |x|^2 / 2) of x / c^(1/4) (lemma 1), with m rows in W, Gaussian and orthogonal in blocks of c
    (section 2.4). All heads of a layer share W. A layer costs 8 n d^2 FLOPs for queries, keys, values and output, and
    8 n m d for the features and their products, m features. It takes sequences of any length.

    Args:
        num_features: m; None for c log(c), which theorem 4 asks for, and at least c.
        kernel: ``softmax``, or ``relu`` for p(x) = relu(W x), a generalised kernel that estimates no softmax.
        redraw_every: Training steps from one drawing of W to the next; 0 never draws again. W follows from the layer's
            seed and the step, so a resumed training draws the same. Evaluation uses the last W.
    """

    num_features: int | None = None
    kernel: Kernel = "softmax"
    redraw_every: int = 1000

    any_length: ClassVar[bool] = True

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls(), cls(num_features=13, kernel="relu")]

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        if self.num_features is not None:
            require_positive("leave it out", num_features=self.num_features)
        require_choice("kernel", self.kernel, Kernel)
        what = f"must be 0 or more steps, got {self.redraw_every}; 0 never redraws"
        require(self.redraw_every >= 0, "redraw_every", what)
        formulas = [self._formula(trained.attn_dim // trained.num_heads) for trained in stack]
        return [
            RedrawnLayer(trained, formula, independent_queries=True)
            for trained, formula in zip(stack, formulas, strict=True)
        ]

    def _formula(self, channels: int) -> "RandomFeatures":
        num_features = self.num_features or max(int(channels * math.log(channels)), channels)
        return RandomFeatures(channels, num_features, self.kernel, self.redraw_every)


class RandomFeatures(Redrawn):
    """The formula of FAVOR+ and its random matrix W.

    Args:
        channels: c.
        num_features: m.
        kernel: As Performer takes it.
        redraw_every: As Performer takes it.
    """

    def __init__(self, channels: int, num_features: int, kernel: Kernel, redraw_every: int = 0) -> None:
        super().__init__(redraw_every)
        self.kernel: Kernel = kernel
        self.directions = nn.Buffer(torch.empty(num_features, channels))
        self.redraw(0)

    def draw(self, seed: int) -> None:
        self.directions.copy_(orthogonal_directions(*self.directions.shape, seed=seed))

    def forward(self, heads: Heads) -> Float[Tensor, "b h n c"]:
        queries, keys, values, _, key_mask, dropout = heads
        with without_autocast(queries):  # exponents in bfloat16 would be off by percents
            of_queries = self._features(queries, None, is_query=True).to(values.dtype)
            of_keys = absent_as_zero(self._features(keys, key_mask, is_query=False), key_mask).to(values.dtype)
        return mean_by_features(of_queries, of_keys, values, dropout)

    def _features(
        self, x: Float[Tensor, "b h n c"], mask: Bool[Tensor, "b 1 1 n"] | None, is_query: bool
    ) -> Float[Tensor, "b h n m"]:
        """p(x), without factors that cancel in the quotient: one per query, and one for all keys of a head."""
        x = at_least_float32(x) * x.shape[-1] ** -0.25
        scores = x @ self.directions.to(x.dtype).mT
        if self.kernel == "relu":
            return scores.relu() + EPSILON["relu"]
        if is_query:
            highest = scores.amax(-1, keepdim=True)
        else:
            scores = scores - x.square().sum(-1, keepdim=True) / 2
            if mask is not None:  # the exponential of a score far above all others would be inf, its gradient NaN
                scores = scores.masked_fill(~mask.mT, torch.finfo(scores.dtype).min)
            highest = scores.amax((-2, -1), keepdim=True)
        return (scores - highest.detach()).exp() + EPSILON["softmax"]


def orthogonal_directions(num_features: int, channels: int, seed: int) -> Float[Tensor, "m c"]:
    """Gaussian rows, N(0, 1) in every channel; within each block of c rows they are orthogonal."""
    generator = torch.Generator().manual_seed(seed)
    exact: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults are
    blocks = [
        nn.init.orthogonal_(torch.empty(channels, channels, **exact), generator=generator)
        for _ in range(math.ceil(num_features / channels))
    ]
    lengths = torch.randn(num_features, channels, **exact, generator=generator).norm(dim=1, keepdim=True)
    return lengths * torch.cat(blocks)[:num_features]
