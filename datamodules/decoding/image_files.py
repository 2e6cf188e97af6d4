"""Reading image files of any size and mode, detecting broken ones, and limiting the memory of an image."""

import ctypes
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from datamodules.decoding._quiet import without_noise
from datamodules.decoding.packed import Decoded, Packed, Source
from datamodules.errors import DataError, counted

# By the format's name in Pillow. Without this list, Pillow would also pass PostScript to an interpreter.
_SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png", ".apng"),
    "TIFF": (".tif", ".tiff"),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "AVIF": (".avif",),
    "JPEG2000": (".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"),
    "PCX": (".pcx",),
    "QOI": (".qoi",),
    "SGI": (".sgi",),
    "TGA": (".tga",),
    "HEIF": (".heic", ".heif"),  # by pillow-heif, if installed
}
SUFFIXES = frozenset(chain.from_iterable(_SUFFIXES.values()))
# TGA has no magic number, so any bytes may look like one, and HEIF needs a package. The other formats are recognised by
# their magic numbers, whatever the suffix.
_BY_SUFFIX = frozenset({"TGA", "HEIF"})
_BRIGHTEST = 4.0  # times white: highlights may be as bright; larger values have another unit and would all become white
_MAX_PIXELS = 89_478_485  # above this Pillow only warns, and a thread cannot turn its own warnings into errors
_PIXELS_OF_A_CORE = 2**24  # of images that are decoded at once: photographs of phones never wait for each other
_UNPACKING = "unpacking"  # a key in an image's info: the types of numbers from which its pixels are unpacked
_BAND = 2**20  # pixels that are converted at once, so that only the decoder has a large image as a whole
_DARK = 0.26  # times white: images of 14 bits or fewer in files of 16 bits have no brighter pixel
_LIKELY = (255, 1023, 4095, 16383)  # the brightest values of 8, 10, 12 and 14 bits
_WHITE = {"I": 65535, "I;16": 65535, "I;16B": 65535, "I;16L": 65535, "I;16N": 65535, "F": 1}  # in deep grey modes


class _Budget:
    """A limit on the pixels in memory of all threads together; a thread that would exceed it waits for others."""

    def __init__(self, pixels: int) -> None:
        self._free = pixels
        self._changed = threading.Condition()

    @contextmanager
    def spending(self, pixels: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: pixels <= self._free)
            self._free -= pixels
        try:
            yield
        finally:
            with self._changed:
                self._free += pixels
                self._changed.notify_all()


_budget = _Budget(max(_MAX_PIXELS, _PIXELS_OF_A_CORE * (os.cpu_count() or 1)))


@contextmanager
def opened(
    path: Source, made_of: Callable[[int, int], tuple[int, int]] = lambda height, width: (height, width)
) -> Iterator[Image.Image]:
    """A decoded image of any mode, rotated by its EXIF orientation; of an animation, the first frame.

    Args:
        path: The path of the file, or a file in a shard.
        made_of: Returns the height and width to which an image of a given height and width will be resized.

    Raises:
        DataError: If the file is missing, broken or of an unknown format; if it or the resized image has more than 89
            million pixels, so that it may be a decompression bomb; or if the code inside the context raises an error.
    """
    if not isinstance(path, Packed) and not Path(path).is_file():
        raise DataError(f"{path}: no such file; check the path")
    try:
        with warnings.catch_warnings(), without_noise(path):
            warnings.simplefilter("ignore")
            with _image_of(path) as image:
                if _of_tiles(image) > _MAX_PIXELS:
                    raise Image.DecompressionBombError
                if what := too_large(image.height, image.width, made_of):
                    raise DataError(f"{path}: {what}")
                with _budget.spending(_pixels_at_once(image.height, image.width, made_of)):
                    try:
                        image.info[_UNPACKING] = str(getattr(image, "tile", ""))  # decoding empties `tile`
                        ImageOps.exif_transpose(image, in_place=True)
                        yield image
                    finally:
                        _forget(image)
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise DataError(f"{path}: more pixels than the limit that guards memory; make it smaller first") from error
    except Exception as error:  # hostile bytes make decoders raise anything, from SyntaxError to struct.error
        what = "unknown format" if isinstance(error, UnidentifiedImageError) else " ".join(str(error).split())
        raise DataError(
            f"{path}: not a readable image ({what or type(error).__name__}); convert it to PNG or JPEG"
        ) from error


def _image_of(path: Source) -> Image.Image:
    if isinstance(path, Decoded):
        return ImageOps.exif_transpose(path.image)  # a copy, because `opened` closes its image
    return Image.open(path, formats=_formats(path))


@cache
def _has_heif() -> bool:
    """Whether pillow-heif is installed. If so, Pillow then supports its format."""
    try:
        from pillow_heif import register_heif_opener  # type: ignore[import-not-found]
    except ImportError:
        return False
    register_heif_opener()
    return True


def _formats(path: Source) -> list[str]:
    """The formats that a file may have.

    Raises:
        DataError: If its suffix needs a package that is not installed.
    """
    if isinstance(path, Packed):  # its name has no suffix
        return [name for name in _SUFFIXES if name != "HEIF" or _has_heif()]
    suffix = Path(path).suffix.lower()
    if suffix in _SUFFIXES["HEIF"] and not _has_heif():
        raise DataError(f"{path}: {suffix} needs pillow-heif; pip install 'longseq[heic]', or convert it to JPEG")
    return [name for name, suffixes in _SUFFIXES.items() if name not in _BY_SUFFIX or suffix in suffixes]


def bands(image: Image.Image, mode: str, white: float | None = None) -> Iterator[tuple[int, UInt8[Tensor, "c h w"]]]:
    """The pixels of an image from top to bottom, in bands of whole rows, each with the number of its first row.

    Transparent pixels are blended with white. In deep grey modes, values from 0 to white are scaled to 0..255.

    Args:
        image: An image of any mode.
        mode: "L" for grey, or "RGB".
        white: The value of white in deep grey modes; if absent, 65535 for integers and 1 for floats.
    """
    for top, crop in _crops(image):
        yield top, _pixels(crop, mode, white)


def _crops(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """The image in bands of whole rows, each with the number of its first row."""
    height = max(_BAND // image.width, 1)
    if height >= image.height:
        yield 0, image
        return
    for top in range(0, image.height, height):
        yield top, image.crop((0, top, image.width, min(top + height, image.height)))


def examine_image(path: Source) -> dict[str, Any]:
    """Decode a whole image file, and return its facts: height and width, and in some cases others.

    Deep grey modes also have "lowest", "highest" and "white", the default value of white. Colour images of 16 bits have
    "upper_byte", the highest one, because Pillow reads the upper bytes only. Files of several pages or frames have
    "pages", their number.

    Raises:
        DataError: If the image cannot be read; see `opened`.
    """
    with opened(path) as image:
        return facts_of(image, path)


def facts_of(image: Image.Image, path: Source) -> dict[str, Any]:
    """The facts that `examine_image` returns, of an image that `opened` decoded from this path."""
    facts: dict[str, Any] = {"height": image.height, "width": image.width}
    if image.format != "JPEG" and (pages := _pages(path)) > 1:  # JPEG with several images has another format, MPO
        facts["pages"] = pages
    if image.mode in _WHITE:  # any value may be wrong
        ends = [float(end(np.asarray(crop))) for _, crop in _crops(image) for end in (np.min, np.max)]
        if not all(map(math.isfinite, ends)):  # NumPy's min and max of values with NaN are NaN
            raise ValueError("values that are not finite")
        return {**facts, "lowest": min(ends), "highest": max(ends), "white": _WHITE[image.mode]}
    is_deep = ";16" in image.info[_UNPACKING]
    _pixels(image.crop((0, 0, 1, 1)), "RGB")  # one pixel shows whether Pillow can convert the mode
    if is_deep:
        facts["upper_byte"] = max(int(crop.max()) for _, crop in bands(image, "RGB"))
    return facts


def size_in_header(path: Source) -> tuple[int, int] | None:
    """Height and width of an image before any rotation, without decoding it; None if it cannot be read."""
    with suppress(Exception), Image.open(path, formats=_formats(path)) as image:  # hostile bytes raise anything
        return image.height, image.width
    return None


def _pages(path: Source) -> int:
    """The number of pages of a TIFF, or of frames of an animation; 1 for MPO, where phones store smaller copies."""
    # a later page, which is not used, may be broken
    with suppress(Exception), Image.open(path, formats=_formats(path)) as image:
        return 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    return 1


def remark_on_pages(facts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line on images of several pages or frames, of which only the first is read.

    Args:
        facts: The facts of each image from examine_image, by path.
    """
    several = {path: of_image["pages"] for path, of_image in facts.items() if "pages" in of_image}
    if several:
        path = max(several, key=lambda path: several[path])
        has = "has several pages or frames" if len(several) == 1 else "have several pages or frames"
        what = f"{counted(len(several), 'image')} of {len(facts)} {has}, the most {several[path]} in {path}"
        yield f"{what}; the first alone is read, so save others that count as files of their own"


def too_bright(facts: dict[str, Any], white: float | None) -> str:
    """Why an image would become all white, and the remedy; empty if it would not.

    Args:
        facts: The facts of the image, from examine_image.
        white: See `bands`.
    """
    if "white" not in facts:  # not a deep grey image, so its white is 255
        return ""
    white = float(facts["white"] if white is None else white)
    highest = facts["highest"]
    if highest <= _BRIGHTEST * white:
        return ""
    return f"values up to {highest:g}, where {white:g} is white; divide them, or give the value of white, --data.white"


def remarks_on_depth(facts: Sequence[dict[str, Any]], white: float | None) -> Iterator[str]:
    """Lines on deep grey images that are nearly black, and on values below black.

    Args:
        facts: The facts of each image, from examine_image.
        white: See `bands`.
    """
    deep = [image for image in facts if "white" in image]
    cut = [image["upper_byte"] for image in facts if "upper_byte" in image]
    if cut and 0 < max(cut) < 255 * _DARK:
        what = f"no value in {counted(len(cut), 'colour image')} of 16 bits is above {max(cut) / 255:.1%} of white"
        yield f"{what}, so they are nearly black; scale them to 8 bits"
    negative = [image["lowest"] for image in deep if image["lowest"] < 0]
    if negative:
        what = f"values below 0 in {counted(len(negative), 'image')}, down to {min(negative):g}, are read as black"
        yield f"{what}; shift and scale them to 0..1"
    if white is None:
        for usual in {image["white"]: None for image in deep}:
            values = [image["highest"] for image in deep if image["white"] == usual]
            highest, number = max(values), len(values)
            if 0 < highest < _DARK * usual:
                likely = next((bits for bits in _LIKELY if highest <= bits), highest) if usual > 1 else highest
                what = f"no value in {counted(number, 'image')} is above {highest:g}, and {usual} is white"
                yield f"{what}, so they are nearly black; give the value that is white, such as --data.white {likely:g}"


def too_large(height: int, width: int, made_of: Callable[[int, int], tuple[int, int]]) -> str:
    """Why an image of this size would take too much memory, and the remedy; empty if it would not.

    Args:
        height, width: The size of the image; its EXIF orientation may rotate it.
        made_of: Returns the height and width to which an image of a given height and width is resized.
    """
    if height * width > _MAX_PIXELS:
        return "more pixels than the limit that guards memory; make it smaller first"
    pixels = _pixels_at_once(height, width, made_of)
    if pixels > _MAX_PIXELS:
        return (
            f"{width} x {height} pixels would become {pixels}, more than the limit that guards memory; cut it "
            "nearer to the shape of the inputs"
        )
    return ""


def _pixels_at_once(height: int, width: int, made_of: Callable[[int, int], tuple[int, int]]) -> int:
    """The most pixels in memory while an image, rotated or not, is resized along its rows and then its columns."""
    sizes = [(high, wide, made_of(high, wide)) for high, wide in ((height, width), (width, height))]
    return max(max(high, made[0]) * max(wide, made[1]) for high, wide, made in sizes)


def _of_tiles(image: Image.Image) -> int:
    """The pixels of a tile of a TIFF, because a whole tile is decoded even for a small image; 0 for other files."""
    tags = getattr(image, "tag_v2", {})
    return tags.get(ExifTags.Base.TileWidth, 0) * tags.get(ExifTags.Base.TileLength, 0)


def _forget(image: Image.Image) -> None:
    """Return the memory of a large image to the system: otherwise each thread holds it for its next image."""
    pixels = image.height * image.width
    image.close()
    if pixels > _PIXELS_OF_A_CORE:
        with suppress(OSError, AttributeError):  # C libraries other than GNU's hold less memory
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def _pixels(image: Image.Image, mode: str, white: float | None = None) -> UInt8[Tensor, "c h w"]:
    if image.mode in _WHITE:  # Pillow's own conversion clips these to 0..255
        white = _WHITE[image.mode] if white is None else white
        values = np.asarray(image, dtype=np.float64) * (255 / white)
        brightest = float(values.max()) / 255
        if not np.isfinite(values).all():
            raise ValueError("values that are not finite")
        if brightest > _BRIGHTEST:
            raise ValueError(f"values up to {brightest * white:g}, where {white:g} is white: divide them")
        image = Image.fromarray(values.clip(0, 255).round().astype(np.uint8))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    array = np.array(image if image.mode == mode else image.convert(mode))
    return torch.from_numpy(array).reshape(image.height, image.width, -1).permute(2, 0, 1)
