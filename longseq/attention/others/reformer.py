"""Reformer (arXiv:2001.04451): attention among tokens that locality-sensitive hashing puts into the same buckets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from longseq.arguments import require, require_positive
from longseq.attention.grid import TokenGrid
from longseq.attention.heads import Heads, Tokens
from longseq.attention.layer import AttentionLayer, Stack
from longseq.attention.mechanism import Mechanism
from longseq.attention.mixer import copy_weights
from longseq.attention.others._redrawn import Redrawn, RedrawnLayer
from longseq.compat.torch import at_least_float32, is_plain, without_autocast

_SCORE_WITH_ITSELF = -1e5  # so low that a token attends to itself only if there is no other token


@dataclass(frozen=True)
class Reformer(Mechanism):
    """Y_t = sum_r exp(z_tr - z_t) softmax(q_t K_S(t,r)') V_S(t,r), K = Q / |Q|, z_tr the log of the softmax's sum.

    In each of r rounds, tokens are sorted by the bucket argmax([x R; -x R]) of a random R and then by place, and cut
    into chunks of m tokens; S(t, r) is the chunk of t with its neighbours (section 2, z_t is the log of the sum over
    rounds). Queries and keys are the same (the matrix of the keys is not used), and a token attends to itself only if
    there is no other. Class tokens are hashed like all others.

    A layer costs 6 n d^2 FLOPs for queries, values and output, n d r B for hashing (B buckets; if that is more than
    2 m, numbers of buckets f, f are drawn with f^2 >= B, which cost 2 n d r f), and 4 n d r m (1 + before + after)
    for scores and weights. There are 2 n / m buckets of the configured n. A sequence may have any length.

    A key that a token meets in several rounds counts in each of them; the paper subtracts the log of their number from
    its score (appendix A). transformers counts in the same way and has ``before``, ``after`` and padding masks, so the
    tests compare with its layer; reformer-pytorch attends to one chunk before a token's own, and to none after it.

    Padding changes nothing: it is sorted after all tokens, and no chunk precedes the first one (in the authors' code
    the last chunk of the previous round does). Reversible layers (section 3) are available for any mechanism: the
    encoder's argument ``reversible``.

    Args:
        rounds: r, how often the tokens are hashed.
        chunk: m.
        before: How many chunks before its own a token attends to.
        after: How many after it.
        redraw_every: Training steps from one drawing of R to the next; 0 never draws again. R follows from the layer's
            seed and the step, so a resumed training draws the same. Evaluation uses the last R.
    """

    rounds: int = 4
    chunk: int = 64
    before: int = 1
    after: int = 1
    redraw_every: int = 1

    any_length: ClassVar[bool] = True

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls(rounds=2, chunk=16), cls(rounds=1, chunk=4, after=0)]

    def layers(self, stack: Stack, grid: TokenGrid) -> "list[ReformerLayer]":
        require_positive("leave it out", rounds=self.rounds, chunk=self.chunk)
        for name, count in {"before": self.before, "after": self.after, "redraw_every": self.redraw_every}.items():
            require(count >= 0, name, f"must be 0 or more, got {count}; leave it out")
        return [ReformerLayer(trained, self, grid.num_tokens) for trained in stack]


class ReformerLayer(RedrawnLayer):
    """Attention with shared queries and keys, whose rotations are drawn again during a training.

    Args:
        trained: As AttentionLayer takes it; the rows of its keys are kept but not used.
        described: The mechanism.
        n: Tokens of the grid, which decide the number of buckets.
    """

    formula: "HashedAttention"

    def __init__(self, trained: "AttentionLayer | nn.Module", described: Reformer, n: int) -> None:
        channels = trained.attn_dim // trained.num_heads  # type: ignore[operator]
        formula = HashedAttention(trained.num_heads, channels, n, described)  # type: ignore[arg-type]
        super().__init__(trained, formula, independent_queries=True)  # type: ignore[arg-type]

    @torch.no_grad()
    def carry(self, trained: nn.Module, old: TokenGrid, new: TokenGrid) -> list[str]:
        """Copy all weights. For another number of buckets, rotations are drawn from the same seed."""
        theirs = getattr(trained, "formula", None)
        if not isinstance(theirs, HashedAttention) or theirs.rotations.shape == self.formula.rotations.shape:
            return super().carry(trained, old, new)
        self.formula.seed.copy_(theirs.seed)
        self.formula.redraw(0)
        return copy_weights(self, trained, {"formula"})

    def queries_keys_values(
        self, tokens: Tokens, project_keys: None, project_values: None
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, d = tokens.x, self.attn_dim
        if is_plain(self.qkv, nn.Linear):
            shared, values = self.linear(x, slice(0, d)), self.linear(x, slice(2 * d, 3 * d))
        else:
            shared, _, values = self.qkv(x).split(d, dim=-1)
        return self.turned(tokens, shared, shared, values)


class HashedAttention(Redrawn):
    """The formula of a Reformer, and its rotations R.

    Args:
        heads, channels: h and c.
        n: Tokens of the grid, which decide the number of buckets.
        described: The mechanism.

    Attributes:
        buckets: The number of buckets, or two factors of it.
        rotations: R of each head and round, (h, c, r, half the sum of ``buckets``).
    """

    def __init__(self, heads: int, channels: int, n: int, described: Reformer) -> None:
        super().__init__(described.redraw_every)
        self.chunk, self.before, self.after = described.chunk, described.before, described.after
        buckets = 2 * math.ceil(n / self.chunk)
        side = 2 * math.ceil(math.sqrt(buckets) / 2)
        self.buckets = (buckets,) if buckets <= 2 * self.chunk else (side, side)
        self.rotations = nn.Buffer(torch.empty(heads, channels, described.rounds, sum(self.buckets) // 2))
        self.redraw(0)

    def draw(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(self.rotations.shape, dtype=torch.float32, device="cpu", generator=generator)
        self.rotations.copy_(drawn, non_blocking=True)

    def forward(self, heads: Heads) -> Float[Tensor, "b h q c"]:
        """Attend. The queries are the first q keys, except that each may have been normalised in another way."""
        queries, keys, values, _, key_mask, dropout = heads
        num_queries, n, missing = queries.shape[2], keys.shape[2], -keys.shape[2] % self.chunk
        queries = F.pad(queries, (0, 0, 0, n + missing - num_queries))
        keys, values = F.pad(keys, (0, 0, 0, missing)), F.pad(values, (0, 0, 0, missing))
        present = keys.new_ones(1, 1, n, dtype=torch.bool) if key_mask is None else key_mask[:, 0]
        present = F.pad(present, (0, missing))[:, None]  # (b, 1, 1, n)
        buckets = self.hashed(keys).masked_fill(~present, math.prod(self.buckets))
        length = buckets.shape[-1]
        order = (buckets * length + torch.arange(length, device=buckets.device)).argsort(dim=-1)
        places = self._chunks(order.where(present.expand_as(order).gather(-1, order), -1)[..., None])
        queries, keys, values = (self._chunks(_by_round(x, order)) for x in (queries, keys, values))
        near_values = self._with_neighbours(values)
        near_keys = self._with_neighbours(F.rms_norm(keys, keys.shape[-1:], eps=1e-6) * keys.shape[-1] ** -0.5)
        near_places = self._with_neighbours(places, nothing=-1).mT
        scores = at_least_float32(queries @ near_keys.mT)
        scores = scores.masked_fill(near_places < 0, torch.finfo(scores.dtype).min)
        scores = scores.masked_fill(places == near_places, _SCORE_WITH_ITSELF)
        sums = scores.logsumexp(-1, keepdim=True)
        weights = F.dropout((scores - sums).exp().to(values.dtype), dropout)
        unsort = order.argsort(dim=-1)[..., :num_queries]
        mixed = _sorted((weights @ near_values).flatten(3, 4), unsort)
        of_rounds = _sorted(sums.flatten(3, 4), unsort).softmax(2).to(mixed.dtype)
        return (mixed * of_rounds).sum(2)

    @torch.no_grad()
    def hashed(self, x: Float[Tensor, "b h n c"]) -> Int[Tensor, "b h r n"]:
        """The bucket of each token, in each head and round."""
        with without_autocast(x):
            x = at_least_float32(x)
            turned = torch.einsum("bhnc,hcrf->bhrnf", x, self.rotations.to(x.dtype))
            parts = turned.split([number // 2 for number in self.buckets], dim=-1)
            bucket = torch.zeros_like(turned[..., 0], dtype=torch.int64)
            for part, factor in zip(parts, (1, self.buckets[0]), strict=False):
                bucket = bucket + factor * torch.cat([part, -part], dim=-1).argmax(-1)
        return bucket

    def _chunks(self, x: Shaped[Tensor, "b h r n c"]) -> Shaped[Tensor, "b h r g m c"]:
        return x.unflatten(3, (-1, self.chunk))

    def _with_neighbours(self, chunks: Shaped[Tensor, "b h r g m c"], nothing: int = 0) -> Tensor:
        """Each chunk together with those before and after it: (b, h, r, g, (before + 1 + after) m, c)."""
        padded = F.pad(chunks, (0, 0, 0, 0, self.before, self.after), value=nothing)
        count = self.before + 1 + self.after
        return torch.cat([padded.narrow(3, first, chunks.shape[3]) for first in range(count)], dim=4)


def _by_round(x: Float[Tensor, "b h n c"], order: Int[Tensor, "b h r n"]) -> Float[Tensor, "b h r n c"]:
    """The tokens in the order of each round."""
    return _sorted(x[:, :, None].expand(-1, -1, order.shape[2], -1, -1), order)


def _sorted(x: Float[Tensor, "b h r n c"], order: Int[Tensor, "b h r q"]) -> Float[Tensor, "b h r q c"]:
    return x.gather(3, order[..., None].expand(-1, -1, -1, -1, x.shape[-1]))
