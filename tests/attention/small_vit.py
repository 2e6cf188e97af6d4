"""Vision transformers of timm that are small enough to test on, with the attention of every mechanism."""

import torch

from longseq.attention import LSTM, Linear, Verma
from longseq.attention.examples import every_mechanism
from longseq.contract.mechanism import gradients, images, is_attention, model, vit

__all__ = ["ATTENTION", "COMPILED", "MECHANISMS", "gradients", "images", "model", "vit"]
MECHANISMS = every_mechanism()


# Those with queries, keys and values, of which the contract asks more.
ATTENTION = [mechanism for mechanism in MECHANISMS if is_attention(mechanism)]


def kind_of_layer(mechanism):
    """The layer's class, its formula and the classes of its parts: together they decide which code runs."""
    layer = model(mechanism).blocks[0].attn
    formula = getattr(layer, "formula", None)
    formula = type(formula) if isinstance(formula, torch.nn.Module) else formula
    return type(layer), formula, tuple(type(part) for part in layer.modules())


# One mechanism for every kind of layer that compiles in one graph, which nn.LSTM does not. Projections are called alike
# in Linformer and in Verma.
COMPILED = [mechanism for mechanism in reversed(MECHANISMS) if not isinstance(mechanism, LSTM)]
COMPILED = [
    candidate for candidate in COMPILED if not isinstance(candidate, Verma) or isinstance(candidate.projection, Linear)
]
COMPILED = list({kind_of_layer(mechanism): mechanism for mechanism in COMPILED}.values())
