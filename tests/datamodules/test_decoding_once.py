"""The first run on a folder decodes each file once, for the scan and for the inputs in memory together."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from datamodules import DataModule, ImageFolder


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often Pillow decodes the pixels of each file, by its path."""
    counts: Counter[str] = Counter()
    load = ImageFile.ImageFile.load

    def counted(image: ImageFile.ImageFile) -> object:
        if image.tile:  # empty once it is decoded
            counts[str(image.filename)] += 1
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", counted)
    return counts


def inputs_of(data: DataModule) -> dict[str, torch.Tensor]:
    data.setup("fit")
    return {name: value for part in data.splits().values() for name, value in zip(part.names, part.inputs, strict=True)}


@pytest.mark.parametrize("size", [None, 5, [4, 12]])
def test_each_image_is_decoded_once_and_gives_the_input_that_reading_it_alone_gives(size, images, decoded):
    inputs = inputs_of(data := ImageFolder(str(images), size=size))
    assert len(decoded) == 24 and set(decoded.values()) == {1}
    alone = {name: data.read(images / name) for name in inputs}
    assert all(torch.equal(inputs[name], alone[name]) for name in alone)


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """JPEGs of many shapes, some of them turned by EXIF, deep grey PNGs and one with a palette."""
    generator = np.random.default_rng(0)
    folder = tmp_path / "photographs"
    for number in range(24):
        path = folder / "ab"[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 255, (*generator.integers(70, 140, 2), 3), np.uint8)
        exif = Image.Exif()
        exif[0x0112] = 1 + number % 8
        Image.fromarray(pixels).save(path, exif=exif)
    Image.fromarray(generator.integers(0, 60_000, (90, 80), np.uint16)).save(folder / "a/deep.png")
    Image.effect_noise((80, 90), 50).quantize(16).save(folder / "a/palette.png")
    return folder


@pytest.mark.parametrize("options", [{}, {"keep_aspect": False}, {"grayscale": True, "white": 60_000.0}])
def test_photographs_of_all_shapes_are_decoded_once(options, photographs, decoded):
    inputs = inputs_of(data := ImageFolder(str(photographs), **options))
    assert len(decoded) == 26 and set(decoded.values()) == {1}
    assert all(torch.equal(value, data.read(photographs / name)) for name, value in inputs.items())


def test_a_size_that_the_headers_of_broken_files_told_wrong_is_put_right(images, decoded, tmp_path):
    plain = inputs_of(ImageFolder(str(images)))
    for number in range(40):  # their headers are good, and they are more than the others
        path = images / "cats" / f"{number + 50}.bmp"
        Image.new("RGB", (24, 24)).save(path)
        path.write_bytes(path.read_bytes()[:500])
    decoded.clear()
    for path in images.rglob("*.png"):
        path.touch()  # so that the next scan reads it again
    data = ImageFolder(str(images), on_error="skip")
    inputs = inputs_of(data)
    assert data.shape == (3, 8, 8) and len(data.bad_files()) == 40
    assert all(torch.equal(inputs[name], plain[name]) for name in plain)


def test_a_scan_keeps_no_input_that_will_not_stay_in_memory(images, decoded):
    data = ImageFolder(str(images), in_memory=False)
    data.setup("fit")
    assert not data._decoded and decoded.total() == 24 + 1  # one sample more, to try augmentations on


def test_after_setup_no_input_of_the_scan_stays_beside_the_splits(images):
    inputs_of(data := ImageFolder(str(images)))
    assert not data._decoded


def test_a_second_run_decodes_nothing_and_another_size_decodes_once(images, decoded):
    inputs_of(ImageFolder(str(images)))
    decoded.clear()
    inputs_of(ImageFolder(str(images)))
    assert not decoded
    inputs_of(ImageFolder(str(images), size=4))
    assert set(decoded.values()) == {1}
