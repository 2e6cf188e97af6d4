"""From the scores of every token to those of the whole input.

An encoder's own pooling averages features before the head: one second of an hour is diluted 3,600-fold. The poolings
in this file come after the head has scored every token, which also shows where in the input a class is.
"""

from abc import ABC, abstractmethod
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longseq.arguments import ArgumentError
from longseq.attention.shard import Shard, Split, highest, summed
from longseq.compat.torch import at_least_float32
from longseq.encoders.gated_pooling import GatedPooling

Pool = Literal["avg", "max", "linear_softmax", "attention"]


class Pooling(Split, ABC):
    """Scores of an input from those of its tokens. Padding changes nothing. If several processes share a sequence, sums
    and maxima go over all of them, and every process has the result."""

    @abstractmethod
    def forward(
        self,
        tokens: Float[Tensor, "b n d"],
        scores: Float[Tensor, "b n classes"],
        present: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b classes"]:
        """Pool.

        Args:
            tokens: The features of tokens.
            scores: The outputs of the head for each token: logits of each class.
            present: False where a token is padding; None without padding.
        """


class AveragePooling(Pooling):
    """The mean of the scores: for classes that last as long as the input."""

    def forward(self, tokens: Tensor, scores: Tensor, present: Tensor | None = None) -> Tensor:
        if self.shard is None and present is None:
            return scores.mean(1)
        exact = at_least_float32(scores)  # float16 cannot count beyond 65,504 tokens
        there = torch.ones_like(exact[..., :1]) if present is None else present[..., None].to(exact.dtype)
        if self.shard is not None:
            return _divided(torch.cat([exact * there, there], dim=-1).sum(1), self.shard).to(scores.dtype)
        return (exact.masked_fill(there == 0, 0).sum(1) / there.sum(1)).to(scores.dtype)


class MaxPooling(Pooling):
    """The highest score of each class: for classes that may last a single token. Only that token gets a gradient."""

    def forward(self, tokens: Tensor, scores: Tensor, present: Tensor | None = None) -> Tensor:
        there = scores if present is None else scores.masked_fill(~present[..., None], -float("inf"))
        if self.shard is None:
            return there.amax(1)
        is_most = there == highest(there.amax(1, keepdim=True), self.shard)  # the mean of those that equal the maximum
        sums = summed(torch.stack([there.masked_fill(~is_most, 0).sum(1), is_most.sum(1).to(scores.dtype)]), self.shard)
        return sums[0] / sums[1]


class LinearSoftmaxPooling(Pooling):
    """The mean of each class's probabilities sigmoid(score), each weighted by itself: sum p^2 / sum p, as a logit.

    For classes that last some tokens: tokens of low probability have little weight, and all tokens of high probability
    get gradients. Source: Wang, Li and Metze, A Comparison of Five Multiple Instance Learning Pooling Functions
    (arXiv:1810.09050).
    """

    def forward(self, tokens: Tensor, scores: Tensor, present: Tensor | None = None) -> Tensor:
        scores = scores.float() if scores.dtype.itemsize < 4 else scores
        # log p = logsigmoid(score). All steps use logarithms, because p may be 1e-30 everywhere
        logs = nn.functional.logsigmoid(scores)
        if present is not None:
            logs = logs.masked_fill(~present[..., None], -float("inf"))
        if self.shard is None:
            pooled = torch.logsumexp(2 * logs, dim=1) - torch.logsumexp(logs, dim=1)
        else:
            most = highest(logs.amax(1), self.shard)
            shares = (logs - most[:, None]).exp()
            squares, sums = summed(torch.stack([shares.square().sum(1), shares.sum(1)]), self.shard)
            pooled = squares.log() - sums.log() + most
        pooled = pooled.clamp(max=-1e-6)
        return pooled - torch.log(-torch.expm1(pooled))


class AttentionPooling(GatedPooling, Pooling):
    """A weighted mean of the scores, with weights softmax_n(s w' (tanh(V x) * sigmoid(U x))) for all classes alike.

    s = log(n) / log(1000) is ours: with it the weights do not become flatter in inputs longer than those of the
    training.
    """

    length_scaling = 1.0

    def forward(self, tokens: Tensor, scores: Tensor, present: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return self.mean(tokens, scores, present)


def _divided(both: Float[Tensor, "b numbers"], shard: Shard) -> Float[Tensor, "b classes"]:
    """Sums over the tokens of all processes, divided by the last number, which is the denominator."""
    sums = summed(both, shard)
    return sums[:, :-1] / sums[:, -1:]


def make_pooling(pool: Pool | None, dim: int) -> Pooling | None:
    """The pooling of this name, for tokens of this width; None if the encoder pools features instead.

    Raises:
        ValueError: If there is no such pooling.
    """
    if pool is None:
        return None
    kinds = {"avg": AveragePooling, "max": MaxPooling, "linear_softmax": LinearSoftmaxPooling}
    if pool == "attention":
        return AttentionPooling(dim)
    if pool not in kinds:
        what = f"must be {', '.join(kinds)} or attention, got {pool!r}; leave it out to pool features"
        raise ArgumentError("pool", what)
    return kinds[pool]()
