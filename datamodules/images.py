"""The base of data modules for images: their layout in memory, and how any image file becomes an input."""

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import UInt8
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from datamodules.base import DataModule
from datamodules.errors import require
from datamodules.image_files import bands, opened
from datamodules.samples import LabelledTensors, Samples


def scale(images: UInt8[Tensor, "*b c h w"], height: int, width: int) -> UInt8[Tensor, "*b c {height} {width}"]:
    """Bilinear resizing that averages where it shrinks."""
    return functional.resize(images, [height, width], antialias=True)


def checked_size(size: int, original: int) -> int:
    """The height and width to which square images are resized.

    Raises:
        ArgumentError: If it is out of its range.
    """
    require(1 <= size <= 1024, "size", "in 1..1024", size, f"{original} is the original")
    return size


class ImageDataModule(DataModule):
    """Images as uint8 (channels, height, width), 0 black and 255 white; one channel is grey, three are RGB.

    Args:
        augment: Transforms of torchvision.transforms.v2 for each image in training, which keep its size.
        common: Arguments of every data module.
    """

    shape: tuple[int, int, int]
    keep_aspect = False  # whether an image of another shape is cut to that of the inputs, not stretched
    predict_suffixes: ClassVar[frozenset[str]] = frozenset(
        {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
    )

    def __init__(self, augment: Sequence[v2.Transform] = (), **common: Any) -> None:
        super().__init__(**common)
        self.augment = augment

    def read(self, path: str | os.PathLike[str]) -> UInt8[Tensor, "c h w"]:
        """One input from an image file of any size and mode that `opened` and `bands` can read.

        The image is stretched to `shape`. With keep_aspect it is scaled until it just covers `shape`, and its middle is
        cut out.

        Raises:
            DataError: If the file is absent, broken, of another format, or too large.
        """
        with opened(path, self.made_of) as image:
            height, width = self.made_of(image.height, image.width)
            # resize the rows of each band, then all columns: bit for bit the same as resizing in one call
            rows = torch.empty(image.height, width, self.shape[0], dtype=torch.uint8).permute(2, 0, 1)
            for top, band in bands(image, "L" if self.shape[0] == 1 else "RGB"):
                rows[:, top : top + band.shape[1]] = scale(band, band.shape[1], width)
            resized = scale(rows, height, width)
        return functional.center_crop(resized, list(self.shape[1:])).clone()  # a view would keep all of it in memory

    def made_of(self, height: int, width: int) -> tuple[int, int]:
        """The height and width to which an image of this size is scaled before it is cut to `shape`."""
        to_height, to_width = self.shape[1:]
        if not self.keep_aspect:
            return to_height, to_width
        scale = max(to_height / height, to_width / width)
        return max(round(height * scale), to_height), max(round(width * scale), to_width)

    def samples_of(self, inputs: Sequence[Tensor] | Tensor, *arguments: Any, **details: Any) -> Samples:
        kind = LabelledTensors if isinstance(inputs, Tensor) else Samples
        return kind(inputs, *arguments, **details)

    def figures(self, samples: Samples) -> dict[str, Any]:
        total = squares = torch.zeros(self.shape[0], dtype=torch.float64)
        for image in samples.inputs:
            values = image.double() / 255
            total, squares = total + values.mean((1, 2)), squares + values.square().mean((1, 2))
        mean = total / len(samples)
        std = (squares / len(samples) - mean.square()).clamp(min=0).sqrt()
        return {
            "shape": list(self.shape),
            "mean of each channel": [round(value, 4) for value in mean.tolist()],
            "deviation of each channel": [round(value, 4) for value in std.tolist()],
        }
