"""Statistics pooling: the features of an input are a hidden layer over mean, maximum and deviation of its tokens."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longseq.compat.torch import at_least_float32, without_autocast


class StatisticsPooling(nn.Module):
    """GELU(W [mean_n x_n, max_n x_n, sqrt(var_n x_n + 1e-6)] + b) of normalised tokens x_n.

    With the norm and the head that follow it is an MLP of one hidden layer: it can compare what stands at two places,
    which no pooling of the tokens' scores can. It is a control for attention. Padding changes nothing. Statistics are
    float32 or more precise. The norm has no weights.

    Args:
        dim: d, the width of a token and of the hidden layer.
    """

    is_neutral_at_start = True  # so a trained model that pools otherwise may lack it (attention/plug.py)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(3 * dim, dim)

    def forward(self, tokens: Float[Tensor, "b n d"], present: Bool[Tensor, "b n"] | None = None) -> Tensor:
        """The pooled tokens, (b, d)."""
        x = at_least_float32(F.layer_norm(tokens, tokens.shape[-1:]))
        with without_autocast(x):
            mean, squares, count = _moments(x, present)
            highest = _without_padding(x, present, -float("inf")).amax(1)
            deviation = (squares.sum(1) / count + 1e-6).sqrt()  # of one token the root of 0 has no gradient
        return self._of(mean, highest, deviation, tokens)

    def of_tokens(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """What ``forward`` makes of each token as the only one."""
        x = at_least_float32(F.layer_norm(tokens, tokens.shape[-1:]))
        return self._of(x, x, torch.full_like(x, 1e-3), tokens)

    def shares(
        self, tokens: Float[Tensor, "b n d"], present: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n"]:
        """The mean share of each token in the three statistics: in the mean, in the number of maxima, and in the
        squares of deviations."""
        x = at_least_float32(F.layer_norm(tokens, tokens.shape[-1:]))
        _, squares, count = _moments(x, present)
        equal = _without_padding(torch.ones_like(x[..., :1]), present, 0)[..., 0] / count
        maxima = F.one_hot(_without_padding(x, present, -float("inf")).argmax(1), x.shape[1]).to(x.dtype).mean(1)
        deviations = squares.sum(2) / squares.sum((1, 2)).clamp(min=1e-30)[:, None]
        return (equal + maxima + deviations) / 3

    def _of(self, mean: Tensor, highest: Tensor, deviation: Tensor, tokens: Tensor) -> Tensor:
        return F.gelu(self.hidden(torch.cat([mean, highest, deviation], dim=-1).to(tokens.dtype)))


def _moments(x: Float[Tensor, "b n d"], present: Bool[Tensor, "b n"] | None) -> tuple[Tensor, Tensor, Tensor | int]:
    """The mean (b, d), the squares of deviations (b, n, d), which are 0 at padding, and the number of tokens (b, 1)."""
    count = x.shape[1] if present is None else present.sum(1, keepdim=True).to(x.dtype)
    mean = _without_padding(x, present, 0).sum(1) / count
    return mean, _without_padding((x - mean[:, None]).square(), present, 0), count


def _without_padding(x: Float[Tensor, "b n c"], present: Bool[Tensor, "b n"] | None, value: float) -> Tensor:
    return x if present is None else x.masked_fill(~present[..., None], value)
