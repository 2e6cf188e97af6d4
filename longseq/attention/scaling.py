"""Scores of a softmax over all tokens, scaled by their number."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.attention.shard import Shard, summed

USUAL_LENGTH = 1000  # tokens of a sequence whose scores stay as they are


def scaled_by_length(
    scores: Float[Tensor, "b ..."],
    num_tokens: int,
    present: Bool[Tensor, "b ..."] | None,
    power: float = 1.0,
    shard: Shard | None = None,
) -> Float[Tensor, "b ..."]:
    """Scores times (log(n) / log(1000)) ** power, n the tokens of each sequence.

    A softmax over n tokens gives a token whose score lies g above those of all others the weight 1 / (1 + n e^-g): what
    stands out among 1,000 tokens is lost among 100,000. With these scaled scores and the power 1 it is
    1 / (1 + n^(1 - g / log(1000))): what stands out by g > 6.9 then does so at any length (arXiv:2202.12172). A higher
    power keeps what stands out by less; it is ours.

    Args:
        scores: Of each sequence, in any shape.
        num_tokens: n without padding.
        present: False where a token is padding; n is then the number of tokens that are not.
        power: 0 leaves the scores as they are.
        shard: The share of this process in the tokens.
    """
    if not power:
        return scores
    if present is None and torch.compiler.is_exporting():  # log n of a number would be a constant in the file
        present = scores.new_ones((scores.shape[0], num_tokens), dtype=torch.bool)
    if present is None:
        num_tokens = num_tokens if shard is None else shard.num_tokens
        return scores * (math.log(num_tokens) / math.log(USUAL_LENGTH)) ** power
    counts = present.flatten(1).sum(1).to(torch.promote_types(scores.dtype, torch.float32))
    counts = summed(counts, shard)
    factors = (counts.clamp(min=1).log() / math.log(USUAL_LENGTH)) ** power
    return scores * factors.to(scores.dtype).view(-1, *[1] * (scores.ndim - 1))


def refuse_wrong_power(length_scaling: float) -> None:
    """Check the power of a mechanism.

    Raises:
        ValueError: If it is negative or not finite.
    """
    if not (math.isfinite(length_scaling) and length_scaling >= 0):
        what = f"must be 0 or a positive number, got {length_scaling}; 1 is scores times log n, 0 leaves them"
        raise ArgumentError("length_scaling", what)
