"""The memory for an image is bounded before decoding, and the bound includes the enlarged image."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules import ImageFolder
from longseq.reports.cell import peak_of

MIB = 2**20
SMALL = ["--model.encoder", "ImageEncoder", "--model.encoder.dim", "8", "--model.encoder.depth", "1",
         "--model.encoder.heads", "1", "--model.encoder.attention", "Verma", "--trainer.max_steps", "1",
         "--trainer.enable_progress_bar", "false", "--experiment", "imagefolder"]  # fmt: skip
THIN = "4000000 x 1 pixels would become 256000000, more than the limit that guards memory"


@pytest.fixture
def thin(images):
    """A PNG of 563 bytes among images of 8x8; enlarged to a height of 8, it would have 256 million pixels."""
    Image.new("1", (4_000_000, 1)).save(images / "cats/thin.png")
    assert os.path.getsize(images / "cats/thin.png") < 1000
    return images


@pytest.mark.parametrize("aspect", ["true", "false"])
def test_an_image_that_would_be_enlarged_beyond_memory_is_named_by_every_command_of_data(
    aspect, thin, command, tmp_path
):
    flags = ["--data", "ImageFolder", "--data.root", thin, "--data.keep_aspect", aspect]
    if aspect == "false":
        flags += ["--data.size", "64"]
    peak = peak_of(torch.device("cpu"))
    checked = command("check", *flags)
    others = [command("stats", *flags), command("fit", *flags, *SMALL)]
    assert peak() < 250 * MIB
    assert (checked.code, checked.out.partition(";")[0]) == (3, f"cats/thin.png: {THIN}")
    for done in others:
        assert (done.code, f"{thin}/cats/thin.png: {THIN}" in done.error) == (3, True), done.err
    assert not (tmp_path / "runs/imagefolder/0").exists()


def test_predict_names_it_and_leaves_it_out(thin, command):
    flags = ["--data", "ImageFolder", "--data.root", thin, "--data.on_error", "skip"]
    assert command("fit", *flags, *SMALL).code == 0
    peak = peak_of(torch.device("cpu"))
    done = command("predict", "--ckpt_path", "runs/imagefolder/0/last.ckpt", "--input", thin / "cats")
    assert (done.code, len(done.out.splitlines()), f"cats/thin.png: {THIN}" in done.err) == (0, 12, True), done.err
    assert peak() < 250 * MIB


@pytest.mark.thorough
def test_photographs_of_81_megapixels_are_decoded_one_at_a_time(tmp_path):
    """One image takes 324 MB in Pillow alone. Earlier code copied it four times, with one thread for every core."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        image = Image.new("RGB", (9000, 9000), (200, 100, 50))
        image.putpixel((0, 0), (ord(name), 0, 0))  # no copy of the other class's
        image.save(tmp_path / name / "0.png", compress_level=1)
    data = ImageFolder(str(tmp_path), in_memory=True)
    peak = peak_of(torch.device("cpu"))
    assert data.bad_files() == {}
    samples = data.samples_at(data.columns(), torch.arange(2))
    assert peak() < 500 * MIB
    assert data.shape == (3, 64, 64)
    assert all(image[:, 30, 30].tolist() == [200, 100, 50] for image in samples.inputs)


def test_what_is_cut_off_a_long_image_is_not_kept(tmp_path):
    Image.fromarray(np.zeros((8, 50_000), np.uint8)).save(tmp_path / "x.png")
    image = ImageFolder(str(tmp_path), size=64).read(tmp_path / "x.png")
    assert image.untyped_storage().nbytes() == 3 * 64 * 64


@pytest.mark.parametrize(
    ("value", "kind", "what"),
    [
        (np.nan, np.float32, "values that are not finite"),
        (255, np.float32, "values up to 255, where 1 is white"),
        (2**30, np.int32, "values up to 1.07374e+09, where 65535 is white"),
    ],
)
def test_deep_values_that_would_be_black_or_white_without_a_word_are_broken(value, kind, what, images):
    values = np.zeros((8, 8), kind)
    values[7, 7] = value
    Image.fromarray(values).save(images / "dogs/x.tiff")
    said = f"{what}; divide them, or give the value of white, --data.white"
    if np.isnan(value):
        said = f"not a readable image ({what}); convert it to PNG or JPEG"
    assert ImageFolder(str(images)).bad_files() == {"dogs/x.tiff": said}
