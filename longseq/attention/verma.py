"""Verma's attention (arXiv:2101.10277): two softmaxes instead of one, so that no n x k matrix of scores is made."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from timm.layers.attention import Attention
from torch import Tensor, nn

from longseq.arguments import require, require_choice
from longseq.attention.grid import TokenGrid
from longseq.attention.heads import Heads, Tokens
from longseq.attention.layer import AttentionLayer, Stack
from longseq.attention.mechanism import Mechanism
from longseq.attention.mixer import own_softmax
from longseq.attention.projection import Linear, Projection, ProjectionLayer, RaggedProjection, Shortening
from longseq.attention.scaled_product import ScaledProduct
from longseq.attention.scaling import refuse_wrong_power, scaled_by_length
from longseq.attention.shard import Shard, SplitSums, exponentials, shared_softmax, summed
from longseq.attention.sharing import Lengths, Sharing, examples_of_lengths, shared_projections
from longseq.compat.torch import at_least_float32, is_plain, is_transformed

Normalize = Literal["rows", "columns", "scaling"]


@dataclass(frozen=True)
class Verma(Mechanism):
    """H = softmax_c(Q / sqrt(c)), L = softmax_k((E K)' / sqrt(c)), Y = H (L (F V)).

    The layer multiplies in the order H ((L V) W_o). L V is c x c in each head, so (L V) W_o costs 2 (k + d) d c FLOPs,
    and its size depends on neither k nor n. The paper's O(n d^2), independent of k, counts this and the linear maps of
    width d (4 n d^2 for queries and output, 4 k d^2 for keys and values), but not E: a learned E costs another 2 n k d
    (twice that if F is another matrix). Without k there is no E, and keys and values cost 4 n d^2: the mechanism is
    then EfficientAttention with a scale of 1/sqrt(c) in both softmaxes.

    Args:
        k: Length of the shortened sequence, 1 <= k <= n: one number, a list with one number per layer, or, with sharing
            ``none``, a list of lists with one number per head of each layer. None keeps all n tokens.
        sharing: Which heads, keys and values, and layers share a matrix; it has no effect without k.
        projection: What E and F are; it has no effect without k.
        normalize: ``rows``: each softmax runs along the rows of its matrix, so every row of H L sums to one and Y is a
            weighted mean of the values. ``columns``: the normalisers are column sums, as in the paper's proof: H is a
            softmax over the n tokens and L over the c channels. Rows of H L then have no fixed sum. ``scaling``: no
            softmax at all, Q (K' V) / n, the scaling function of the paper's section 2 (scaled_product.py).
        length_scaling: The scores of L are multiplied by (log(n) / log(1000)) to this power, so that L does not become
            flatter in sequences longer than those of the training (attention/scaling.py); 0 turns it off. It has no
            effect with k, and is only possible with ``rows``, whose L is a softmax over tokens.
    """

    k: Lengths | None = None
    sharing: Sharing = "key_value"
    projection: Projection = Linear()
    normalize: Normalize = "rows"
    length_scaling: float = 0.0

    @property
    def any_length(self) -> bool:
        return self.k is None or self.projection.any_length

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [
            cls(),
            cls(length_scaling=1.5),
            *examples_of_lengths(cls),
            cls(7, normalize="columns"),
            cls(7, normalize="scaling"),
        ]

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        require_choice("normalize", self.normalize, Normalize)
        refuse_wrong_power(self.length_scaling)
        is_over_tokens = not self.length_scaling or self.normalize == "rows"
        what = f"must be 0 with normalize {self.normalize}; L is not a softmax over tokens"
        require(is_over_tokens, "length_scaling", what)
        pairs: list[Any] = [(None, None)] * len(stack)
        if self.k is not None:
            pairs = shared_projections(self.projection, self.sharing, k=self.k, grid=grid, stack=stack)
        if self.normalize == "rows":
            power = self.length_scaling if self.k is None else 0.0
            return [VermaLayer(trained, E, F_, power) for trained, (E, F_) in zip(stack, pairs, strict=True)]
        is_scaled = self.normalize == "scaling"
        formula = ScaledProduct if is_scaled else _ByColumns
        return [
            AttentionLayer(trained, formula(self.k is None), *pair, independent_queries=is_scaled)
            for trained, pair in zip(stack, pairs, strict=True)
        ]


@dataclass(frozen=True)
class EfficientAttention(Mechanism):
    """H = softmax_c(Q), L = softmax_n(K'), Y = H (L V): Efficient Attention (arXiv:1812.01243, equations 5 and 7).

    It is Verma without E and without its scale. A layer costs 8 n d^2 FLOPs for queries, keys, values and output, and
    4 d^2 c for the heads' matrices; n meets nothing wider than d. It takes sequences of any length.

    Args:
        normalize: ``softmax``, or ``scaling``: Q (K' V) / n, the paper's other way to normalise, as in Verma without k.
            It costs 4 n d c instead of 4 d^2 c.
    """

    any_length: ClassVar[bool] = True
    normalize: Literal["softmax", "scaling"] = "softmax"

    @classmethod
    def examples(cls) -> "Sequence[Mechanism]":
        return [cls(), cls("scaling")]

    def layers(self, stack: Stack, grid: TokenGrid) -> list[AttentionLayer]:
        require_choice("normalize", self.normalize, Literal["softmax", "scaling"])
        if self.normalize == "scaling":
            return Verma(normalize="scaling").layers(stack, grid)
        return [VermaLayer(trained, None, None, scale=1.0) for trained in stack]


class VermaLayer(AttentionLayer):
    """Verma with normalised rows, in an order that needs only two matrix products over n tokens after the softmaxes.

    Y W_o = H (L (X W_v)) W_o is computed as H (((L X) W_v) W_o). Without E, values are never computed. The n rows of H
    are multiplied by one (d, d) matrix, which contains the heads' contexts L V and the output's weights. If a norm or a
    gate comes before the output, or the linear layers are wrapped, the base class calls them in the paper's order.

    Args:
        trained, project_keys, project_values: As AttentionLayer takes them.
        length_scaling: The power of ``scaled_by_length`` for the scores of L; 0 with projections.
        scale: Factor of queries and keys; None for 1/sqrt(c).
    """

    def __init__(
        self,
        trained: Attention | AttentionLayer,
        project_keys: ProjectionLayer | RaggedProjection | None,
        project_values: ProjectionLayer | RaggedProjection | None,
        length_scaling: float = 0.0,
        scale: float | None = None,
    ) -> None:
        formula = _verma_formula
        if length_scaling or scale is not None:
            formula = partial(_verma_formula, length_scaling=length_scaling, scale=scale)
        super().__init__(trained, formula, project_keys, project_values, independent_queries=True)
        self.length_scaling = length_scaling
        self.scale = (self.attn_dim // self.num_heads) ** -0.5 if scale is None else scale

    @property
    def can_be_sharded(self) -> bool:
        return super().can_be_sharded if self.project_keys is not None else self._is_folded

    @property
    def _is_folded(self) -> bool:
        is_plain_inside = is_plain(self.qkv, nn.Linear) and is_plain(self.proj, nn.Linear)
        return is_plain_inside and is_plain(self.norm, nn.Identity) and self.gate is None

    def attend(self, tokens: Tokens) -> Float[Tensor, "b q d"]:
        if tokens.rope is not None or not self._is_folded:
            return super().attend(tokens)
        H = own_softmax(self._scores(tokens.queried, slice(0, self.attn_dim), self.q_norm), dim=-1).flatten(2)
        context = self._context_of_all(tokens) if self.project_keys is None else self._context_of_few(tokens)
        folded = (context @ self.proj.weight.mT.unflatten(0, (self.num_heads, -1))).flatten(1, 2)
        out = torch.bmm(H, folded) if self.proj.bias is None else torch.baddbmm(self.proj.bias, H, folded)
        return self.proj_drop(out)

    def _scores(self, tokens: Float[Tensor, "b n d"], rows: slice, norm: nn.Module) -> Float[Tensor, "b n h c"]:
        """Queries or keys of tokens, scaled. Without a norm the d x d weights are scaled, not the n x d scores."""
        heads = (self.num_heads, -1)
        if is_plain(norm, nn.Identity):
            return self.linear(tokens, rows, self.scale).unflatten(-1, heads)
        return norm(self.linear(tokens, rows).unflatten(-1, heads)) * self.scale

    def _token_weights(self, scores: Float[Tensor, "b k hc"], filled: Bool[Tensor, "b k 1"] | None) -> Tensor:
        """L', (b, k, hc), with the memory layout of the keys, token by token: a transpose would copy it."""
        L = own_softmax(scores, 1, filled)
        return F.dropout(L, self.attn_drop.p, self.training)

    def _context_of_few(self, tokens: Tokens) -> Float[Tensor, "b h c c"]:
        """L V over shortened keys and values."""
        present = tokens.present
        project_keys, project_values = self.projections_for(tokens.x, present)
        assert project_keys is not None and project_values is not None
        keys, values = self.shortened_keys_values(tokens, project_keys, project_values)
        if isinstance(project_keys, RaggedProjection):
            heads = zip(project_keys, keys, values, strict=True)
            contexts = [self._context(E, K, V, present) for E, K, V in heads]  # type: ignore[arg-type]
            return torch.cat(contexts, dim=1)
        return self._context(project_keys, keys, values, present)

    def _context(
        self,
        project_keys: Shortening,
        keys: Float[Tensor, "b k hc"],
        values: Float[Tensor, "b k hc"],
        present: Bool[Tensor, "b n 1"] | None,
    ) -> Float[Tensor, "b h c c"]:
        """L V of some heads."""
        channels = (-1, self.attn_dim // self.num_heads)
        scores = self.k_norm(keys.unflatten(-1, channels)).flatten(2) * self.scale
        L = self._token_weights(scores, None if present is None else project_keys.filled(present))
        return L.mT.unflatten(1, channels) @ values.unflatten(-1, channels).transpose(1, 2)

    def _context_of_all(self, tokens: Tokens) -> Float[Tensor, "b h c c"]:
        """L V over all n tokens, as (L X) W_v."""
        x, present = tokens.x, tokens.present
        d, heads = self.attn_dim, (self.num_heads, -1)
        scores = self._scores(x, slice(d, 2 * d), self.k_norm).flatten(2)
        scores = scaled_by_length(scores, x.shape[1], present, self.length_scaling, self.shard)
        weight, bias = self.qkv.weight[2 * d :].unflatten(0, heads), self.qkv.bias
        bias = None if bias is None else bias[2 * d :].unflatten(0, heads)[:, None]
        if self.shard is not None:  # processes exchange the sums of exponentials, and c numbers for each channel
            L = shared_softmax(scores, 1, present, self.shard).to(x.dtype)
            context = summed(OverTokens.apply(L, x).unflatten(1, heads) @ weight.mT, self.shard)
            return context if bias is None else context + bias
        if not (self.training and self.attn_drop.p) and not is_transformed():
            context = MeanOfTokens.apply(scores, x, present)[0].unflatten(1, heads) @ weight.mT  # type: ignore[index]
            return context if bias is None else context + bias
        L = self._token_weights(scores, present)
        low = L.to(x.dtype)
        context = (low.mT @ x if is_transformed() else OverTokens.apply(low, x)).unflatten(1, heads) @ weight.mT
        return context if bias is None else context + L.sum(1).unflatten(1, heads)[..., None] * bias


class OverTokens(torch.autograd.Function):
    """L' X, (b, n, c) and (b, n, d) to (b, c, d), with gradients in the memory layout of L and X, token by token.

    Autograd would return a transposed gradient for the transposed factor. The backward pass of L's softmax would then
    copy it, which takes a tenth of a layer's step.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(L: Tensor, x: Tensor) -> Tensor:
        return L.mT @ x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        L, x = ctx.saved_tensors
        return x @ grads[0].mT, L @ grads[0]


class MeanOfTokens(torch.autograd.Function):
    """L' X and L, where L is the softmax of scores (b, n, c) over the n tokens: weighted means of tokens X, (b, n, d).

    The backward pass of a softmax needs the sums of L times its gradient X G', over the tokens. These are the sums of
    (L' X) times G over the d channels, so no pass over the tokens is needed for them.
    """

    @staticmethod
    def forward(scores: Tensor, x: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
        L = own_softmax(scores, 1, present).to(x.dtype)
        return L.mT @ x, L

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)  # L has a gradient only in a second derivative
        ctx.dtype = inputs[0].dtype
        ctx.save_for_backward(inputs[1], *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, means, L = ctx.saved_tensors
        of_means = torch.zeros_like(means) if grads[0] is None else grads[0]
        of_L, sums = x @ of_means.mT, (at_least_float32(means) * of_means).sum(-1)
        if grads[1] is not None:
            of_L, sums = of_L + grads[1], sums + (L * grads[1]).sum(1)
        return ((of_L - sums.to(L.dtype)[:, None]) * L).to(ctx.dtype), L @ of_means, None


def _verma_formula(heads: Heads, length_scaling: float = 0.0, scale: float | None = None) -> Float[Tensor, "b h n c"]:
    """H (L V) with normalised rows. Dropout is applied to L, the weights of the tokens, as in softmax attention."""
    queries, keys, values, _, key_mask, dropout = heads
    factor = queries.shape[-1] ** -0.5 if scale is None else scale
    H = own_softmax(queries * factor, dim=-1)
    scores = scaled_by_length(keys.mT * factor, keys.shape[-2], key_mask, length_scaling)
    L = own_softmax(scores, -1, key_mask)
    return H @ (F.dropout(L, dropout) @ values)


class _ByColumns(SplitSums):
    """H (L V) with normalised columns: H over n tokens, L over c channels. L needs no mask, because the values of
    padding are zero."""

    def forward(self, heads: Heads) -> Float[Tensor, "b h n c"]:
        """Attend. In a process that has no keys of prefix tokens, the mask of the queries lacks these tokens."""
        queries, keys, values, query_mask, _, dropout = heads
        scale = queries.shape[-1] ** -0.5
        L = own_softmax(keys.mT * scale, dim=-2)
        context = summed(F.dropout(L, dropout) @ values, self.shard_of_sums)
        scores = queries * scale
        if self.shard is not None:
            return self._over_shards(scores, query_mask, self.shard) @ context
        return own_softmax(scores, -2, query_mask) @ context

    def _over_shards(self, scores: Tensor, query_mask: Tensor | None, shard: Shard) -> Tensor:
        """H of this process's tokens. A prefix token, of which each process has a copy, counts once."""
        if query_mask is not None:
            query_mask = F.pad(query_mask, (0, 0, scores.shape[2] - query_mask.shape[2], 0), value=True)
        H = exponentials(scores, 2, query_mask, shard)
        return H / summed(shard.of_keys(H.transpose(1, 2)).sum(1).unsqueeze(2), shard)
