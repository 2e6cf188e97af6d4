"""Initialise learned projections from data: the directions, over tokens, in which a layer's inputs vary most."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from longseq.arguments import require
from longseq.attention.layer import AttentionLayer
from longseq.attention.mixer import blank
from longseq.attention.projection import LinearProjection, RaggedProjection
from longseq.attention.sources import inputs_of


@torch.no_grad()
def start_from_inputs(model: nn.Module, forward: Callable[[], object]) -> None:
    """Set each learned E and F to the k leading left singular vectors, over tokens, of its layers' inputs.

    The inputs X (b, n, d) of a layer, or of all layers that share the matrix, are concatenated to one matrix (n, b d).
    Its left singular vectors are patterns over tokens. So the rows of E become orthonormal, with the length that random
    rows have on average. The model runs with its current weights: later layers get the outputs of layers with random E.

    Args:
        model: Holds AttentionLayers.
        forward: Runs the model once on a batch. Columns of E for tokens that the batch does not have become zero.

    Raises:
        ValueError: If the inputs of the batch have fewer than k directions.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, AttentionLayer)]
    was_training = model.training
    try:
        model.eval()
        with inputs_of(layers) as seen:
            forward()
    finally:
        model.train(was_training)
    inputs: dict[LinearProjection, list[Tensor]] = {}
    for layer, (x, present, _) in zip(layers, seen, strict=True):
        for side in (layer.project_keys, layer.project_values):
            for projection in side if isinstance(side, RaggedProjection) else [side]:
                if isinstance(projection, LinearProjection):
                    inputs.setdefault(projection, []).append(blank(x, present))
    for projection, of_layers in inputs.items():
        k = projection.weight.shape[-2]
        X = torch.cat([tokens.transpose(0, 1).flatten(1).float() for tokens in of_layers], dim=1)
        n = len(X)
        vectors = torch.linalg.eigh(X @ X.T if n <= X.shape[1] else X.T @ X)[1].flip(-1)
        left = vectors if n <= X.shape[1] else torch.linalg.qr(X @ vectors)[0]
        what = f"must be in 1..{left.shape[1]} (the directions in the batch's inputs), got {k}; lower k"
        require(left.shape[1] >= k, "k", what)
        projection.weight.zero_()
        projection.weight[..., : len(X)] = left[:, :k].T
