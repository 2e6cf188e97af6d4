"""See what a layer's formula gets, and which tokens its result comes from."""

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
    """Record the tokens (b, n, d) that each layer gets while a model runs, which are there, (b, n, 1), and the trunk's
    rope; None where all are there, and where there is no rope."""
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
    """Record what the formula gets while the layer runs: once for all heads, or once for each."""
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
    """From which tokens a weighted sum of a layer's results takes its values: w P F, the mean over the heads.

    P F maps the values of n tokens to results, Y = P F V: softmax(Q (E K)') F for Linformer, H L for Verma. Nothing of
    the size n x n is made: w P F is the gradient of the result by V, in which it is linear (with ``Max`` near V alone).

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
            found = torch.stack(heads).mean(0)[0].unflatten(0, (-1, x.shape[1])).sum(0)
            return found if present is None else found.masked_fill(~present[0, :, 0], 0)  # absent values are zero
        values = layer.qkv(x)[..., 2 * layer.attn_dim :].detach().requires_grad_()
        short = _unnormed(project_values)(values, present)
        parts = short if isinstance(project_values, RaggedProjection) else short.chunk(len(heads), dim=-1)
        total: Any = sum((part.mean(-1) * of_head).sum() for part, of_head in zip(parts, heads, strict=True))
        return torch.autograd.grad(total, values)[0].sum(-1)[0] / len(heads)


def summary_rows(
    layer: AttentionLayer,
    x: Float[Tensor, "1 n d"],
    present: Bool[Tensor, "1 n 1"] | None,
    rope: Tensor | None = None,
    most: int = 8,
) -> Float[Tensor, "rows n"]:
    """What some of the summary tokens look at: rows of E in its first head or, for Verma without E, rows of L.

    Args:
        layer: The layer.
        x: The tokens that it gets, of one sequence.
        present: False where a token is padding.
        rope: As the layer takes it.
        most: How many rows, spread over all; none where the layer has neither E nor L.
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
    """A projection without its norm, which changes how much the tokens give, and not which ones."""
    return getattr(project, "unnormed", project)


def spread(count: int, most: int) -> list[int]:
    """Places among so many, at most a number of them, at equal distances from the first on."""
    return [number * count // min(count, most) for number in range(min(count, most))]
