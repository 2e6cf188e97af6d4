"""What data modules of images share: their layout in memory, and reading any image file."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from datamodules.base import DataModule
from datamodules.errors import DataError
from datamodules.samples import LabelledTensors, Samples

# Named, for Pillow would also hand PostScript to an interpreter.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_MAX_PIXELS = 89_478_485  # Pillow warns above as many, and the scan's threads cannot each turn that into an error
_WHITE = {"I": 65535, "I;16": 65535, "I;16B": 65535, "I;16L": 65535, "I;16N": 65535, "F": 1}  # of deep grey modes


def resize(images: UInt8[Tensor, "*b c h w"], height: int, width: int) -> UInt8[Tensor, "*b c {height} {width}"]:
    """Bilinear resizing that averages where it shrinks."""
    return functional.resize(images, [height, width], antialias=True)


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
        """One input from an image file of any size and mode, as open_image reads it.

        It is stretched to `shape`, or, with keep_aspect, made just large enough to cover it and cut to its middle.

        Raises:
            DataError: If the file is absent, broken, of another format, or too large.
        """
        height, width = self.shape[1:]
        pixels = open_image(path, grayscale=self.shape[0] == 1)
        if self.keep_aspect:
            scale = max(height / pixels.shape[1], width / pixels.shape[2])
            larger = max(round(pixels.shape[1] * scale), height), max(round(pixels.shape[2] * scale), width)
            return functional.center_crop(resize(pixels, *larger), [height, width])
        return resize(pixels, height, width)

    def samples_of(self, inputs: Sequence[Tensor] | Tensor, *arguments: Any, **details: Any) -> Samples:
        if isinstance(inputs, list):
            return LabelledTensors(torch.stack(inputs), *arguments, **details)
        return Samples(inputs, *arguments, **details)

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


def open_image(path: str | os.PathLike[str], grayscale: bool = False) -> UInt8[Tensor, "c h w"]:
    """The pixels of an image file of any size and mode.

    It is turned as its EXIF orientation says; transparency is laid over white, and of an animation the first frame
    counts. Values of 16 bits are scaled from 0..65535, floats from 0..1.

    Raises:
        DataError: If the file is absent, broken, of another format, or so large (over 89 megapixels) that it may be a
            decompression bomb.
    """
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file; check the path")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path, formats=_FORMATS) as image:
                if image.width * image.height > _MAX_PIXELS:
                    raise Image.DecompressionBombError
                return _pixels(ImageOps.exif_transpose(image), "L" if grayscale else "RGB")
    except Image.DecompressionBombError as error:
        raise DataError(f"{path}: more pixels than the limit that guards memory; make it smaller first") from error
    except Exception as error:  # decoders meet hostile bytes with any exception, from SyntaxError to struct.error
        what = "unknown format" if isinstance(error, UnidentifiedImageError) else " ".join(str(error).split())
        raise DataError(
            f"{path}: not a readable image ({what or type(error).__name__}); convert it to PNG or JPEG"
        ) from error


def _pixels(image: Image.Image, mode: str) -> UInt8[Tensor, "c h w"]:
    if image.mode in _WHITE:  # Pillow's own conversion clips these to 0..255
        values = np.asarray(image, dtype=np.float64) * (255 / _WHITE[image.mode])
        image = Image.fromarray(values.clip(0, 255).round().astype(np.uint8))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    array = np.array(image.convert(mode))
    return torch.from_numpy(array).reshape(image.height, image.width, -1).permute(2, 0, 1)
