"""Inputs that are no files are answered as the same content in a file is."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import longseq
from datamodules import ImageFolder
from datamodules.errors import DataError
from longseq.deploy.predictor import Predictor
from longseq.training import Classifier


@pytest.fixture(params=[True, False], ids=["grey", "colour"])
def of_images(tmp_path: Path, request: pytest.FixtureRequest) -> Predictor:
    for number in range(8):
        folder = tmp_path / "data" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((20, 14), 60).convert("RGB").save(folder / f"{number}.png")
    data = ImageFolder(str(tmp_path / "data"), size=[8, 16], grayscale=request.param)
    torch.manual_seed(0)
    encoder = longseq.ImageEncoder(data.shape, longseq.Verma(), dim=8, depth=1, heads=1)
    encoder.measure([torch.randint(256, (4, *data.shape), dtype=torch.uint8)])
    return Predictor(Classifier(encoder, 2), data)


def test_images_of_any_size_in_memory_are_resized_as_files_are(of_images: Predictor, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(256, size=(33, 21, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x112] = 6  # shown turned by a quarter
    image.save(tmp_path / "plain.png")
    image.convert("CMYK").save(tmp_path / "cmyk.tif")
    image.save(tmp_path / "turned.jpg", exif=exif)
    with Image.open(tmp_path / "turned.jpg") as turned:
        given = [pixels, torch.from_numpy(pixels).float(), image, image.convert("CMYK"), turned]
        given += [(tmp_path / "plain.png").read_bytes(), bytearray((tmp_path / "turned.jpg").read_bytes())]
        found = of_images.predict(given)
        turned.load()  # it is still open
    files = ["plain.png", "plain.png", "plain.png", "cmyk.tif", "turned.jpg", "plain.png", "turned.jpg"]
    for one, file in zip(found, of_images.predict([tmp_path / name for name in files]), strict=True):
        torch.testing.assert_close(one.probabilities, file.probabilities)
    assert len(of_images.predict(image)) == len(of_images.predict((tmp_path / "plain.png").read_bytes())) == 1
    assert of_images.embed(image).shape == (1, 8)


def test_bytes_that_are_no_image_are_refused(of_images: Predictor) -> None:
    with pytest.raises(DataError, match="^inputs: not a readable image"):
        of_images.predict(b"no image")
    with pytest.raises(ValueError, match="^inputs must be finite pixels in 0..255, got values from -1 to -1; scale"):
        of_images.predict(np.full((30, 20, 3), -1))


def test_a_sound_in_bytes_is_heard_as_its_file_with_windows_too(checkpoint: Path, recording: Path) -> None:
    model = longseq.load(checkpoint)
    for window in (None, 0.2):
        of_bytes, of_file = (
            model.predict(source, window=window) for source in (recording.read_bytes(), recording)
        )  # fmt: skip
        for one, file in zip(of_bytes, of_file, strict=True):
            assert torch.equal(one.probabilities, file.probabilities)
            assert (one.start, one.end) == (file.start, file.end)
    with pytest.raises(ValueError, match="^inputs must be paths or arrays of sounds, or a list of them, got Image; "):
        model.predict(Image.new("L", (8, 8)))
    with pytest.raises(DataError, match="^inputs: "):
        model.predict(io.BytesIO(b"no sound").getvalue())
