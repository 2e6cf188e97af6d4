"""What is about to be trained, in a few lines."""

from typing import Any
from weakref import WeakKeyDictionary

import pytorch_lightning as pl
from matplotlib.ticker import EngFormatter
from torch import nn

from longseq.attention.projection import ProjectionLayer
from longseq.training.classifier import Classifier
from longseq.training.flops import Flops, flops_per_sample

_short = EngFormatter(places=1)  # 41.3 M
_known: WeakKeyDictionary[Classifier, tuple[Any, Flops]] = WeakKeyDictionary()  # FLOPs, and what they belong to


class SequenceSummary(pl.Callback):
    """Print encoder, tokens, attention, parameters and FLOPs when a training starts."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        if trainer.is_global_zero:
            print(summary(pl_module))


def summary(model: Classifier) -> str:
    """Describe a classifier in lines of a name and a value; FLOPs are those of flops.py."""
    encoder, trunk = model.encoder, model.encoder.trunk
    rows, columns = trunk.patch_embed.grid_size
    prefix = f" and {trunk.num_prefix_tokens} in front" if trunk.num_prefix_tokens else ""
    projections = [layer for layer in model.modules() if isinstance(layer, ProjectionLayer)]  # shared ones once
    if model.before_sharding is not None:
        return model.before_sharding[1]
    flops = _flops_of(model)
    lines = {
        "encoder": f"{type(encoder).__name__}: {encoder.depth} blocks, {encoder.heads} heads, {encoder.dim} wide",
        "tokens": f"{encoder.num_tokens} a sample, in a grid of {rows} x {columns}{prefix}",
        "attention": repr(encoder.attention) if encoder.depth else "none, because the depth is 0",
        "parameters": f"{_short(_size(model))}, {_short(sum(map(_size, projections)))} of them in projections",
        "cost": f"{_short(flops.forward)}FLOPs a sample forward, {_short(flops.training)}FLOPs in training",
    }
    return "\n".join(f"{name:<11} {value}" for name, value in lines.items())


def _flops_of(model: Classifier) -> Flops:
    """FLOPs per sample. A training asks up to three times, so they are counted again only if inputs, weights, the set
    of trained weights or the teacher have changed."""
    weights = [(name, weight.shape, weight.requires_grad) for name, weight in model.named_parameters()]
    state = (model.encoder.picture_shape, weights, model.teaching is None)
    if model not in _known or _known[model][0] != state:
        _known[model] = state, flops_per_sample(model)
    return _known[model][1]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
