"""The first run on a folder decodes each file once, for the scan and for the inputs in memory together."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image, ImageFile

from datamodules import AudioFolder, DataModule, ImageFolder
from datamodules.decoding.sound_files import change_rate, read_sound


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


@pytest.fixture
def frames_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The frames that libsndfile decodes, read by read."""
    numbers: list[int] = []
    read = soundfile.SoundFile.read

    def counted(file: soundfile.SoundFile, *arguments: Any, **options: Any) -> np.ndarray:
        block = read(file, *arguments, **options)
        numbers.append(len(block))
        return block

    monkeypatch.setattr(soundfile.SoundFile, "read", counted)
    return numbers


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Two classes of nine recordings of half a second to a second, of several rates, channels and formats."""
    generator = np.random.default_rng(0)
    for number in range(18):
        rate_hz, channels = (8000, 8000, 11_025)[number % 3], 1 + number // 6 % 2
        suffix, bits = (("wav", "PCM_16"), ("flac", "PCM_24"), ("aiff", "PCM_16"), ("wav", "FLOAT"))[number % 4]
        path = tmp_path / "recordings" / "ab"[number % 2] / f"{number:02}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        samples = generator.uniform(-1, 1, (rate_hz // 2 + 500 * number % 4000, channels))
        soundfile.write(path, samples, rate_hz, bits)
    return tmp_path / "recordings"


def test_each_recording_is_decoded_once_and_gives_the_input_that_reading_it_alone_gives(recordings, frames_read):
    inputs = inputs_of(data := AudioFolder(str(recordings)))
    assert sum(frames_read) == sum(facts["frames"] for facts in data.facts.values())
    for item in data.items:
        waveform, rate_hz = read_sound(recordings / item.path)
        assert torch.equal(inputs[item.name], change_rate(waveform, rate_hz, 8000))


def test_sounds_that_are_not_read_in_one_piece_are_read_again(recordings):
    generator = np.random.default_rng(1)
    for suffix, name in (("mp3", "MP3"), ("ogg", "OGG")):
        soundfile.write(recordings / f"a/x.{suffix}", generator.uniform(-0.5, 0.5, 30_000), 8000, format=name)
    inputs = inputs_of(AudioFolder(str(recordings), seconds=10.0))
    for name in ("a/x.mp3", "a/x.ogg"):
        assert torch.equal(inputs[name], read_sound(recordings / name)[0])


def test_parts_of_recordings_and_files_in_two_rows_are_those_of_a_second_run(recordings):
    (recordings / "table.csv").write_text(
        "path,label,start,end\n"
        + "".join(f"{path.relative_to(recordings)},{path.parent.name},,\n" for path in sorted(recordings.rglob("*.*")))
        + "a/00.wav,a,0.1,0.3\na/00.wav,a,0.2,0.4\n"
    )
    first, second = (inputs_of(AudioFolder(str(recordings), table="table.csv")) for _ in range(2))
    assert len(first) == 20 and all(torch.equal(first[name], second[name]) for name in second)


def test_a_scan_keeps_no_recordings_that_may_be_too_long_for_memory(recordings, frames_read, monkeypatch):
    size = sum(path.stat().st_size for path in recordings.rglob("*.*"))
    for limit, times in ((4 * size, 1), (4 * size - 1, 2)):
        monkeypatch.setattr("datamodules.own.audio_folder.IN_MEMORY_BYTES", limit)
        for path in recordings.rglob("*.*"):
            path.touch()  # so that the next scan reads it again
        frames_read.clear()
        inputs_of(data := AudioFolder(str(recordings)))
        assert sum(frames_read) == times * sum(facts["frames"] for facts in data.facts.values())


@pytest.mark.parametrize("in_memory", [None, False])
def test_a_scan_keeps_no_waveform_beside_the_splits(in_memory, recordings):
    data = AudioFolder(str(recordings), in_memory=in_memory)
    data.setup("fit")
    assert not data._decoded
