"""What data modules of images share: their layout in memory, and reading any image file."""

import os
import warnings
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from datamodules.base import DataError, DataModule

# Named, for Pillow would also hand PostScript to an interpreter.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_WHITE = {"I": 65535, "I;16": 65535, "I;16B": 65535, "I;16L": 65535, "I;16N": 65535, "F": 1}  # of deep grey modes


def resize(images: UInt8[Tensor, "*b c h w"], height: int, width: int) -> UInt8[Tensor, "*b c {height} {width}"]:
    """Bilinear resizing that averages where it shrinks."""
    return transforms.resize(images, [height, width], antialias=True)


class ImageDataModule(DataModule):
    """Images as uint8 (channels, height, width), 0 black and 255 white; one channel is grey, three are RGB."""

    shape: tuple[int, int, int]
    predict_suffixes: ClassVar[frozenset[str]] = frozenset(
        {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
    )

    def read(self, path: str | os.PathLike[str]) -> UInt8[Tensor, "c h w"]:
        """One input from an image file of any size and mode.

        The image is turned as its EXIF orientation says and stretched to `shape`; transparency is laid over white,
        and of an animation the first frame counts. Values of 16 bits are scaled from 0..65535, floats from 0..1.

        Raises:
            DataError: If the file is absent, broken, of another format, or so large (over 89 megapixels) that it may
                be a decompression bomb.
        """
        if not Path(path).is_file():
            raise DataError(f"{path}: no such file; check the path")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                with Image.open(path, formats=_FORMATS) as image:
                    pixels = _pixels(ImageOps.exif_transpose(image), "RGB" if self.shape[0] == 3 else "L")
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise DataError(f"{path}: more pixels than the limit that guards memory; make it smaller first") from error
        except Exception as error:  # decoders meet hostile bytes with any exception, from SyntaxError to struct.error
            what = "unknown format" if isinstance(error, UnidentifiedImageError) else " ".join(str(error).split())
            raise DataError(
                f"{path}: not a readable image ({what or type(error).__name__}); convert it to PNG or JPEG"
            ) from error
        return resize(pixels, *self.shape[1:])


def _pixels(image: Image.Image, mode: str) -> UInt8[Tensor, "c h w"]:
    if image.mode in _WHITE:  # Pillow's own conversion clips these to 0..255
        values = np.asarray(image, dtype=np.float64) * (255 / _WHITE[image.mode])
        image = Image.fromarray(values.clip(0, 255).round().astype(np.uint8))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    array = np.array(image.convert(mode))
    return torch.from_numpy(array).reshape(image.height, image.width, -1).permute(2, 0, 1)
