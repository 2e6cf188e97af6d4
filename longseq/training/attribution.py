"""Which pixels or moments of an input decided for a class."""

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.attention.layer import AttentionLayer
from longseq.attention.watch import sources, summary_rows
from longseq.encoders.encode import encode, token_features
from longseq.training.classifier import Classifier


class Attribution(NamedTuple):
    """What decided for a class.

    Attributes:
        gradient: Gradient times input of every number of the normalised picture: how much the class's score would fall,
            to first order, if it were the mean of the training set.
        rollout: The share of every token in what the encoder puts out, (n,), without prefix tokens: it sums to one.
        summaries: What some of the last layer's summary tokens look at: rows of E, or of L for Verma without E.
    """

    gradient: Float[Tensor, "channels height width"]
    rollout: Float[Tensor, " n"]
    summaries: Float[Tensor, "rows n"]

    def by_row(self) -> Float[Tensor, " height"]:
        """The share of every row of the picture, for sound of every frame, in the size of the gradient."""
        size = self.gradient.abs().sum((0, 2))
        return size / size.sum().clamp(min=1e-30)


def attribute(model: Classifier, inputs: Any, label: int) -> Attribution:
    """Attribute a class's score for one input.

    The rollout follows values back through the layers (Abnar and Zuidema, arXiv:2005.00928): a token's result comes
    half from itself, as the residual says, and half from the tokens that the attention takes values from, through E for
    Linformer and through H L for Verma. Perceptrons and local mixing leave tokens where they are.

    Args:
        model: The classifier, in evaluation.
        inputs: A batch of one input, as its data module yields it.
        label: The class.

    Raises:
        ValueError: If a layer has no queries, keys and values.
    """
    encoder = model.encoder
    layers: list[Any] = [block.attn for block in encoder.trunk.blocks]  # type: ignore[union-attr]
    if not all(isinstance(layer, AttentionLayer) for layer in layers):
        raise ArgumentError("ckpt_path", f"must have attention in every block, got {encoder.attention}; give another")
    picture, rows = encoder.prepared(inputs)
    picture = picture.detach().requires_grad_()
    seen: list[tuple[Tensor, Tensor | None]] = []

    def see(_: Any, arguments: Any, keywords: Any) -> None:
        mask = keywords.get("attn_mask")
        seen.append((arguments[0].detach(), None if mask is None else mask[:, 0, 0, :, None]))

    with ExitStack() as hooks, torch.enable_grad():
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(see, with_kwargs=True))
        if model.pooling is None:
            logits = model.head(encode(encoder.trunk, picture, rows))
            scores = None
        else:
            tokens, present = token_features(encoder.trunk, picture, rows)
            scores = model.head(tokens)
            logits = model.pooling(tokens, scores, present)
        wanted = [picture] if scores is None else [picture, scores]
        gradient, *of_scores = torch.autograd.grad(logits[0, label], wanted)
    prefix = encoder.trunk.num_prefix_tokens
    weights = torch.zeros(seen[-1][0].shape[1], device=picture.device)
    if of_scores:
        weights[prefix:] = of_scores[0][0, :, label].abs()
    elif encoder.trunk.global_pool == "token":
        weights[0] = 1
    else:
        present = seen[-1][1]
        weights[prefix:] = 1 if present is None else present[0, prefix:, 0].float()
    for layer, (x, present) in zip(reversed(layers), reversed(seen), strict=True):
        weights = weights / weights.sum().clamp(min=1e-30)
        through = sources(layer, x, present, weights).abs()
        weights = (weights + through / through.sum().clamp(min=1e-30)) / 2
    rows_of_last = summary_rows(layers[-1], *seen[-1])[:, prefix:]
    return Attribution((gradient * picture)[0].detach(), weights[prefix:] / weights[prefix:].sum(), rows_of_last)
