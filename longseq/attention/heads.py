"""What an attention layer works on: the tokens, and the heads that it makes of them for a mechanism's formula."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor


class Heads(NamedTuple):
    """What a formula gets.

    Attributes:
        queries: Of the first q tokens.
        keys, values: Of n tokens, or of the k to which a projection has shortened them. The values of absent tokens are
            zero; their keys are not.
        query_mask, key_mask: False at padding; None without padding.
        dropout: The dropout rate of the weights; 0 in evaluation.
    """

    queries: Float[Tensor, "b h q c"]
    keys: Float[Tensor, "b h k c"]
    values: Float[Tensor, "b h k c"]
    query_mask: Bool[Tensor, "b 1 q 1"] | None = None
    key_mask: Bool[Tensor, "b 1 1 k"] | None = None
    dropout: float = 0.0


class Tokens(NamedTuple):
    """What a layer attends with.

    Attributes:
        x: The tokens that give keys and values.
        queried: The first q of them, which give the queries.
        present: False where a token is padding; None without padding.
        rope: Sines and cosines of the tokens' angles; None without rotary positions.
    """

    x: Float[Tensor, "b n d"]
    queried: Float[Tensor, "b q d"]
    present: Bool[Tensor, "b n 1"] | None = None
    rope: Tensor | None = None


Formula = Callable[[Heads], Tensor]  # a mechanism's: it returns (b, h, q, c)
