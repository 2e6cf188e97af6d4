"""The contract of a layer that mixes tokens, as attention does: what a transformer block needs from it."""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from longseq.arguments import ArgumentError
from longseq.attention.column_softmax import ColumnSoftmax, suits_columns
from longseq.attention.grid import TokenGrid
from longseq.attention.shard import Split


class TokenMixer(Split, ABC):
    """A layer that mixes the tokens of a sequence: (b, n, d) -> (b, n, d).

    Attention is one kind (layer.py). Another is a convolution or a state-space model, without queries, keys and values.
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
            attn_mask: (b, 1, 1, n), True at tokens and False at padding; None without padding. Padding must not change
                the result for the tokens.
            is_causal: Always False; it is an argument because timm's blocks pass it.
            num_queries: q; the layer returns the result for the first q tokens only. None for all tokens.

        Raises:
            ValueError: If the mask has another shape or type, or the number of tokens is not the one that the layer was
                built for.
        """

    @torch.no_grad()
    def carry(self, trained: nn.Module, old: TokenGrid, new: TokenGrid) -> list[str]:
        """Take over the weights of a trained layer. This method copies every weight that both layers have.

        A layer with weights that depend on the grid of tokens overrides this and resamples them.

        Args:
            trained: The layer in the same block of the trained model, of this class or of another one.
            old: The grid of tokens that the trained layer was built for.
            new: The grid of tokens that this layer was built for.

        Returns:
            The names of weights that keep their initial values, because the trained layer has no weight of that name.

        Raises:
            ValueError: If a weight of the same name has another shape; the message begins with the name.
        """
        return copy_weights(self, trained, set())

    @property
    def can_be_sharded(self) -> bool:
        """Whether the layer can mix tokens that lie on several processes, once its ``shard`` is set."""
        return False

    def at_step(self, step: int) -> None:
        """Prepare for a training step, for example by drawing random features again. It is called before each batch, on
        every process, so it may depend only on the step and on the layer's buffers.

        Args:
            step: Number of steps that the optimizer has taken.
        """

    def no_weight_decay(self) -> set[str]:
        """The names of weights without weight decay, besides norms and biases."""
        return set()

    def learning_rates(self, learning_rate: float) -> dict[str, float]:
        """The names of weights with another learning rate, and that rate, given the rate of all other weights."""
        return {}


def present_tokens(mask: Tensor, n: int) -> Bool[Tensor, "b n 1"]:
    """False where a token is padding.

    Raises:
        ValueError: If the mask is not a padding mask of n tokens.
    """
    if mask.ndim != 4 or mask.shape[1:] != (1, 1, n) or mask.dtype != torch.bool:
        what = f"must be bool and of the shape (batch, 1, 1, {n}), True at tokens and False at padding"
        remedy = "a shortened key sums over tokens, so it cannot be masked per query"
        raise ArgumentError("attn_mask", f"{what}, got {mask.dtype} and {tuple(mask.shape)}; {remedy}")
    return mask[:, 0, 0, :, None]


def blank(tokens: Tensor, present: Bool[Tensor, "b n 1"] | None) -> Tensor:
    """The tokens, with zeros at padding."""
    return tokens if present is None else tokens.masked_fill(~present, 0)


def length_with_gaps(present: Bool[Tensor, "*b n"]) -> Int64[Tensor, "*b"]:
    """The number of tokens up to the last one that is present, with the gaps between them; 0 if none is."""
    return (present * torch.arange(1, present.shape[-1] + 1, device=present.device)).amax(-1)


def masked_scores(scores: Tensor, mask: Tensor | None) -> Tensor:
    """The scores, with -inf where the mask is False, so that their softmax is zero."""
    return scores if mask is None else scores.masked_fill(~mask, -float("inf"))


def own_softmax(scores: Tensor, dim: int, mask: Tensor | None = None) -> Tensor:
    """Softmax over what the mask leaves, in the precision of the scores: autocast on a GPU would compute it in float32
    and store both copies."""
    scores = masked_scores(scores, mask)
    if suits_columns(scores, dim):
        return ColumnSoftmax.apply(scores, dim)  # type: ignore[return-value]
    return scores.softmax(dim, dtype=scores.dtype)


@torch.no_grad()
def copy_weights(layer: nn.Module, trained: nn.Module, left_out: set[str]) -> list[str]:
    """Copy the weights of a trained layer into a new one.

    Args:
        layer: The new layer.
        trained: The trained layer.
        left_out: Names of submodules or weights of the layer that are not copied.

    Returns:
        The names of the new layer's weights that the trained layer lacks.

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
