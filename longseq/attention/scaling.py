"""Scores of a softmax over all tokens, scaled by their number."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

USUAL_LENGTH = 1000  # tokens of a sequence whose scores stay as they are


def scaled_by_length(
    scores: Float[Tensor, "b ..."], num_tokens: int, present: Bool[Tensor, "b ..."] | None
) -> Float[Tensor, "b ..."]:
    """Scores times log(n) / log(1000), n the tokens of each sequence.

    A softmax over n tokens gives a token whose score lies g above those of all others the weight 1 / (1 + n e^-g): what
    stands out among 1,000 tokens is lost among 100,000. With these scaled scores it is 1 / (1 + n^(1 - g / log(1000))):
    what stands out then does so at any length (arXiv:2202.12172, section 5.3).

    Args:
        scores: Of each sequence, in any shape.
        num_tokens: n without padding.
        present: False where a token is padding; n is then the number of tokens that are not.
    """
    if present is None:
        return scores * (math.log(num_tokens) / math.log(USUAL_LENGTH))
    counts = present.flatten(1).sum(1).to(torch.promote_types(scores.dtype, torch.float32))
    factors = counts.clamp(min=1).log() / math.log(USUAL_LENGTH)
    return scores * factors.to(scores.dtype).view(-1, *[1] * (scores.ndim - 1))
