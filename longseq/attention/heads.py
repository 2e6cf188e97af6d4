"""The inputs of an attention layer, and of a mechanism's formula."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor


class Heads(NamedTuple):
    """The input of a formula.

    Attributes:
        queries: Those of the first q tokens.
        keys, values: Those of n tokens, or of the k to which a projection has shortened them. The values of padding are
            zero; its keys are not.
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
    """The input of a layer.

    Attributes:
        x: The tokens, from which keys and values are computed.
        queried: The first q of them, from which queries are computed.
        present: False where a token is padding; None without padding.
        rope: Sines and cosines of the tokens' angles; None without rotary positions.
    """

    x: Float[Tensor, "b n d"]
    queried: Float[Tensor, "b q d"]
    present: Bool[Tensor, "b n 1"] | None = None
    rope: Tensor | None = None


Formula = Callable[[Heads], Tensor]  # a mechanism's formula; it returns (b, h, q, c)
