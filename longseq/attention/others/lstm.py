"""The bidirectional LSTM (Hochreiter and Schmidhuber 1997), the recurrent baseline, by torch's nn.LSTM."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longseq.attention.grid import TokenGrid
from longseq.attention.layer import Stack
from longseq.attention.mechanism import Mechanism
from longseq.attention.others.sequence import SequenceLayer, backwards
from longseq.compat.torch import without_autocast


@dataclass(frozen=True)
class LSTM(Mechanism):
    """Y = [H_f, H_b] W, where H_f and H_b (n, d / 2) are the states of two LSTMs, from the first and the last token on.

    A layer costs 14 n d^2 FLOPs: 12 n d^2 for the gates of both directions, 2 n d^2 for W. Its n steps run one after
    the other, so its time grows with n even on a device that could compute them in parallel. The backward LSTM begins
    at the last token before the padding. torch.compile leaves nn.LSTM out of its graph.
    """

    any_length: ClassVar[bool] = True

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls()]

    def layers(self, stack: Stack, grid: TokenGrid) -> "list[LSTMLayer]":
        return [LSTMLayer(trained.qkv.in_features, trained.proj_drop) for trained in stack]


class LSTMLayer(SequenceLayer):
    """A layer of LSTM; with an odd d each direction has (d + 1) / 2 states."""

    def __init__(self, dim: int, proj_drop: nn.Module) -> None:
        super().__init__(dim, proj_drop)
        states = -(-dim // 2)
        self.from_first = nn.LSTM(dim, states, batch_first=True)
        self.from_last = nn.LSTM(dim, states, batch_first=True)
        self.output = nn.Linear(2 * states, dim)

    def mix(
        self, x: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None, num_queries: int | None
    ) -> Float[Tensor, "b q d"]:
        before = _states(self.from_first, x)
        after = backwards(_states(self.from_last, backwards(x, present)), present)
        return self.output(torch.cat([before, after], dim=-1)[:, :num_queries])


def _states(lstm: Any, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n s"]:
    if x.device.type == "cpu" and (x.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cpu")):
        # torch raises an error on the many processors that have no LSTM in bfloat16
        state = torch.zeros(1, len(x), lstm.hidden_size, dtype=torch.float32)
        weights = [weight.float() for weight in lstm.all_weights[0]]
        with without_autocast(x):
            return torch.lstm(x.float(), (state, state), weights, True, 1, 0.0, lstm.training, False, True)[0].to(x)
    if not x.is_meta:
        return lstm(x)[0]
    # FLOPs are counted on the meta device, where nn.LSTM would take n steps; these products have the same FLOPs
    states = F.linear(x, lstm.weight_ih_l0, lstm.bias_ih_l0)[..., : lstm.hidden_size]
    return F.linear(states, lstm.weight_hh_l0, lstm.bias_hh_l0)[..., : lstm.hidden_size]
