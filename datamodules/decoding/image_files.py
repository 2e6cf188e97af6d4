"""Reading image files of any size and mode, finding broken ones, and limiting the memory that an image takes."""

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

from datamodules.decoding.packed import Packed, Source
from datamodules.decoding.quiet import without_noise
from datamodules.errors import DataError, counted

# By the name of their format in Pillow. Without this list, Pillow would also pass PostScript to an interpreter.
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
# A TGA has no mark at its beginning, so any bytes may look like one, and HEIF needs a package. The others are known by
# their marks, whatever the suffix.
_BY_SUFFIX = frozenset({"TGA", "HEIF"})
_BRIGHTEST = 4.0  # times white: highlights may be as bright; larger values have another unit and would all turn white
_MAX_PIXELS = 89_478_485  # Pillow only warns above this, and threads cannot each turn a warning into an error
_PIXELS_OF_A_CORE = 2**24  # of images that are decoded at once: photographs of telephones never wait for each other
_UNPACKING = "unpacking"  # the key in an image's info: from which types of numbers its pixels are unpacked
_BAND = 2**20  # pixels that are converted at once, so that only the decoder holds the whole of a large image
_DARK = 0.26  # of white: images of 14 bits and fewer in files of 16 have no brighter pixel
_LIKELY = (255, 1023, 4095, 16383)  # the brightest values of 8, 10, 12 and 14 bits
_WHITE = {"I": 65535, "I;16": 65535, "I;16B": 65535, "I;16L": 65535, "I;16N": 65535, "F": 1}  # in deep grey modes


class _Budget:
    """A limit on the pixels that all threads together hold: a thread that would exceed it waits for others."""

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
    """A decoded image of any mode, turned as its EXIF orientation says; of an animation, the first frame.

    Args:
        path: The path of the file, or a file in a shard.
        made_of: Returns the height and width to which an image of a given height and width will be resized.

    Raises:
        DataError: If the file is absent, broken or of another format; if it or the resized image has so many pixels
            (over 89 million) that it may be a decompression bomb; or if the code inside the context raises an error.
    """
    if not isinstance(path, Packed) and not Path(path).is_file():
        raise DataError(f"{path}: no such file; check the path")
    try:
        with warnings.catch_warnings(), without_noise(path):
            warnings.simplefilter("ignore")
            with Image.open(path, formats=_formats(path)) as image:
                if _of_tiles(image) > _MAX_PIXELS:
                    raise Image.DecompressionBombError
                if what := too_large(image.height, image.width, made_of):
                    raise DataError(f"{path}: {what}")
                with _budget.spending(_pixels_at_once(image.height, image.width, made_of)):
                    try:
                        image.info[_UNPACKING] = str(getattr(image, "tile", ""))  # decoding empties it
                        ImageOps.exif_transpose(image, in_place=True)
                        yield image
                    finally:
                        _forget(image)
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise DataError(f"{path}: more pixels than the limit that guards memory; make it smaller first") from error
    except Exception as error:  # decoders raise any exception for hostile bytes, from SyntaxError to struct.error
        what = "unknown format" if isinstance(error, UnidentifiedImageError) else " ".join(str(error).split())
        raise DataError(
            f"{path}: not a readable image ({what or type(error).__name__}); convert it to PNG or JPEG"
        ) from error


@cache
def _has_heif() -> bool:
    """Whether pillow-heif is installed; Pillow knows its format then."""
    try:
        from pillow_heif import register_heif_opener  # type: ignore[import-not-found]
    except ImportError:
        return False
    register_heif_opener()
    return True


def _formats(path: Source) -> list[str]:
    """The formats that a file may have.

    Raises:
        DataError: If its suffix is of one for which a package is missing.
    """
    if isinstance(path, Packed):  # its name has no suffix
        return [name for name in _SUFFIXES if name != "HEIF" or _has_heif()]
    suffix = Path(path).suffix.lower()
    if suffix in _SUFFIXES["HEIF"] and not _has_heif():
        raise DataError(f"{path}: {suffix} needs pillow-heif; pip install 'longseq[heic]', or convert it to JPEG")
    return [name for name, suffixes in _SUFFIXES.items() if name not in _BY_SUFFIX or suffix in suffixes]


def bands(image: Image.Image, mode: str, white: float | None = None) -> Iterator[tuple[int, UInt8[Tensor, "c h w"]]]:
    """The pixels of an image from top to bottom, in bands of whole rows, each with the number of its first row.

    Transparency is laid over white. In deep grey modes values from 0 to white are scaled to 0..255.

    Args:
        image: Of any mode.
        mode: "L" for grey, or "RGB".
        white: The value that is white in deep grey modes; if absent, 65535 of integers, and 1 of floats.
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
    """Decode a whole image file, and return its facts: its height and width. In deep grey modes also its lowest and
    highest value, and the value that is white by default; of 16 bits in colour the highest upper byte, which is all
    that Pillow reads; of several pages or frames their number.

    Raises:
        DataError: As `opened` does.
    """
    with opened(path) as image:
        facts: dict[str, Any] = {"height": image.height, "width": image.width}
        if (pages := _pages(path)) > 1:
            facts["pages"] = pages
        if image.mode in _WHITE:  # any value may be wrong
            ends = [float(end(np.asarray(crop))) for _, crop in _crops(image) for end in (np.min, np.max)]
            if not all(map(math.isfinite, ends)):  # NumPy's min and max of anything with NaN are NaN
                raise ValueError("values that are not finite")
            return {**facts, "lowest": min(ends), "highest": max(ends), "white": _WHITE[image.mode]}
        is_deep = ";16" in image.info[_UNPACKING]
        for _ in bands(image.crop((0, 0, 1, 1)), "RGB"):  # one pixel shows whether Pillow can convert the mode
            pass
        if is_deep:
            facts["upper_byte"] = max(int(crop.max()) for _, crop in bands(image, "RGB"))
        return facts


def _pages(path: Source) -> int:
    """Pages of a TIFF, or frames of an animation; 1 of MPO, in which telephones keep smaller copies."""
    with suppress(Exception), Image.open(path, formats=_formats(path)) as image:  # a later page may be broken: not read
        return 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    return 1


def remark_on_pages(facts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line on images of several pages or frames, of which only the first is read.

    Args:
        facts: Of each image by its path, by examine_image.
    """
    several = {path: each["pages"] for path, each in facts.items() if "pages" in each}
    if several:
        path = max(several, key=lambda path: several[path])
        has = "has several pages or frames" if len(several) == 1 else "have several pages or frames"
        what = f"{counted(len(several), 'image')} of {len(facts)} {has}, the most {several[path]} in {path}"
        yield f"{what}; the first alone is read, so save others that count as files of their own"


def too_bright(facts: dict[str, Any], white: float | None) -> str:
    """Why an image would be all white, and the remedy; empty if it would not.

    Args:
        facts: Of the image, by examine_image.
        white: As `bands` takes it.
    """
    white = facts.get("white") if white is None else white
    if white is None or facts["highest"] <= _BRIGHTEST * white:
        return ""
    highest = facts["highest"]
    return f"values up to {highest:g}, where {white:g} is white; divide them, or give the value of white, --data.white"


def remarks_on_depth(facts: Sequence[dict[str, Any]], white: float | None) -> Iterator[str]:
    """Lines on deep grey images that are nearly black, and on values below black.

    Args:
        facts: Of each image, by examine_image.
        white: As `bands` takes it.
    """
    deep = [each for each in facts if "white" in each]
    cut = [each["upper_byte"] for each in facts if "upper_byte" in each]
    if cut and 0 < max(cut) < 255 * _DARK:
        what = f"no value in {counted(len(cut), 'colour image')} of 16 bits is above {max(cut) / 255:.1%} of white"
        yield f"{what}, so they are nearly black; scale them to 8 bits"
    negative = [each["lowest"] for each in deep if each["lowest"] < 0]
    if negative:
        what = f"values below 0 in {counted(len(negative), 'image')}, down to {min(negative):g}, are read as black"
        yield f"{what}; shift and scale them to 0..1"
    if white is None:
        for usual in {each["white"]: None for each in deep}:
            highest = max(each["highest"] for each in deep if each["white"] == usual)
            if 0 < highest < _DARK * usual:
                number = sum(each["white"] == usual for each in deep)
                likely = next((bits for bits in _LIKELY if highest <= bits), highest) if usual > 1 else highest
                what = f"no value in {counted(number, 'image')} is above {highest:g}, and {usual} is white"
                yield f"{what}, so they are nearly black; give the value that is white, such as --data.white {likely:g}"


def too_large(height: int, width: int, made_of: Callable[[int, int], tuple[int, int]]) -> str:
    """Why an image of this size would take too much memory, and the remedy; empty if it would not.

    Args:
        height, width: The size of the image; its EXIF orientation may turn it.
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
    """The most pixels in memory while an image, turned or not, is resized along its rows and then its columns."""
    turned = [(high, wide, made_of(high, wide)) for high, wide in ((height, width), (width, height))]
    return max(max(high, made[0]) * max(wide, made[1]) for high, wide, made in turned)


def _of_tiles(image: Image.Image) -> int:
    """Pixels of a tile of a TIFF, because a whole tile is decoded even for a small image; 0 for other files."""
    tags = getattr(image, "tag_v2", {})
    return tags.get(ExifTags.Base.TileWidth, 0) * tags.get(ExifTags.Base.TileLength, 0)


def _forget(image: Image.Image) -> None:
    """Give the memory of a large image back to the system: otherwise each thread keeps it for its next image."""
    pixels = image.height * image.width
    image.close()
    if pixels > _PIXELS_OF_A_CORE:
        with suppress(OSError, AttributeError):  # C libraries other than GNU's keep less memory
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
