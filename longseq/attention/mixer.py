"""The contract of a layer that mixes tokens, as attention does: what a transformer block asks of it."""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longseq.attention.grid import TokenGrid


class TokenMixer(nn.Module, ABC):
    """A layer that mixes the tokens of a sequence: (b, n, d) -> (b, n, d).

    Attention is one kind (layer.py). A convolution or a state-space model that knows nothing of queries, keys and
    values is another.
    """

    @abstractmethod
    def forward(
        self,
        x: Float[Tensor, "b n d"],
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        num_queries: int | None = None,
    ) -> Float[Tensor, "b q d"]:
        """Mix.

        Args:
            x: Tokens.
            attn_mask: (b, 1, 1, n), True where a token is there, False where it is padding; None if all are there. A
                padded token must not change the outcome for the others.
            is_causal: Only False; timm's blocks pass it.
            num_queries: q, of how many tokens, the first ones, the outcome is wanted; None for all.

        Raises:
            ValueError: If the mask is of another kind, or the tokens are not those that the layer was built for.
        """

    @torch.no_grad()
    def carry(self, trained: nn.Module, old: TokenGrid, new: TokenGrid) -> list[str]:
        """Take over the weights of a trained layer. Here every weight is copied that the trained layer has too.

        A layer with weights that depend on the grid of tokens overrides this and interpolates them.

        Args:
            trained: The layer that has the same place in the trained model, of this class or of another one.
            old: The tokens that it was built for.
            new: The tokens that this layer was built for.

        Returns:
            The names of the weights that start anew, because the trained layer has none of their name.

        Raises:
            ValueError: If a weight of the same name has another shape; the message begins with the name.
        """
        return copy_weights(self, trained, set())

    def no_weight_decay(self) -> set[str]:
        """The names of weights that no optimizer should decay, besides norms and biases."""
        return set()


@torch.no_grad()
def copy_weights(layer: nn.Module, trained: nn.Module, left_out: set[str]) -> list[str]:
    """Copy the weights of a trained layer into a new one.

    Args:
        layer: The new one.
        trained: The trained one.
        left_out: Names of parts of the layer whose weights are not to be copied.

    Returns:
        The names of the weights of the new layer that the trained one has not.

    Raises:
        ValueError: If a weight of the same name has another shape; the message begins with the name.
    """
    theirs, fresh = trained.state_dict(), []
    for name, weight in layer.state_dict(keep_vars=True).items():
        if name.partition(".")[0] in left_out:
            continue
        if name not in theirs:
            fresh.append(name)
        elif theirs[name].shape != weight.shape:
            was, now = tuple(theirs[name].shape), tuple(weight.shape)
            raise ValueError(f"{name} must have one shape, got {was} in the trained model and {now} in the new one")
        else:
            weight.copy_(theirs[name])
    return fresh
