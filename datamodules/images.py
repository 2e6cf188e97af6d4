"""The base of data modules for images: their layout in memory, and how any image file becomes an input."""

import io
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Int64, UInt8
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from datamodules.base import DataModule
from datamodules.cache import cached
from datamodules.decoding.image_files import SUFFIXES, bands, opened
from datamodules.decoding.packed import Decoded, Packed, Source
from datamodules.embedding import Embeds
from datamodules.errors import require, require_in
from datamodules.fill import filled
from datamodules.inputs import InputSpec
from datamodules.networks import Network
from datamodules.samples import LabelledTensors, Samples

_VERSION = 1  # increased when the reading of images changes
_MOST_FOR_MEAN = 2000  # images, of which the mean that fills is computed
_LONGEST_SIDE = 64  # the largest side if `size` is not given: 4096 tokens if each pixel is a token


def scale(images: UInt8[Tensor, "*b c h w"], height: int, width: int) -> UInt8[Tensor, "*b c {height} {width}"]:
    """Bilinear resizing that averages where it shrinks."""
    return functional.resize(images, [height, width], antialias=True)


def checked_size(size: int, original: int) -> int:
    """The height and width to which square images are resized.

    Raises:
        ArgumentError: If it is out of its range.
    """
    require_in("size", size, 1, 1024, f"{original} is the original")
    return size


def sides_for(sizes: Int64[Tensor, "n 2"]) -> list[int]:
    """Height and width of the inputs, if `size` is not given, for images of these heights and widths."""
    if len(sizes.unique(dim=0)) == 1 and sizes.max() <= _LONGEST_SIDE:
        sides = sizes[0].tolist()
    else:
        sides = [min(int(sizes.amin(1).median()), _LONGEST_SIDE)] * 2
    return [(side + 4) // 8 * 8 if side > 8 else side for side in sides]


class ImageDataModule(DataModule):
    """Images as uint8 (channels, height, width), 0 black and 255 white; one channel is grey, three are RGB.

    Args:
        augment: Transforms of torchvision.transforms.v2 for each image in training, which keep its size. Those without
            a fill get the edge of the image or the mean of the training set (fill.py).
        common: Arguments of every data module.
    """

    shape: tuple[int, int, int]
    white: float | None = None  # the value of white in deep grey images; None for the default of their mode
    keep_aspect = False  # whether an image of another shape is cropped to the shape of the inputs, not stretched
    predict_suffixes: ClassVar[frozenset[str]] = SUFFIXES

    def __init__(self, augment: Sequence[v2.Transform] = (), **common: Any) -> None:
        super().__init__(**common)
        self.augment = augment

    @property
    def inputs(self) -> InputSpec:
        names = ("red", "green", "blue") if self.shape[0] == 3 else ("grey",)
        return InputSpec("images", torch.uint8, tuple(self.shape), 0, 255, channels=names)

    def training_augment(self) -> list[Any]:
        return [filled(transform, self._mean) for transform in self.augment]

    def _mean(self) -> list[int]:
        """The mean of each channel of the training set, in 0..255; of a random part of it, if it is large."""

        def compute() -> dict[str, Any]:
            generator = torch.Generator().manual_seed(0)
            chosen = torch.randperm(len(self.train_set), generator=generator)[:_MOST_FOR_MEAN].tolist()
            means = [self.train_set.sample(index).double().mean((1, 2)) for index in chosen]
            return {"mean": torch.stack(means).mean(0).round().int().tolist()}

        return self.remember("mean colour", compute)["mean"]

    def read(self, path: Source) -> UInt8[Tensor, "c h w"]:
        """One input from an image file of any size and mode that `opened` and `bands` can read.

        The image is stretched to `shape`. With keep_aspect it is scaled until it just covers `shape`, and cropped to
        its middle.

        Raises:
            DataError: If the file is missing, broken, of an unknown format, or too large.
        """
        with opened(path, self.made_of) as image:
            return self.input_of(image)

    def as_file(self, content: bytes | Image.Image) -> Source:
        """What `read` takes in place of a path: the bytes of a file, or a decoded image."""
        return Packed("inputs", content) if isinstance(content, bytes) else Decoded("inputs", content)

    def input_of(self, image: Image.Image) -> UInt8[Tensor, "c h w"]:
        """The input that `read` makes of a decoded image."""
        height, width = self.made_of(image.height, image.width)
        # resizing the rows of each band and then all columns gives the same bits as resizing in one call
        rows = torch.empty(image.height, width, self.shape[0], dtype=torch.uint8).permute(2, 0, 1)
        for top, band in bands(image, "L" if self.shape[0] == 1 else "RGB", self.white):
            rows[:, top : top + band.shape[1]] = scale(band, band.shape[1], width)
        resized = scale(rows, height, width)
        return functional.center_crop(resized, list(self.shape[1:])).clone()  # a view would keep all of it in memory

    def made_of(self, height: int, width: int) -> tuple[int, int]:
        """The height and width to which an image of this size is scaled before it is cropped to `shape`."""
        to_height, to_width = self.shape[1:]
        if not self.keep_aspect:
            return to_height, to_width
        scale = max(to_height / height, to_width / width)
        return max(round(height * scale), to_height), max(round(width * scale), to_width)

    def resized(self, values: UInt8[Tensor, "c h w"], network: Network) -> UInt8[Tensor, "c _ _"]:
        return scale(values, *network.size)

    def samples_of(self, inputs: Sequence[Tensor] | Tensor, *arguments: Any, **details: Any) -> Samples:
        kind = LabelledTensors if isinstance(inputs, Tensor) else Samples
        return kind(inputs, *arguments, **details)

    def file_of(self, samples: Samples, index: int) -> tuple[str, bytes]:
        image, file = samples.sample(index).permute(1, 2, 0).numpy(), io.BytesIO()
        Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(file, "PNG")
        return ".png", file.getvalue()

    def flags_of_shards(self, root: str) -> list[str]:
        channels, height, width = self.shape
        flags = ["ImageShards", "--data.root", root, "--data.size", f"[{height},{width}]"]
        flags += ["--data.grayscale", "true"] if channels == 1 else []
        flags += [] if self.white is None else ["--data.white", f"{self.white:.17g}"]
        return flags if self.keep_aspect else [*flags, "--data.keep_aspect", "false"]

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


class ImagesOfAnySize(Embeds, ImageDataModule):
    """Images of any size in files, which are read as inputs of one size.

    Args:
        size: Height and width of the inputs, or one number for both. If absent: the size of the images, if all have the
            same size and no side has more than 64 pixels; else a square with the median of their shorter sides, 64 at
            most. In both cases a side of more than 8 pixels is rounded to a multiple of 8, to fit patches of 8. A
            network gets the size that it was trained with.
        grayscale: Whether inputs are grey, with one channel.
        keep_aspect: Whether images are cropped to the shape of the inputs, not stretched.
        white: The value of white in grey images of 16 or more bits, such as 4095 for images of 12 bits. If absent, it
            is 65535 for integers and 1 for floats. For other images it is always 255.
        common: Arguments of Embeds and ImageDataModule.
    """

    reading: ClassVar[tuple[str, ...]] = ("shape", "keep_aspect", "white")

    def __init__(
        self,
        size: int | list[int] | None = None,
        grayscale: bool = False,
        keep_aspect: bool = True,
        white: float | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        is_value = white is None or 0 < white < math.inf
        require(is_value, "white", "a positive number", white, "4095 is that of 12 bits")
        sides = [size, size] if isinstance(size, int) else size
        is_size = sides is None or (len(sides) == 2 and min(sides) >= 1)
        require(is_size, "size", "a side or height and width", size, "64 is a start")
        self._sides = sides
        self.grayscale = grayscale
        self.keep_aspect = keep_aspect
        self.white = white

    def read_whole(self, path: Source) -> UInt8[Tensor, "c h w"]:
        """An image at its own size, for networks that take images of any size.

        Raises:
            DataError: See `read`.
        """
        with opened(path) as image:
            pixels = [band for _, band in bands(image, "L" if self.grayscale else "RGB", self.white)]
        return torch.cat(pixels, dim=1)

    def reader_for(self, network: Network) -> Self:
        reader = super().reader_for(network)
        reader._sides, reader.grayscale = None, network.channels == 1
        return reader

    @abstractmethod
    def sizes(self) -> Int64[Tensor, "n 2"]:
        """Height and width of each readable image.

        Raises:
            DataError: If there is none.
        """

    @property
    def size(self) -> list[int]:
        if self._sides is None:
            self._sides = sides_for(self.sizes()) if self.network is None else [*self.network.size]
        return self._sides

    @property
    def shape(self) -> tuple[int, int, int]:  # type: ignore[override]
        return (1 if self.grayscale else 3, *self.size)  # type: ignore[return-value]

    def read_all(self, sources: Any, digest: str) -> UInt8[Tensor, "n c h w"]:
        read_all, what = super().read_all, f"{_VERSION} {type(self).read_item.__qualname__} {digest}"
        return cached("images", what, lambda: torch.stack(list(read_all(sources, digest))))

    def bytes_of(self, sources: Any) -> int:
        return len(sources) * math.prod(self.shape)
