"""The pictures and sounds of a page."""

import os
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import matplotlib
import numpy as np
import soundfile
from PIL import Image, ImageOps

from longseq.cli.predict.spectrogram import sections_of

_SIDE = 512  # pixels of the longer side of a picture
_SMALL = 96  # pixels; smaller images are written without loss, so that a click shows their pixels
PLAYED = {".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a"}  # by browsers
_COPIED = 100e6  # bytes of sound that a page copies
_COLUMNS, _ALL_COLUMNS = 200.0, 2e6  # of spectrograms: most in a second, and of all files
_NATS = 13.8  # of a spectrogram's levels are shown: 60 dB


def write_image(datamodule: Any, path: str, target: Path) -> str | None:
    """Write a picture of an image file, and return its name; None if the file cannot be drawn.

    Args:
        datamodule: Reads what Pillow cannot show: then the picture is the input of the model.
        path: The image file.
        target: The picture without its suffix.
    """
    try:
        with Image.open(os.fsencode(path)) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"mode {image.mode}")
            image.draft("RGB", (_SIDE, _SIDE))
            image.thumbnail((_SIDE, _SIDE))
            picture = ImageOps.exif_transpose(image).convert("RGBA")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        pixels = datamodule.read_part((path, 0.0, None))
        if pixels.ndim != 3 or len(pixels) not in (1, 3):
            return None
        picture = Image.fromarray(pixels.movedim(0, -1).expand(-1, -1, 3).numpy()).convert("RGBA")
    on_white = Image.new("RGBA", picture.size, "white")
    on_white.alpha_composite(picture)
    name = f"{target.name}.{'png' if max(picture.size) <= _SMALL else 'jpg'}"
    on_white.convert("RGB").save(target.with_name(name), quality=85)
    return name


def columns_for(seconds: float) -> float:
    """The columns of a spectrogram for each second, if all recordings together have so many seconds."""
    return min(_COLUMNS, _ALL_COLUMNS / max(seconds, 1e-3))


def write_spectrogram(
    model: Any, datamodule: Any, path: str, seconds: float, columns_a_second: float, target: Path
) -> tuple[str, int]:
    """Write a picture of a whole recording, and if it is longer than a minute one of each minute, NAME-0.jpg on.

    Returns:
        The name of the first picture, and the number of the others.
    """
    sections = [section.numpy() for section in sections_of(model.encoder, datamodule, path, seconds, columns_a_second)]
    whole = np.concatenate(sections, axis=1)
    loudest = float(whole[np.isfinite(whole)].max(initial=-np.inf))
    for number, section in enumerate(sections if len(sections) > 1 else []):
        _draw(section, loudest).save(target.with_name(f"{target.name}-{number}.jpg"), quality=80)
    picture = _draw(whole, loudest)
    if picture.width > 3 * _SIDE:
        picture = picture.resize((3 * _SIDE, picture.height), Image.Resampling.BOX)
    name = f"{target.name}.jpg"
    picture.save(target.with_name(name), quality=80)
    return name, len(sections) if len(sections) > 1 else 0


def _draw(mels: np.ndarray, loudest: float) -> Image.Image:
    levels = np.nan_to_num((mels[::-1] - loudest) / _NATS + 1, nan=0.0).clip(0, 1)
    return Image.fromarray((matplotlib.colormaps["magma"](levels)[..., :3] * 255).astype(np.uint8))


class Sounds:
    """Makes the sounds of a page. It copies them as long as they are small together, so that the folder can be sent.
    The page plays the others where they lie.

    Args:
        folder: The folder of the page.

    Attributes:
        num_outside: The number of sounds that are not in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.num_outside = folder, 0
        self._left = _COPIED

    def address(self, path: str, target: Path) -> str | None:
        """The address of a recording for the page; None if no browser plays it.

        Args:
            path: The recording.
            target: Its copy without the suffix.
        """
        suffix, size = Path(path).suffix.lower(), os.path.getsize(path)
        if size > self._left and suffix in PLAYED:
            self.num_outside += 1
            return quote(os.fsencode(os.path.relpath(path, self.folder)))
        if size > self._left:
            return None
        copy = target.with_suffix(suffix if suffix in PLAYED else ".flac")
        if suffix in PLAYED:
            shutil.copyfile(path, copy)
        else:
            name: Any = os.fsencode(path)  # bytes, because text would have to be UTF-8
            try:
                soundfile.write(copy, *soundfile.read(name, dtype="int16"))
            except (soundfile.LibsndfileError, TypeError):
                return None
        self._left -= copy.stat().st_size
        return f"files/{copy.name}"
