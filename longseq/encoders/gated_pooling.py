"""Gated attention pooling: the features of an input are a weighted mean of its tokens', with learned weights."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longseq.attention.scaling import scaled_by_length
from longseq.attention.shard import Split, shared_softmax, summed
from longseq.compat.torch import at_least_float32, without_autocast


class GatedPooling(Split):
    """sum_n a_n h_n, where a = softmax_n(w' (tanh(V x_n) * sigmoid(U x_n))) and x_n is h_n, normalised.

    Padding changes nothing. If several processes share a sequence, sums go over all of them. Weights are float32 or
    more precise. Source: Ilse, Tomczak and Welling, Attention-based Deep Multiple Instance Learning (arXiv:1802.04712),
    equation 9. The norm, without weights, is ours: tokens that leave a deep trunk are large, and would saturate tanh.

    Args:
        dim: d, the width of a token.
    """

    length_scaling: ClassVar[float] = 0.0  # the power of scaled_by_length
    is_neutral_at_start = True  # so a trained model that pools otherwise may lack it (attention/plug.py)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(dim, 2 * dim)
        self.weight = nn.Linear(dim, 1, bias=False)

    def forward(self, tokens: Float[Tensor, "b n d"], present: Bool[Tensor, "b n"] | None = None) -> Tensor:
        """The pooled tokens, (b, d)."""
        return self.mean(F.layer_norm(tokens, tokens.shape[-1:]), tokens, present)

    def weights(
        self, tokens: Float[Tensor, "b n d"], present: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n"]:
        """a of each token, where one process has all of them."""
        return self._logits(F.layer_norm(tokens, tokens.shape[-1:]), present).softmax(1)[..., 0]

    def mean(
        self, tokens: Float[Tensor, "b n d"], values: Float[Tensor, "b n c"], present: Bool[Tensor, "b n"] | None
    ) -> Float[Tensor, "b c"]:
        """The mean of values, weighted by a of their tokens."""
        if self.shard is not None and present is None:  # so that processes count their tokens without prefix tokens
            present = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        logits, exact = self._logits(tokens, present), at_least_float32(values)
        with without_autocast(exact):
            weights = logits.softmax(1) if self.shard is None else shared_softmax(logits, 1, None, self.shard)
            return summed((weights.mT @ exact)[:, 0], self.shard).to(values.dtype)

    def _logits(self, tokens: Float[Tensor, "b n d"], present: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b n 1"]:
        values, gates = self.hidden(tokens).chunk(2, dim=-1)
        logits = at_least_float32(self.weight(values.tanh() * gates.sigmoid()))
        logits = scaled_by_length(logits, tokens.shape[1], present, self.length_scaling, self.shard)
        return logits if present is None else logits.masked_fill(~present[..., None], -float("inf"))
