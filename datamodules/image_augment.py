"""Random changes of an image in training that keep its class. Each draws from torch's generator."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import UInt8
from torch import Tensor
from torchvision.transforms import v2

from datamodules.errors import require
from datamodules.mirroring import MOST, Mirrored, mirrored_accuracy

if TYPE_CHECKING:
    from datamodules.base import DataModule


class ImageTransform(v2.Transform, ABC):
    """A random change of an image (c, h, w) that keeps its size."""

    @abstractmethod
    def forward(self, image: UInt8[Tensor, "c h w"]) -> UInt8[Tensor, "c h w"]:
        """Change an image at random."""


class Shift(ImageTransform):
    """Move the image by up to a fraction of its height and of its width; what enters at an edge mirrors what is there.

    Args:
        fraction: The largest shift, in 0..0.5 (0 excluded).
    """

    def __init__(self, fraction: float = 0.125) -> None:
        super().__init__()
        require(0 < fraction <= 0.5, "fraction", "in 0..0.5 (0 excluded)", fraction, "0.125 is an eighth of the image")
        self.fraction = fraction

    def forward(self, image: UInt8[Tensor, "c h w"]) -> UInt8[Tensor, "c h w"]:
        for axis in (1, 2):
            image = image.index_select(axis, self._places(image.shape[axis]))
        return image

    def _places(self, side: int) -> Tensor:
        most = min(round(self.fraction * side), side - 1)
        places = (torch.arange(side) + torch.randint(-most, most + 1, ())).abs()
        return torch.where(places < side, places, 2 * side - 2 - places)


class Mirror(ImageTransform):
    """Mirror every other image from left to right, unless that changes what a class is.

    A digit, a letter or an arrow is another one in the mirror, or none; most things in photographs are not. The
    training split decides (mirroring.py): if a support vector machine recognises held-out images as they are far
    better than mirrored ones, no image is mirrored, and a line says so. Images with several labels are always mirrored,
    and those with amounts never.
    ``torchvision.transforms.v2.RandomHorizontalFlip`` mirrors without asking.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_on = True

    def look_at(self, data: "DataModule") -> str | None:
        """Decide by a training split; if images are not to be mirrored, return the line that says so."""
        train = data.train_set
        if train.labels.is_floating_point():
            self._is_on = False
            return "no image is mirrored in training, which may change its amounts; RandomHorizontalFlip does if it may"
        if train.labels.ndim != 1:
            return None

        def compute() -> dict[str, Any]:
            chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:MOST].tolist()
            images, labels = train.__getitems__(chosen)
            found = mirrored_accuracy(images, labels)
            return {} if found is None else found._asdict()

        found = data.remember("mirrored", compute)
        self._is_on = not found or not Mirrored(**found).changes_classes
        if self._is_on:
            return None
        figures = f"an SVM recognises {found['plain']:.2f} of held-out images, and {found['mirrored']:.2f} mirrored"
        return f"no image is mirrored in training, which would change classes: {figures}"

    def forward(self, image: UInt8[Tensor, "c h w"]) -> UInt8[Tensor, "c h w"]:
        return image.flip(2) if self._is_on and torch.rand(()) < 0.5 else image
