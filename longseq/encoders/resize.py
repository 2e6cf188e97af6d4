"""Carry a trained model to larger images, longer clips, or another hop."""

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from longseq.arguments import arguments_of
from longseq.attention import carry
from longseq.encoders.encoder import Encoder

Model = TypeVar("Model", bound=nn.Module)


def resize(model: Model, shape: Sequence[int] | None = None, **changes: Any) -> Model:
    """A copy of a trained encoder or classifier that takes inputs of another size, weights carried along.

    Position embeddings are resampled (timm's resample_abs_pos_embed), E and F interpolated along the grid of tokens,
    in two dimensions for images and in one for time, each row's sum kept, and convolutions stretched with their
    windows. All else is copied, the mean and deviation of the training set included.

    Args:
        model: An Encoder, or a module with one as its ``encoder``, such as a Classifier.
        shape: Channels, height and width of the images to come; the same as a change of ``shape``.
        changes: Other arguments of the encoder's constructor, such as seconds=2.0 or hop_ms=5.0.

    Raises:
        ValueError: If the encoder has no such argument, or a weight does not fit that is not the token grid's.

    Example:
        >>> resize(classifier, (1, 16, 16))
        >>> resize(encoder, seconds=2.0)
    """
    if shape is not None:
        changes["shape"] = shape
    if not isinstance(model, Encoder):
        encoder = getattr(model, "encoder", None)
        if not isinstance(encoder, Encoder):
            raise ValueError(f"model must be an encoder or have one, got {type(model).__name__}; see longseq.encoders")
        new = _rebuilt(model, encoder=resize(encoder, **changes))
        own = {name: weight for name, weight in model.state_dict().items() if not name.startswith("encoder.")}
        new.load_state_dict(own, strict=False)
        return new.train(model.training)
    new = _rebuilt(model, **changes).to(next(model.parameters()))
    carry(model.trunk, new.trunk)
    new.mean.copy_(model.mean)
    new.std.copy_(model.std)
    return new.train(model.training)


def _rebuilt(model: Any, **changes: Any) -> Any:
    """Another object of the same class and arguments, which its attributes of the same names hold, but for changes."""
    arguments = arguments_of(model)
    unknown = set(changes) - set(arguments)
    if unknown:
        raise ValueError(f"{min(unknown)} must be an argument of {type(model).__name__}; {', '.join(arguments)} are")
    return type(model)(**arguments | changes)
