"""Which pixels or moments of an input decided for a class."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.attention.layer import AttentionLayer
from longseq.attention.sources import inputs_of, sources, spread, summary_rows
from longseq.encoders.forward_pass import encode_tokens, of_grid, pooled, shares, token_features
from longseq.encoders.patches import count_columns
from longseq.training.classifier import Classifier


class Attribution(NamedTuple):
    """What decided for a class.

    Attributes:
        gradient: Gradient times input, for each value of the normalised image or spectrogram: to first order, how much
            the class's score would fall if the value were the mean of the training set.
        rollout: The share of each token in the encoder's output, (n,), without prefix tokens; it sums to one.
        summaries: What some summary tokens of the last layer look at: rows of E, or of L for Verma without E.
    """

    gradient: Float[Tensor, "channels height width"]
    rollout: Float[Tensor, " n"]
    summaries: Float[Tensor, "rows n"]

    def by_row(self) -> Float[Tensor, " height"]:
        """The share of each row, for sound of each frame, in the gradient's absolute values."""
        size = self.gradient.abs().sum((0, 2))
        return size / size.sum().clamp(min=1e-30)


def attribute(model: Classifier, inputs: Any, labels: Sequence[int]) -> list[Attribution]:
    """What ``attributions`` yields."""
    return list(attributions(model, inputs, labels))


def attributions(model: Classifier, inputs: Any, labels: Sequence[int]) -> Iterator[Attribution]:
    """Attribute the scores of some classes to the parts of one input, a class at a time: of 100,000 tiles, the gradient
    of a class takes half a GiB.

    The rollout follows values back through the layers (Abnar and Zuidema, arXiv:2005.00928). Half of a token's output
    comes from itself, through the residual, and half from the tokens that the attention takes values from, through E
    for Linformer and H L for Verma. MLPs and local mixing count as if they moved nothing between tokens. A model
    without blocks has no summaries, and its rollout is what the pooling takes.

    Args:
        model: The classifier, in evaluation.
        inputs: A batch of one input, as its data module yields it.
        labels: The classes.

    Raises:
        ValueError: If a layer has no queries, keys and values.
    """
    encoder = model.encoder
    layers: list[Any] = [block.attn for block in encoder.trunk.blocks]  # type: ignore[union-attr]
    if not all(isinstance(layer, AttentionLayer) for layer in layers):
        raise ArgumentError("ckpt_path", f"must have attention in every block, got {encoder.attention}; give another")
    picture, rows = encoder.prepared(inputs)
    picture = picture.detach().requires_grad_()
    with inputs_of(layers) as seen, torch.enable_grad():
        tokens, present = encode_tokens(encoder.trunk, picture, rows)
        if model.pooling is None:
            outputs, wanted = model.head(pooled(encoder.trunk, tokens, present)), [picture]
        else:
            grid, there = of_grid(encoder.trunk, tokens, present)
            scores = model.head(grid)
            outputs, wanted = model.pooling(grid, scores, there), [picture, scores]
    prefix = encoder.trunk.num_prefix_tokens
    summaries = summary_rows(layers[-1], *seen[-1])[:, prefix:] if layers else picture.new_zeros(0, tokens.shape[1])
    evidence = model.task.evidence(outputs)
    for label in labels:
        gradient, *of_scores = torch.autograd.grad(evidence[0, label], wanted, retain_graph=True)
        weights = torch.zeros(tokens.shape[1], device=picture.device)
        if of_scores:
            weights[prefix:] = of_scores[0][0].abs().sum(1)
        elif encoder.trunk.global_pool == "token":
            weights[: getattr(encoder.trunk, "num_pooled", 1)] = 1
        else:
            weights[prefix:] = shares(encoder.trunk, tokens, present)[0].detach()
        rollout = _rolled_out(layers, seen, weights)[prefix:]
        gradient = gradient.mul(picture.detach())[0].nan_to_num_()  # not kept twice while the next one is computed
        explained = [Attribution(gradient, rollout / rollout.sum(), summaries)]
        del gradient
        yield explained.pop()


class TokenMaps(NamedTuple):
    """What the attention of a block looks at, on the grid of tokens of one input, without prefix tokens.

    Attributes:
        mean: The share of each token in the mean of all outputs.
        summaries: What some of its summary tokens look at: rows of E, or of L for Verma without E; none for exact
            attention.
    """

    mean: Float[Tensor, "rows columns"]
    summaries: Float[Tensor, "maps rows columns"]


def token_maps(model: Classifier, inputs: Any, most_blocks: int, most: int = 4) -> dict[int, TokenMaps]:
    """What the attention of some blocks looks at, by the number of the block; blocks without attention are left out.

    Args:
        model: The classifier, in evaluation.
        inputs: A batch of one input.
        most_blocks: The most blocks, spread evenly over all.
        most: The most summary tokens.
    """
    encoder = model.encoder
    blocks: Any = encoder.trunk.blocks
    of_all = [(number, block.attn) for number, block in enumerate(blocks) if isinstance(block.attn, AttentionLayer)]
    layers = dict(of_all[place] for place in spread(len(of_all), most_blocks))
    with inputs_of(list(layers.values())) as seen, torch.no_grad():
        picture, rows = encoder.prepared(inputs)
        token_features(encoder.trunk, picture, rows)
    prefix = encoder.trunk.num_prefix_tokens
    embed: Any = encoder.trunk.patch_embed
    columns = count_columns(embed, picture.shape[3])
    maps = {}
    for (number, layer), (x, present, rope) in zip(layers.items(), seen, strict=True):
        there = x.new_ones(x.shape[1]) if present is None else present[0, :, 0].to(x)
        of_tokens = sources(layer, x, present, there / there.sum(), rope).abs()
        of_summaries = summary_rows(layer, x, present, rope, most)
        on_grid = (weights[..., prefix:].unflatten(-1, (-1, columns)) for weights in (of_tokens, of_summaries))
        maps[number] = TokenMaps(*on_grid)
    return maps


def _rolled_out(
    layers: Sequence[AttentionLayer],
    seen: Sequence[tuple[Tensor, Tensor | None, Tensor | None]],
    weights: Float[Tensor, " n"],
) -> Float[Tensor, " n"]:
    """The tokens that a weighted sum of the last layer's outputs comes from, back through all layers."""
    for layer, (x, present, rope) in zip(reversed(layers), reversed(seen), strict=True):
        weights = weights / weights.sum().clamp(min=1e-30)
        through = sources(layer, x, present, weights, rope).abs()
        weights = (weights + through / through.sum().clamp(min=1e-30)) / 2
    return weights
