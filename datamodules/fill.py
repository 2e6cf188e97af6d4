"""The pixels that transforms of torchvision put where a moved image has none: its edge, or a colour, but not black."""

from collections.abc import Callable, Sequence
from typing import Any

from torchvision.transforms import v2

from datamodules.batch_augment import Affine, in_batches
from datamodules.compat import with_arguments


def filled(transform: Any, colour: Callable[[], Sequence[float]]) -> Any:
    """The transform with a fill, if its user has given none.

    RandomCrop, Pad, RandomRotation and RandomAffine repeat the edge. The last two do so with the nearest pixels,
    around the middle and without shear. All others get the colour, also those in Compose, RandomApply, RandomChoice
    and RandomOrder. A fill of 0 counts as none, because it is torchvision's default; [0] is black.

    Args:
        transform: Any transform of single images. It is not changed itself.
        colour: Returns a number for each channel; called only if a transform needs it.
    """
    if isinstance(of_batch := in_batches(transform), Affine):
        return of_batch
    if not isinstance(transform, v2.Transform):
        return transform
    parts: Any = getattr(transform, "transforms", None)
    if isinstance(parts, Sequence):
        return with_arguments(transform, transforms=[filled(part, colour) for part in parts])
    if isinstance(transform, v2.RandomErasing) and transform.value == [0.0]:
        return with_arguments(transform, value=[float(value) for value in colour()])
    if not hasattr(transform, "fill") or not _is_none(transform.fill):
        return transform
    if hasattr(transform, "padding_mode"):
        return with_arguments(transform, padding_mode="edge") if transform.padding_mode == "constant" else transform
    return with_arguments(transform, fill=list(colour()))


def _is_none(fill: Any) -> bool:
    return fill is None or (isinstance(fill, int | float) and fill == 0)
