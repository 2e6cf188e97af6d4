"""Digits, MNIST, and how image files of any kind are read."""

import gzip
import os
import shutil
import struct
import zlib

import numpy as np
import pillow_heif
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torchvision import datasets
from torchvision.transforms.v2 import functional

from datamodules import MNIST, DataError, Digits, ImageFolder, ImageShards
from datamodules.decoding.image_files import examine_image
from datamodules.images import ImageDataModule


class Colours(ImageDataModule):
    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__()
        self.class_names = ["a"]
        self.shape = (channels, height, width)

    def load(self):
        raise AssertionError("reading foreign files loads nothing")


GREY, RGB = Colours(1, 12, 20), Colours(3, 12, 20)


def bytes_of(images: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


def scikit_learns_digits() -> dict[bytes, int]:
    source = load_digits()
    images = np.rint(source.images * 15.9375).astype(np.uint8)
    return dict(zip((image.tobytes() for image in images), source.target.tolist(), strict=True))


def test_digits_are_scikit_learns_in_255_levels_with_a_stratified_fifth_for_test():
    data = Digits()
    data.setup()
    parts = (data.train_set, data.val_set, data.test_set)
    source = scikit_learns_digits()
    assert [len(part) for part in parts] == [1295, 143, 359]
    assert {image.numpy().tobytes(): int(label) for part in parts for image, label in part} == source
    per_class = np.bincount(list(source.values()))
    assert np.abs(data.test_set.labels.bincount().numpy() - per_class / 5).max() <= 0.5
    assert np.abs(data.val_set.labels.bincount().numpy() - per_class * 0.8 / 10).max() <= 0.6


def test_the_test_split_of_digits_is_the_same_for_every_seed_and_shares_no_image_with_training():
    one, other = Digits(seed=0), Digits(seed=1, val_fraction=0.3)
    one.setup()
    other.setup()
    assert torch.equal(one.test_set.inputs, other.test_set.inputs)
    assert not torch.equal(one.val_set.inputs[:100], other.val_set.inputs[:100])
    test = bytes_of(one.test_set.inputs)
    assert not test & bytes_of(torch.cat([one.train_set.inputs, one.val_set.inputs]))
    assert not bytes_of(one.train_set.inputs) & bytes_of(one.val_set.inputs)


def test_larger_digits_keep_their_brightness():
    small, large = Digits(), Digits(size=32)
    small.setup()
    large.setup()
    assert large.test_set.inputs.shape[1:] == large.shape == (1, 32, 32)
    difference = large.test_set.inputs.float().mean((1, 2, 3)) - small.test_set.inputs.float().mean((1, 2, 3))
    assert difference.abs().max() < 8


@pytest.fixture
def packed_mnist(real_data, tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, _ in datasets.MNIST.resources:
        os.symlink(real_data / "MNIST" / "raw" / name, folder / name)
    return tmp_path


def test_mnist_is_unpacked_without_a_network_and_has_the_documented_counts(packed_mnist, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("opened a connection"))
    data = MNIST(str(packed_mnist))
    data.setup()
    assert len(data.train_set) + len(data.val_set) == 60_000
    # every description of MNIST gives these counts of the digits in the test set
    assert data.test_set.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    share = data.val_set.labels.bincount() / (data.val_set.labels.bincount() + data.train_set.labels.bincount())
    assert torch.allclose(share, torch.tensor(0.1), atol=1e-3)
    # the first test image, read here from the documented layout: 16 bytes of header, then 28 x 28 bytes an image
    with gzip.open(packed_mnist / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz") as file:
        first = np.frombuffer(file.read(16 + 784)[16:], np.uint8).reshape(1, 28, 28)
    assert np.array_equal(data.test_set.inputs[0].numpy(), first)


def test_absent_mnist_says_which_file_goes_where(tmp_path):
    data = MNIST(str(tmp_path))
    with pytest.raises(DataError, match=r"MNIST/raw/train-images-idx3-ubyte.gz: no such file.*; .*download") as error:
        data.setup()
    assert "\n" not in str(error.value)


def test_an_archive_that_is_not_mnists_is_named_and_not_unpacked(tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, _ in datasets.MNIST.resources:
        (folder / name).write_bytes(gzip.compress(b"not digits"))
    data = MNIST(str(tmp_path))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: not the original file"):
        data.setup()


def test_a_folder_that_cannot_be_written_is_named(packed_mnist):
    (packed_mnist / "MNIST" / "raw" / "train-images-idx3-ubyte").mkdir()  # no file can replace this folder
    with pytest.raises(DataError, match=r"MNIST/raw: cannot fetch or unpack the files here \(.+\); copy"):
        MNIST(str(packed_mnist)).setup()


def test_half_unpacked_mnist_is_reported_as_broken(packed_mnist):
    MNIST(str(packed_mnist)).setup()
    with open(packed_mnist / "MNIST" / "raw" / "t10k-images-idx3-ubyte", "r+b") as file:
        file.truncate(100_000)
    data = MNIST(str(packed_mnist))
    with pytest.raises(DataError, match="MNIST/raw: broken files; delete"):
        data.setup()


def test_a_download_that_fails_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])
    with pytest.raises(DataError, match=r"MNIST/raw: .+; .+") as error:
        MNIST(str(tmp_path), download=True).setup()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16"])
@pytest.mark.parametrize("data", [GREY, RGB], ids=["grey", "rgb"])
def test_every_mode_of_pillow_becomes_the_modules_channels(mode, data, tmp_path):
    white = Image.new("L", (7, 5), 255)
    if mode in ("I", "I;16"):
        image = Image.fromarray(np.full((5, 7), 65535, np.int32 if mode == "I" else np.uint16))
    elif mode == "F":
        image = Image.fromarray(np.ones((5, 7), np.float32))
    else:
        image = white.convert("RGB").convert(mode) if mode != "PA" else white.convert("P").convert("PA")
    assert image.mode == mode
    path = tmp_path / ("x.png" if mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else "x.tiff")
    image.save(path)
    pixels = data.read(path)
    assert pixels.dtype == torch.uint8
    assert pixels.shape == data.shape
    assert pixels.min() >= 254


def test_colours_and_places_survive(tmp_path):
    image = Image.new("RGB", (40, 24), (255, 0, 0))
    image.paste((0, 0, 255), (20, 0, 40, 24))
    image.save(tmp_path / "x.png")
    pixels = RGB.read(tmp_path / "x.png")
    assert pixels[:, 6, 3].tolist() == [255, 0, 0]
    assert pixels[:, 6, 16].tolist() == [0, 0, 255]


def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path):
    Image.fromarray(np.full((12, 20), 257 * 100, np.uint16)).save(tmp_path / "x.png")
    assert GREY.read(tmp_path / "x.png").unique().tolist() == [100]


def test_exif_orientation_is_applied(tmp_path):
    stored = Image.new("L", (12, 20), 0)
    stored.paste(255, (0, 0, 12, 10))  # the upper half is bright
    exif = Image.Exif()
    exif[0x0112] = 6  # "turn by 90 degrees clockwise": then the right half is bright
    stored.save(tmp_path / "x.png", exif=exif)
    pixels = GREY.read(tmp_path / "x.png")
    assert pixels[0, :, :9].max() == 0
    assert pixels[0, :, 11:].min() == 255


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_laid_over_white_whatever_colour_it_hides(mode, tmp_path):
    image = Image.new("RGBA", (20, 12), (9, 9, 9, 0)).convert(mode)
    image.save(tmp_path / "x.png", **({"transparency": image.getpixel((0, 0))} if mode == "P" else {}))
    assert RGB.read(tmp_path / "x.png").unique().tolist() == [255]


def test_shrinking_averages_instead_of_skipping_pixels(tmp_path):
    stripes = np.zeros((480, 800), np.uint8)
    stripes[:, ::2] = 255
    Image.fromarray(stripes).save(tmp_path / "x.png")
    assert (GREY.read(tmp_path / "x.png").float() - 127.5).abs().max() < 8


@pytest.mark.parametrize("keep_aspect", [True, False])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "I;16"])
def test_a_large_image_is_read_in_bands_and_is_bit_for_bit_what_one_resizing_gives(mode, keep_aspect, tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (1500, 1100, 3), np.uint8)
    if mode == "RGBA":
        image = Image.fromarray(values).convert("RGBA")  # opaque
    elif mode == "RGB":
        image = Image.fromarray(values)
    else:
        values = values[:, :, :1]
        image = Image.fromarray(values[..., 0] if mode == "L" else values[..., 0] * np.uint16(257))
    image.save(tmp_path / "x.png")
    data = GREY if len(mode.strip("16;I")) < 2 else RGB
    height, width = (round(1500 * 20 / 1100), 20) if keep_aspect else (12, 20)
    top = round((height - 12) / 2)
    whole = functional.resize(torch.from_numpy(values).permute(2, 0, 1), [height, width], antialias=True)
    kind = type("Cut", (Colours,), {"keep_aspect": keep_aspect})
    assert torch.equal(kind(*data.shape).read(tmp_path / "x.png"), whole[:, top : top + 12])


def png(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds one pixel."""

    def chunk(content: bytes) -> bytes:
        return struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))

    header = chunk(b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT" + zlib.compress(bytes(2)))


def tiff_of_one_tile(side: int) -> bytes:
    """A TIFF of 16x16 pixels, stored in one tile of any size."""
    data = zlib.compress(bytes(100))
    tags = {
        256: 16,
        257: 16,
        258: 8,
        259: 8,
        262: 1,
        277: 1,
        322: side,
        323: side,
        324: 8 + 2 + 120 + 4,
        325: len(data),
    }
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "not a readable image"),
        (b"these are letters", "not a readable image (unknown format); "),
        (png(30, 30), "not a readable image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a readable image"),
        (png(10_000, 10_000), "more pixels than the limit"),
        (png(60_000, 60_000), "more pixels than the limit"),
        (png(1, 8_000_000), "1 x 8000000 pixels would become 160000000, more than the limit"),
        (tiff_of_one_tile(16), "not a readable image (decoder error"),
        (tiff_of_one_tile(20_000), "more pixels than the limit"),
    ],
    ids=["empty", "text", "cut off", "postscript", "100 megapixels", "3600 megapixels", "thin", "tile", "large tile"],
)
def test_a_broken_image_is_named_on_one_line(content, what, tmp_path):
    path = tmp_path / "broken.png"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        GREY.read(path)
    assert str(error.value).startswith(f"{path}: {what}")
    assert ";" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_truncated_jpeg_is_refused(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)
    Image.fromarray(noise).save(tmp_path / "whole.jpg")
    content = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "half.jpg").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"half\.jpg: not a readable image \(.*truncated"):
        GREY.read(tmp_path / "half.jpg")


def test_an_absent_image_is_named():
    with pytest.raises(DataError, match=r"^no/such\.png: no such file; "):
        GREY.read("no/such.png")


def test_what_mnist_reads_from_a_saved_digit_is_that_digit(packed_mnist, tmp_path):
    data = MNIST(str(packed_mnist))
    data.setup()
    Image.fromarray(data.test_set.inputs[3, 0].numpy()).save(tmp_path / "x.png")
    assert torch.equal(data.read(tmp_path / "x.png"), data.test_set.inputs[3])
    shutil.rmtree(packed_mnist / "MNIST")


@pytest.mark.parametrize("suffix", sorted(ImageDataModule.predict_suffixes))
def test_every_suffix_that_is_promised_can_be_read(suffix, tmp_path):
    pillow_heif.register_heif_opener()
    lossless = {"lossless": True} if suffix == ".avif" else {"quality": -1} if suffix in (".heic", ".heif") else {}
    image = Image.new("L", (20, 12), 77).convert("RGB" if suffix == ".qoi" else "L")
    image.save(tmp_path / f"x{suffix}", **lossless)
    assert (GREY.read(tmp_path / f"x{suffix}").float() - 77).abs().max() <= 2


@pytest.mark.parametrize("suffix", [".avif", ".heic", ".jp2", ".tga"])
def test_colours_and_places_survive_in_formats_of_telephones_scanners_and_games(suffix, tmp_path):
    pillow_heif.register_heif_opener()
    image = Image.new("RGB", (40, 24), (255, 0, 0))
    image.paste((0, 0, 255), (20, 0, 40, 24))
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees: the right half is red
    image.save(tmp_path / f"x{suffix}", **({"exif": exif, "quality": 90} if suffix == ".avif" else {}))
    left, right = ([0, 0, 255], [255, 0, 0]) if suffix == ".avif" else ([255, 0, 0], [0, 0, 255])
    pixels = RGB.read(tmp_path / f"x{suffix}").int()
    assert (pixels[:, 6, 3] - torch.tensor(left)).abs().max() < 12
    assert (pixels[:, 6, 16] - torch.tensor(right)).abs().max() < 12


def test_an_image_of_a_telephone_without_its_decoder_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("datamodules.decoding.image_files._has_heif", lambda: False)
    (tmp_path / "x.HEIC").touch()
    with pytest.raises(DataError, match=r"x\.HEIC: \.heic needs pillow-heif; pip install 'longseq\[heic\]', or conve"):
        GREY.read(tmp_path / "x.HEIC")


@pytest.mark.parametrize("suffix", [".avif", ".heic", ".j2k", ".jp2", ".pcx", ".qoi", ".sgi", ".tga"])
@pytest.mark.parametrize("share", [0.1, 0.6])
def test_a_file_of_any_kind_that_is_cut_off_is_refused(suffix, share, tmp_path):
    pillow_heif.register_heif_opener()
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / f"whole{suffix}")
    content = (tmp_path / f"whole{suffix}").read_bytes()
    (tmp_path / f"half{suffix}").write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match="not a readable image"):
        examine_image(tmp_path / f"half{suffix}")


def test_letters_are_no_image_whatever_their_suffix(tmp_path):
    for suffix in sorted(ImageDataModule.predict_suffixes):
        (tmp_path / f"x{suffix}").write_bytes(b"these are letters")
        with pytest.raises(DataError, match="not a readable image"):
            GREY.read(tmp_path / f"x{suffix}")


def deep(root, bits: int, kind: type = np.uint16, suffix: str = ".png", low: float = 0.0) -> None:
    """Two classes of ten grey images each, whose brightest value is the largest of so many bits."""
    generator = np.random.default_rng(bits)
    for name in "ab":
        (root / name).mkdir(parents=True)
        for number in range(10):
            values = generator.uniform(low, 1, (8, 8))
            values[0, 0] = 1
            Image.fromarray((values * (2**bits - 1)).astype(kind)).save(root / name / f"{number}{suffix}")


@pytest.mark.parametrize(("bits", "white"), [(8, 255), (10, 1023), (12, 4095), (14, 16383), (15, None), (16, None)])
@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_images_of_fewer_bits_in_files_of_16_are_said_and_read_with_their_white(bits, white, suffix, tmp_path, capsys):
    deep(tmp_path, bits, suffix=suffix)
    data = ImageFolder(str(tmp_path), grayscale=True)
    data.setup()
    what = (
        f"{tmp_path}: no value in 20 images is above {white}, and 65535 is white, so they are nearly black; give the "
    )
    said = "" if white is None else f"{what}value that is white, such as --data.white {white}\n"
    assert capsys.readouterr().err == said
    if white is not None:
        data = ImageFolder(str(tmp_path), grayscale=True, white=white)
        data.setup()
        values = np.asarray(Image.open(tmp_path / data.train_set.names[0]), dtype=float)
        assert (data.train_set.inputs[0, 0].numpy() == np.round(values / white * 255)).all()
        assert capsys.readouterr().err == ""


def test_floats_below_zero_are_said_and_those_in_another_unit_are_read_with_their_white(tmp_path, capsys):
    deep(tmp_path / "signed", 1, np.float32, ".tif", low=-1)
    ImageFolder(str(tmp_path / "signed")).setup()
    assert "signed: values below 0 in 20 images, down to -0.9" in capsys.readouterr().err
    deep(tmp_path / "eight", 8, np.float32, ".tif")
    with pytest.raises(
        DataError, match=r"a/0\.tif: values up to 255, where 1 is white; divide them, or .*--data\.white"
    ):
        ImageFolder(str(tmp_path / "eight")).setup()
    for white in (255, 60):  # 60 is too little for 255, but what was found with 255 is kept
        data = ImageFolder(str(tmp_path / "eight"), white=white)
        assert len(data.bad_files()) == (20 if white == 60 else 0)


def test_colours_of_16_bits_that_are_nearly_black_are_said(tmp_path, capsys):
    def png_of_16_bits(path, value: int) -> None:
        def chunk(content: bytes) -> bytes:
            return struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))

        rows = b"".join(b"\0" + struct.pack(">12H", *[value] * 12) for _ in range(4))
        header = chunk(b"IHDR" + struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0))
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT" + zlib.compress(rows)) + chunk(b"IEND"))

    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(6):
            png_of_16_bits(tmp_path / name / f"{number}.png", 4095 - number - 10 * (name == "b"))
    ImageFolder(str(tmp_path)).setup()
    what = (
        "no value in 12 colour images of 16 bits is above 5.9% of white, so they are nearly black; scale them to 8 bits"
    )
    assert capsys.readouterr().err == f"{tmp_path}: {what}\n"


def test_shards_of_images_are_read_with_the_white_of_their_folder(command, tmp_path):
    deep(tmp_path / "folder", 12)
    flags = ["--data.root", tmp_path / "folder", "--data.white", "4095", "--data.grayscale", "true"]
    done = command("shard", "--data", "ImageFolder", *flags, "--out", tmp_path / "shards")
    assert done.code == 0 and "--data.white 4095" in done.out
    folder = ImageFolder(str(tmp_path / "folder"), white=4095, grayscale=True)
    shards = ImageShards(str(tmp_path / "shards"), white=4095, grayscale=True)
    for data in (folder, shards):
        data.setup()
    assert torch.equal(folder.train_set.inputs, shards.train_set.inputs)
    assert len(ImageShards(str(tmp_path / "shards"), white=100).bad_files()) == 20


def test_a_white_that_is_not_given_changes_no_digest_of_before():
    assert ImageFolder("x", size=8).settings_of_reading() == [(3, 8, 8), True]


def test_what_libtiff_says_of_a_damaged_image_has_its_name(tmp_path, capfd):
    path = tmp_path / "x.tif"
    Image.fromarray(np.random.default_rng(0).random((300, 300)) > 0.5).save(path, compression="group4")
    content = bytearray(path.read_bytes())
    content[5000:5040] = bytes(byte ^ 255 for byte in content[5000:5040])
    path.write_bytes(content)
    assert examine_image(path) == {"height": 300, "width": 300}
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{path}: Fax4Decode: ")
