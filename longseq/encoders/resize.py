"""Resize a trained model: larger images, longer clips, or another hop."""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

from timm.layers.attention import Attention
from torch import nn

from longseq.arguments import ArgumentError, arguments_of, require
from longseq.attention import carry, plug
from longseq.attention.others.sequence import SequenceLayer
from longseq.compat.timm import Trunk
from longseq.encoders.encoder import Encoder
from longseq.encoders.trunk import picture_shape

Model = TypeVar("Model", bound=nn.Module)


def resize(model: Model, shape: Sequence[int] | None = None, **changes: Any) -> Model:
    """A copy of a trained encoder, classifier or plugged ViT, with its weights, for inputs of another size.

    Position embeddings are resampled (timm's resample_abs_pos_embed). E and F are multiplied by a damped inverse of
    the interpolation of tokens from the old grid to the new one (docs/resize.md), in two dimensions for images and in
    one for time, and each row keeps its sum. Convolution kernels are stretched with their windows. Everything else is
    copied, including the mean and deviation of the training set.

    Args:
        model: An Encoder; a module that holds one as ``encoder``, such as a Classifier; or a timm ViT to which ``plug``
            has given a mechanism.
        shape: Channels, height and width of the new images: the argument ``shape`` of the encoder.
        changes: Other arguments of the encoder's constructor, such as seconds=2.0 or hop_ms=5.0.

    Raises:
        ValueError: If the encoder has no such argument, or a weight that does not depend on the grid has another shape.

    Example:
        >>> resize(classifier, (1, 16, 16))
        >>> resize(encoder, seconds=2.0)
    """
    if isinstance(model, Trunk):
        return _resized_vit(model, shape, changes)
    if shape is not None:
        changes["shape"] = shape
    if not isinstance(model, Encoder):
        encoder = getattr(model, "encoder", None)
        if not isinstance(encoder, Encoder):
            what = f"must be an encoder or have one, got {type(model).__name__}; see longseq.encoders"
            raise ArgumentError("model", what)
        new = _rebuilt(model, encoder=resize(encoder, **changes)).to(next(model.parameters()))
        if hasattr(model, "is_started"):  # so that fit goes on from these weights
            new.is_started = model.is_started
        own = {name: weight for name, weight in model.state_dict().items() if not name.startswith("encoder.")}
        new.load_state_dict(own, strict=False)
        return new.train(model.training)
    new = _rebuilt(model, **changes).to(next(model.parameters()))
    _carry_all(model.trunk, new.trunk, changes)
    what = f"must keep mean and deviation of {tuple(model.mean.shape)}, got {tuple(new.mean.shape)}; train anew"
    require(new.mean.shape == model.mean.shape, " and ".join(changes), what)  # they differ if the mels do
    new.mean.copy_(model.mean)
    new.std.copy_(model.std)
    new._is_measured = model._is_measured
    return new.train(model.training)


def _resized_vit(vit: Trunk, shape: Sequence[int] | None, changes: dict[str, Any]) -> Any:
    mechanism: Any = getattr(vit, "mechanism", None)
    what = "must hold a mechanism, got a VisionTransformer with timm's attention; plug one first"
    require(mechanism is not None, "model", what)
    if shape is None or changes:
        what = f"must be the only change of a VisionTransformer, got {shape} and {sorted(changes)}; give it alone"
        raise ArgumentError("shape", what)
    channels, height, width = picture_shape(shape)
    known = vit.patch_embed.proj.in_channels
    require(channels == known, "shape", f"must keep {known} channels, got {channels}; give the same number")
    new = copy.deepcopy(vit)
    for block in new.blocks:
        if isinstance(block.attn, SequenceLayer):  # it has no queries, keys and values to build the new layer from
            was: Any = block.attn
            plain: Any = Attention(was.dim, was.num_heads)
            plain.attn_drop, plain.proj_drop = getattr(was, "attn_drop", plain.attn_drop), was.proj_drop
            block.attn = plain
    new.set_input_size((height, width))
    _carry_all(vit, plug(new, mechanism).to(next(vit.parameters())), {})
    return new.train(vit.training)


def _carry_all(trained: Trunk, new: Trunk, changes: dict[str, Any]) -> None:
    """Resample or copy all weights.

    Raises:
        ValueError: If a weight would keep its initial value although the caller has asked for no other attention or
            local mixing.
    """
    fresh = carry(trained, new)
    if fresh and changes.keys().isdisjoint({"attention", "local"}):
        what = f"must have weights for {fresh[0]} at the new size, got none like them"
        raise ArgumentError("model", f"{what}; merge wrapped layers, or give an attention whose Separable has its rows")


def _rebuilt(model: Any, **changes: Any) -> Any:
    """A new object of the same class, built with the arguments that the model's attributes hold, and the changes."""
    arguments = arguments_of(model)
    unknown = min(set(changes) - set(arguments), default="")
    what = f"must be an argument of {type(model).__name__}; choose one of {', '.join(arguments)}"
    require(not unknown, unknown, what)
    return type(model)(**arguments | changes)
