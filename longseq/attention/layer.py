"""The attention layer: queries, keys, values, heads and output, around a mechanism's formula."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from timm.layers.attention import Attention
from torch import Tensor, nn

from longseq.arguments import ArgumentError, require
from longseq.attention.few_keys import attend_to_few, suits_few_keys
from longseq.attention.grid import TokenGrid
from longseq.attention.heads import Formula, Heads, Tokens
from longseq.attention.mixer import TokenMixer, blank, copy_weights, masked_scores, present_tokens
from longseq.attention.projection import ProjectionLayer, RaggedProjection, Shortening, carry_projections
from longseq.attention.query_groups import attend_in_groups, groups_for
from longseq.attention.rotary import Rotary
from longseq.attention.shard import Split
from longseq.compat.torch import is_plain


class AttentionLayer(TokenMixer):
    """Replaces one of timm's attention layers, with its weights under the same state-dict names.

    If a projection commutes with the key and value matrices, this layer shortens X first: it computes (E X) W instead
    of E (X W). Keys and values then cost 4 k d^2 FLOPs instead of 4 n d^2. A bias b becomes (E 1) b, so the result is
    exactly the paper's. This short cut reads the weights of ``qkv`` without calling it, so it is used only if a call
    would use nothing else: a wrapped ``qkv`` (LoRA, hooks, pruning, quantisation, FSDP) is called on all n tokens. A
    norm of the keys (qk_norm) is applied to the shortened keys, because these are multiplied with the queries.

    Args:
        trained: timm's layer, or an AttentionLayer; this layer holds the same parameters, not copies.
        formula: The mechanism's formula; it may be a module with its own weights.
        project_keys: E, or None to keep all n keys.
        project_values: F, which may be the same object as E; then the tokens are shortened once for both.
        independent_queries: Whether the formula's result for a query is independent of the other queries. Only then
            the last block of an encoder with ``pool="token"`` computes the class token alone.
        rotary: Rotates queries and keys by their positions; only without projections, because a shortened key has no
            position.

    Raises:
        ValueError: If the formula does not take one argument.
    """

    def __init__(
        self,
        trained: "Attention | AttentionLayer",
        formula: Formula,
        project_keys: ProjectionLayer | RaggedProjection | None = None,
        project_values: ProjectionLayer | RaggedProjection | None = None,
        independent_queries: bool = False,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        try:
            inspect.signature(formula.forward if isinstance(formula, nn.Module) else formula).bind(None)
        except TypeError as error:
            name = getattr(formula, "__name__", type(formula).__name__)
            what = f"must take one argument, Heads (longseq/attention/heads.py), and {name} takes others"
            remedy = f"def {name}(heads): and then {', '.join(Heads._fields)} = heads"
            raise ArgumentError("formula", f"{what}; write {remedy}") from error
        self.rotary = rotary
        self.turn: Any = getattr(trained, "turn", None)  # queries and keys by a trunk's rope: _timm_rotary.py
        self.formula, self.independent_queries = formula, independent_queries
        self.num_heads = trained.num_heads
        self.attn_dim = trained.attn_dim
        self.qkv = trained.qkv
        self.q_norm, self.k_norm = trained.q_norm, trained.k_norm
        self.attn_drop = trained.attn_drop
        self.norm, self.gate = trained.norm, trained.gate
        self.proj, self.proj_drop = trained.proj, trained.proj_drop
        self.project_keys = project_keys
        self.project_values = project_values

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        num_queries: int | None = None,
        rope: Tensor | None = None,
    ) -> Float[Tensor, "b q d"]:
        """Attend, as a TokenMixer. A trunk with rotary positions passes their sines and cosines as ``rope``.

        A sequence shorter than the n tokens that the layer was built for needs a mask, which shows that its tokens are
        the first ones.

        Raises:
            ValueError: If is_causal is True, the mask is not a padding mask, or the tokens are not those that the
                layer's projection was built for.
        """
        require(not is_causal, "is_causal", "must be False: shortened keys mix the future into every token")
        present = None if attn_mask is None else present_tokens(attn_mask, x.shape[1])
        if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # once here; otherwise every product of x would cast it
        queried = x[:, :num_queries] if self.independent_queries else x
        tokens = Tokens(x, queried, present, rope)
        if self.shard is not None:
            of_keys = None if present is None else self.shard.of_keys(present)
            tokens = Tokens(self.shard.of_keys(x), queried, of_keys)
        return self.attend(tokens)[:, :num_queries]

    @property
    def can_be_sharded(self) -> bool:
        """True if all sums over tokens are those of E and F, or of a formula that is itself a Split."""
        both: Any = [self.project_keys, self.project_values]
        projections = [part for project in both if project is not None for part in project.modules()]
        projections = [part for part in projections if isinstance(part, ProjectionLayer)]
        sums = isinstance(self.formula, Split) or (bool(projections) and self.independent_queries)
        return sums and all(part.can_be_sharded for part in projections) and is_plain(self.qkv, nn.Linear)

    def attend(self, tokens: Tokens) -> Float[Tensor, "b q d"]:
        """Attend by the mechanism's formula; a subclass may multiply in another order."""
        if tokens.rope is not None and self.rotary is not None:
            raise ArgumentError("rotary", "must be false: this model turns queries and keys by their places itself")
        project_keys, project_values = self.projections_for(tokens.x, tokens.present)
        queries, keys, values = self.queries_keys_values(tokens, project_keys, project_values)
        if isinstance(project_keys, RaggedProjection):  # each head has its own k, so heads run one by one
            heads = zip(queries.split(1, dim=1), project_keys, keys, values, strict=True)
            parts = [self._by_formula(tokens, Q, E, K, V) for Q, E, K, V in heads]  # type: ignore[arg-type]
            mixed = torch.cat(parts, dim=1)
        else:
            mixed = self._by_formula(tokens, queries, project_keys, keys, values)
        mixed = self.norm(mixed.transpose(1, 2).flatten(2))
        if self.gate is not None:
            mixed = mixed * self.gate(tokens.queried).sigmoid()
        return self.proj_drop(self.proj(mixed))

    def projections_for(
        self, x: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None
    ) -> tuple[Shortening | RaggedProjection | None, Shortening | RaggedProjection | None]:
        """E and F for these tokens; the same object if they are tied."""
        if self.project_keys is None or self.project_values is None:
            return None, None
        of_keys = self.project_keys.given(x, present)
        return of_keys, of_keys if self.project_values is self.project_keys else self.project_values.given(x, present)

    def _by_formula(
        self,
        tokens: Tokens,
        queries: Float[Tensor, "b h q c"],
        project_keys: Shortening | None,
        keys: Float[Tensor, "b k hc"],
        values: Float[Tensor, "b k hc"],
    ) -> Float[Tensor, "b h q c"]:
        present, heads = tokens.present, queries.shape[1]
        key_mask = present if present is None or project_keys is None else project_keys.filled(present)
        keys_of_heads = _split(keys, heads)
        if tokens.rope is None:  # else they are normalised already
            keys_of_heads = self.k_norm(keys_of_heads)
        if self.rotary is not None:
            queries, keys_of_heads = self.rotary(queries), self.rotary(keys_of_heads)
        return self.formula(
            Heads(
                queries,
                keys_of_heads,
                _split(values, heads),
                None if present is None else present[:, None, : queries.shape[2]],
                None if key_mask is None else key_mask[:, None].mT,
                self.attn_drop.p if self.training else 0.0,
            )
        )

    def linear(self, tokens: Float[Tensor, "b n d"], rows: slice, scale: float = 1.0) -> Float[Tensor, "b n rows"]:
        """Apply some rows of the matrix of queries, keys and values to tokens, times a factor."""
        weight, bias = self.qkv.weight[rows], None if self.qkv.bias is None else self.qkv.bias[rows]
        if scale != 1.0:
            weight, bias = weight * scale, None if bias is None else bias * scale
        return F.linear(tokens, weight, bias)

    def queries_keys_values(
        self,
        tokens: Tokens,
        project_keys: Shortening | RaggedProjection | None,
        project_values: Shortening | RaggedProjection | None,
    ):
        """Queries (b, h, q, c), normalised, and keys and values (b, k, d), or lists of (b, k of the head, c) with a
        ragged projection. A subclass that computes them with other matrices overrides this, and calls ``turned``.

        With a trunk's rotary positions, keys are normalised and rotated before they are shortened, because a shortened
        key has no position: with k = n and E = I the result is the trunk's. Keys and values are then computed from all
        n tokens. The same order is used for a wrapped ``qkv``, which must be called, because its weights lack the
        wrapper.
        """
        x, queried, present, rope = tokens
        d = self.attn_dim
        if project_keys is None or project_values is None:
            if rope is None and queried.shape[1] != x.shape[1] and is_plain(self.qkv, nn.Linear):
                keys, values = self.linear(x, slice(d, 3 * d)).split(d, dim=-1)
                return self.turned(tokens, self.linear(queried, slice(0, d)), keys, values)
            return self.turned(tokens, *self.qkv(x).split(d, dim=-1))
        if rope is None and is_plain(self.qkv, nn.Linear):
            queries = self.q_norm(_split(self.linear(queried, slice(0, d)), self.num_heads))
            return queries, *self.shortened_keys_values(tokens, project_keys, project_values)
        queries, keys, values = self.turned(tokens, *self.qkv(x).split(d, dim=-1))
        return queries, project_keys(keys, present), project_values(values, present)

    def turned(
        self,
        tokens: Tokens,
        queries: Float[Tensor, "b _ d"],
        keys: Float[Tensor, "b n d"],
        values: Float[Tensor, "b n d"],
    ):
        """Normalise the queries, (b, h, q, c), and set the values of padding to zero. With a trunk's rotary positions,
        rotate queries and keys by their positions too, and normalise the keys, (b, n, d), before.

        Args:
            tokens: The tokens.
            queries: Those of the first q tokens, or of all; with rotary positions those of all.
            keys, values: Those of all tokens.
        """
        if tokens.rope is None:
            queries = self.q_norm(_split(queries[:, : tokens.queried.shape[1]], self.num_heads))
        else:
            queries = self.turn(self.q_norm(_split(queries, self.num_heads)), tokens.rope)
            queries = queries[:, :, : tokens.queried.shape[1]]
            keys = self.turn(self.k_norm(_split(keys, self.num_heads)), tokens.rope).transpose(1, 2).flatten(2)
        return queries, keys, blank(values, tokens.present)

    def shortened_keys_values(
        self,
        tokens: Tokens,
        project_keys: Shortening | RaggedProjection,
        project_values: Shortening | RaggedProjection,
    ):
        """Keys and values (b, k, d), or lists of (b, k of the head, c) with a ragged projection."""
        d = self.attn_dim
        if project_keys is project_values and project_keys.commutes:
            return self._shortened(tokens, project_keys, slice(d, 3 * d)).split(d, dim=-1)
        keys = self._shortened(tokens, project_keys, slice(d, 2 * d))
        return keys, self._shortened(tokens, project_values, slice(2 * d, 3 * d))

    def _shortened(self, tokens: Tokens, project: Shortening | RaggedProjection, rows: slice):
        """The product of tokens with some rows of the matrix of queries, keys and values, shortened."""
        x, present = tokens.x, tokens.present
        if not project.commutes:
            return project(self.linear(x, rows), present)
        weight, bias = self.qkv.weight[rows], self.qkv.bias
        if bias is not None and self.shard is not None:  # one sum over processes for X and for the ones of the bias
            short = project(torch.cat([x, x.new_ones(*x.shape[:2], 1)], dim=-1), present)
            return F.linear(short[..., :-1], weight) + short[..., -1:] * bias[rows]
        short = F.linear(project(x, present), weight)
        if bias is None:
            return short
        ones = x.new_ones(1 if present is None else len(x), x.shape[1], 1)
        return short + project(ones, present) * bias[rows]

    @torch.no_grad()
    def carry(self, trained: nn.Module, old: TokenGrid, new: TokenGrid) -> list[str]:
        """Copy all weights except those of projections, which are resampled along the grid of tokens."""
        projections = ("project_keys", "project_values")
        fresh = copy_weights(self, trained, set(projections))
        for name in projections:
            ours, theirs = getattr(self, name), getattr(trained, name, None)
            fresh += [".".join(filter(None, (name, part))) for part in carry_projections(ours, theirs, old, new)]
        return fresh


# The attention layers of a model, in the order of its blocks: timm's own, or those of an earlier mechanism.
Stack = Sequence[Attention | AttentionLayer]


def softmax_formula(heads: Heads) -> Float[Tensor, "b h q c"]:
    """softmax(Q K' / sqrt(c)) V, in the fastest way that torch offers."""
    queries, keys, values, _, key_mask, dropout = heads
    if queries.device.type == "cpu" and queries.dtype == torch.bfloat16 and _is_small(queries, keys):
        # torch's fused kernel is slow in bfloat16 on a CPU, above all backward (docs/performance.md)
        with torch.autocast("cpu", enabled=False):
            scaled = (keys * queries.shape[-1] ** -0.5).to(queries.dtype)
            scores = queries @ scaled.mT
            weights = masked_scores(scores, key_mask).softmax(dim=-1)
            return F.dropout(weights, dropout) @ values.to(queries.dtype)
    if suits_few_keys(heads):
        return attend_to_few(heads)
    return attend_in_groups(heads, groups_for(queries, keys))


def _is_small(queries: Float[Tensor, "b h n c"], keys: Float[Tensor, "b h k c"]) -> bool:
    """Whether the n x k scores may be stored: those of a shortened sequence, or at most 32 MiB."""
    n, k = queries.shape[-2], keys.shape[-2]
    return 8 * k <= n or queries[..., 0].numel() * k <= 1 << 24


def _split(tokens: Float[Tensor, "b n d"], heads: int) -> Float[Tensor, "b h n c"]:
    return tokens.unflatten(-1, (heads, -1)).transpose(1, 2)
