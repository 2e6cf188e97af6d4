"""The attention layer: queries, keys, values, heads and output, round the formula that mixes them."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from jaxtyping import Bool, Float
from timm.layers.attention import Attention
from torch import Tensor, nn

from longseq.attention.projection import ProjectionLayer

# A mechanism's formula, once the heads are split: queries (b, h, n, c), keys and values (b, h, k, c), a mask
# (b, 1, 1, k) or None, and the dropout rate of the weights, to (b, h, n, c).
Mix = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


class AttentionLayer(nn.Module):
    """Takes the place of one of timm's attention layers, with its weights under the same state-dict names.

    Where a projection commutes with the key and value matrices, X is shortened first, (E X) W for E (X W), so that
    keys and values cost 2 k d^2 and not 2 n d^2; a bias b becomes (E 1) b, and the result is the paper's exactly.

    Args:
        trained: timm's layer; its parameters are taken over, not copied.
        mix: The mechanism's formula.
        project_keys: E, or None to keep all n keys.
        project_values: F, which may be the same object as E; then the tokens are shortened once for both.
    """

    def __init__(
        self,
        trained: "Attention | AttentionLayer",
        mix: Mix,
        project_keys: ProjectionLayer | None = None,
        project_values: ProjectionLayer | None = None,
    ) -> None:
        super().__init__()
        self.mix = mix
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
        attn_mask: Bool[Tensor, "b 1 1 n"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b n d"]:
        """Attend.

        Args:
            x: Tokens.
            attn_mask: True where a key is a token, False where it is padding.
            is_causal: Only False; timm's blocks pass it.
        """
        if is_causal:
            raise ValueError("is_causal must be False: shortened keys mix the future into every token")
        present = None if attn_mask is None else attn_mask[:, 0, 0, :, None]
        queries, keys, values = self._queries_keys_values(x, present)
        mixed = self.mix(
            self.q_norm(self._split(queries)),
            self.k_norm(self._split(keys)),
            self._split(values),
            attn_mask if self.project_keys is None else None,
            self.attn_drop.p if self.training else 0.0,
        )
        mixed = self.norm(mixed.transpose(1, 2).flatten(2))
        if self.gate is not None:
            mixed = mixed * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(mixed))

    def _split(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b h n c"]:
        return tokens.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _queries_keys_values(
        self, x: Float[Tensor, "b n d"], present: Bool[Tensor, "b n 1"] | None
    ) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b k d"], Float[Tensor, "b k d"]]:
        weights, bias = self.qkv.weight, self.qkv.bias
        d = self.attn_dim

        def linear(tokens: Tensor, rows: slice) -> Tensor:
            return F.linear(tokens, weights[rows], None if bias is None else bias[rows])

        def shorten(project: ProjectionLayer, rows: slice) -> Tensor:
            if not project.commutes:
                tokens = linear(x, rows)
                return project(tokens if present is None else tokens * present)
            short = F.linear(project(x if present is None else x * present), weights[rows])
            if bias is None:
                return short
            ones = x.new_ones(1, x.shape[1], 1) if present is None else present.to(x.dtype)
            return short + project(ones) * bias[rows]

        if self.project_keys is None or self.project_values is None:
            queries, keys, values = self.qkv(x).split(d, dim=-1)
            return queries, keys, values if present is None else values * present
        queries = linear(x, slice(0, d))
        if self.project_keys is self.project_values and self.project_keys.commutes:
            keys, values = shorten(self.project_keys, slice(d, 3 * d)).split(d, dim=-1)
            return queries, keys, values
        return queries, shorten(self.project_keys, slice(d, 2 * d)), shorten(self.project_values, slice(2 * d, 3 * d))


# The attention layers of a model, in the order of its blocks: timm's own, or those of an earlier mechanism.
Stack = Sequence[Attention | AttentionLayer]


def softmax_mix(
    queries: Float[Tensor, "b h n c"],
    keys: Float[Tensor, "b h k c"],
    values: Float[Tensor, "b h k c"],
    mask: Bool[Tensor, "b 1 1 k"] | None,
    dropout: float,
) -> Float[Tensor, "b h n c"]:
    """softmax(Q K' / sqrt(c)) V, by the fastest kernel that torch has for it."""
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout)
