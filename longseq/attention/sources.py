"""Record the inputs of a layer and of its formula, and find the tokens that its result comes from."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longseq.attention.heads import Heads, Tokens
from longseq.attention.layer import AttentionLayer
from longseq.attention.mixer import masked_scores
from longseq.attention.projection import RaggedProjection
from longseq.attention.scaling import scaled_by_length
from longseq.attention.verma import VermaLayer


@contextmanager
def inputs_of(layers: Sequence[AttentionLayer]) -> Iterator[list[tuple[Tensor, Tensor | None, Tensor | None]]]:
    """While a model runs, record of each layer: its tokens (b, n, d), which of them are present (b, n, 1), and the
    trunk's rope. The last two are None without padding, and without rotary positions."""
    seen: list[tuple[Tensor, Tensor | None, Tensor | None]] = []

    def see(_: Any, arguments: Any, keywords: Any) -> None:
        mask = keywords.get("attn_mask")
        present, rope = None if mask is None else mask[:, 0, 0, :, None], keywords.get("rope")
        seen.append((arguments[0].detach(), present, None if rope is None else rope.detach()))

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(see, with_kwargs=True))
        yield seen


@contextmanager
def watched(layer: AttentionLayer) -> Iterator[list[Heads]]:
    """Record what the formula gets while the layer runs: one entry for all heads, or one per head."""
    formula = layer.formula
    calls: list[Heads] = []

    def record(heads: Heads) -> Tensor:
        calls.append(heads)
        return formula(heads)

    own = vars(layer).get("formula")  # absent where the formula is a module
    vars(layer)["formula"] = record
    try:
        yield calls
    finally:
        vars(layer).pop("formula")
        if own is not None:
            vars(layer)["formula"] = own


def sources(
    layer: AttentionLayer,
    x: Float[Tensor, "1 n d"],
    present: Bool[Tensor, "1 n 1"] | None,
    weights: Float[Tensor, " n"],
    rope: Tensor | None = None,
) -> Float[Tensor, " n"]:
    """How much each token contributes to a weighted sum of a layer's results: w P F, the mean over the heads.

    P F maps the values of n tokens to results, Y = P F V: softmax(Q (E K)') F for Linformer, H L for Verma. The n x n
    matrix is never built: the result is linear in V, so w P F is its gradient (with ``Max`` it is linear only near V).

    Args:
        layer: The layer.
        x: The tokens that it gets, of one sequence.
        present: False where a token is padding.
        weights: w, one for each result.
        rope: As the layer takes it.
    """
    with torch.no_grad(), watched(layer) as calls:
        AttentionLayer.attend(layer, Tokens(x, x, present, rope))
    heads: list[Tensor] = []
    with torch.enable_grad():
        for call in calls:
            values = torch.zeros_like(call.values, requires_grad=True)
            result = layer.formula(call._replace(values=values, dropout=0.0))[..., 0]
            heads += list(torch.autograd.grad((result * weights).sum(), values)[0].sum(-1).unbind(1))
        _, project_values = layer.projections_for(x, present)
        if project_values is None:
            # a layer may have several keys and values for each token
            total = torch.stack(heads).mean(0)[0].unflatten(0, (-1, x.shape[1])).sum(0)
            return total if present is None else total.masked_fill(~present[0, :, 0], 0)  # values of padding are zero
        values = layer.qkv(x)[..., 2 * layer.attn_dim :].detach().requires_grad_()
        short = _unnormed(project_values)(values, present)
        parts = short if isinstance(project_values, RaggedProjection) else short.chunk(len(heads), dim=-1)
        weighted: Any = sum((part.mean(-1) * of_head).sum() for part, of_head in zip(parts, heads, strict=True))
        return torch.autograd.grad(weighted, values)[0].sum(-1)[0] / len(heads)


def summary_rows(
    layer: AttentionLayer,
    x: Float[Tensor, "1 n d"],
    present: Bool[Tensor, "1 n 1"] | None,
    rope: Tensor | None = None,
    most: int = 8,
) -> Float[Tensor, "rows n"]:
    """Which tokens the summary tokens attend to: some rows of E in its first head or, for Verma without E, of L.

    Args:
        layer, x, present, rope: As for ``sources``.
        most: The largest number of rows, at equal distances. A layer with neither E nor L has none.
    """
    project_keys, _ = layer.projections_for(x, present)
    if project_keys is None:
        if not isinstance(layer, VermaLayer):
            return x.new_zeros(0, x.shape[1])
        with torch.no_grad(), watched(layer) as calls:
            AttentionLayer.attend(layer, Tokens(x, x, present, rope))
        (call,) = calls
        scores = call.keys * layer.scale
        there = None if present is None else present[:, None]
        scores = scaled_by_length(scores, scores.shape[2], there, layer.length_scaling)
        rows = masked_scores(scores, there).softmax(2)[0].mT.flatten(0, 1)
        return rows[spread(len(rows), most)]
    with torch.enable_grad():
        keys = layer.qkv(x)[..., layer.attn_dim : 2 * layer.attn_dim].detach().requires_grad_()
        short = _unnormed(getattr(project_keys, "summaries", project_keys))(keys, present)
        parts = short if isinstance(project_keys, RaggedProjection) else short.chunk(layer.num_heads, dim=-1)
        first = parts[0][0].mean(-1)
        chosen = spread(len(first), most)
        rows = [torch.autograd.grad(first[row], keys, retain_graph=True)[0].sum(-1)[0] for row in chosen]
    return torch.stack(rows)


def _unnormed(project: Any) -> Any:
    """A projection without its norm, which changes how much each token contributes, but not which tokens do."""
    return getattr(project, "unnormed", project)


def spread(count: int, most: int) -> list[int]:
    """At most ``most`` of ``count`` places, at equal distances, beginning with the first."""
    return [number * count // min(count, most) for number in range(min(count, most))]
