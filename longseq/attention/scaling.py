"""Scores of a softmax over all tokens, scaled by their number."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longseq.arguments import require
from longseq.attention.shard import Shard, summed

_USUAL_LENGTH = 1000  # tokens of a sequence whose scores stay unchanged


def scaled_by_length(
    scores: Float[Tensor, "b ..."],
    num_tokens: int,
    present: Bool[Tensor, "b ..."] | None,
    power: float = 1.0,
    shard: Shard | None = None,
) -> Float[Tensor, "b ..."]:
    """Scores times (log(n) / log(1000)) ** power, where n is the number of tokens of each sequence.

    Take a token whose score is higher than all others by g. A softmax over n tokens gives it the weight
    1 / (1 + n e^-g): a token that stands out among 1,000 is lost among 100,000. With the scaled scores and power 1 its
    weight is 1 / (1 + n^(1 - g / log(1000))): a token with g > 6.9 stands out at any length (arXiv:2202.12172). Higher
    powers are ours: with them a smaller g is enough.

    Args:
        scores: The scores of each sequence, in any shape.
        num_tokens: n, if there is no padding.
        present: False where a token is padding; n is then the number of other tokens.
        power: 0 leaves the scores unchanged.
        shard: This process's part of the tokens.
    """
    if not power:
        return scores
    if present is None and torch.compiler.is_exporting():  # log(num_tokens) would be a constant in the exported file
        present = scores.new_ones((scores.shape[0], num_tokens), dtype=torch.bool)
    if present is None:
        num_tokens = num_tokens if shard is None else shard.num_tokens
        return scores * (math.log(num_tokens) / math.log(_USUAL_LENGTH)) ** power
    counts = present.flatten(1).sum(1).to(torch.promote_types(scores.dtype, torch.float32))
    counts = summed(counts, shard)
    factors = (counts.clamp(min=1).log() / math.log(_USUAL_LENGTH)) ** power
    return scores * factors.to(scores.dtype).view(-1, *[1] * (scores.ndim - 1))


def refuse_wrong_power(length_scaling: float) -> None:
    """Check ``length_scaling``, the power of ``scaled_by_length``.

    Raises:
        ValueError: If it is negative or not finite.
    """
    what = f"must be 0 or a positive number, got {length_scaling}; 1 is scores times log n, 0 leaves them"
    require(math.isfinite(length_scaling) and length_scaling >= 0, "length_scaling", what)
