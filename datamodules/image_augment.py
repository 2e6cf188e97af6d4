"""Random changes of an image in training that do not change its class."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float64, Int64, UInt8
from torch import Tensor

from datamodules.batch_augment import BatchTransform, Flip
from datamodules.errors import require
from datamodules.mirroring import MOST, Mirrored, mirrored_accuracy

if TYPE_CHECKING:
    from datamodules.base import DataModule


class Shift(BatchTransform):
    """Shift the image by up to a fraction of its height and of its width. The border is filled by reflection.

    Args:
        fraction: The largest shift, in 0..0.5 (0 excluded).
    """

    num_draws = 2

    def __init__(self, fraction: float = 0.125) -> None:
        super().__init__()
        require(0 < fraction <= 0.5, "fraction", "in 0..0.5 (0 excluded)", fraction, "0.125 is an eighth of the image")
        self.fraction = fraction

    def change(self, images: UInt8[Tensor, "b c h w"], draws: Float64[Tensor, "b m"]) -> UInt8[Tensor, "b c h w"]:
        (height, width), (of_rows, of_columns) = images.shape[-2:], draws.unbind(1)
        rows, columns = self._places(height, of_rows), self._places(width, of_columns)
        places = (rows[:, :, None] * width + columns[:, None, :]).flatten(1)
        return images.flatten(2).gather(2, places[:, None].expand(-1, images.shape[1], -1)).view_as(images)

    def _places(self, side: int, draws: Float64[Tensor, " b"]) -> Int64[Tensor, "b {side}"]:
        """Where the pixels of a row or column come from."""
        most = min(round(self.fraction * side), side - 1)
        shifts = (draws * (2 * most + 1)).long() - most
        places = (torch.arange(side, device=draws.device) + shifts[:, None]).abs()
        return torch.where(places < side, places, 2 * side - 2 - places)


class Mirror(Flip):
    """Mirror half of the images from left to right, unless that changes their classes.

    Mirroring changes a digit, a letter or an arrow, but not most things in photographs. The training split decides
    (mirroring.py): if a support vector machine recognises held-out images much better than their mirror images, no
    image is mirrored, and the user is told. Images with several labels are always mirrored, and images with amounts
    never. ``torchvision.transforms.v2.RandomHorizontalFlip`` mirrors in any case.
    """

    def __init__(self) -> None:
        super().__init__(-1, 0.5)
        self._is_on = True

    def look_at(self, data: "DataModule") -> str | None:
        """Decide by the training split. Return a line for the user if images are not mirrored."""
        train = data.train_set
        if train.labels.is_floating_point():
            self._is_on = False
            return "no image is mirrored in training, which may change its amounts; RandomHorizontalFlip does if it may"
        if train.labels.ndim != 1:
            return None

        def compute() -> dict[str, Any]:
            chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:MOST].tolist()
            images, labels = train.__getitems__(chosen)
            accuracy = mirrored_accuracy(images, labels)
            return {} if accuracy is None else accuracy._asdict()

        accuracy = data.remember("mirrored", compute)
        self._is_on = not accuracy or not Mirrored(**accuracy).changes_classes
        if self._is_on:
            return None
        plain, mirrored = accuracy["plain"], accuracy["mirrored"]
        figures = f"an SVM recognises {plain:.2f} of held-out images, and {mirrored:.2f} mirrored"
        return f"no image is mirrored in training, which would change classes: {figures}"

    def change(self, images: UInt8[Tensor, "b c h w"], draws: Float64[Tensor, "b m"]) -> UInt8[Tensor, "b c h w"]:
        return super().change(images, draws) if self._is_on else images
