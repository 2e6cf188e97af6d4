"""Folders whose names or links could mislead."""

import os

import pytest
import torch
from matplotlib.text import Text
from PIL import Image

from datamodules import DataError, ImageFolder
from longseq.training.pictures import draw_confusions, draw_images


def test_a_link_that_leads_up_gives_no_file_the_label_of_another(tmp_path):
    """Also a class folder that is a link itself, and one beside the classes."""
    for name in ("store/a", "data/b"):
        (tmp_path / name).mkdir(parents=True)
        for file in range(10):
            Image.new("L", (4, 4), file).save(tmp_path / name / f"{file}.png")
    data = tmp_path / "data"
    (data / "a").symlink_to(tmp_path / "store/a")
    (tmp_path / "store/a/up").symlink_to(data)
    (data / "b/up").symlink_to("..")
    (data / "b/top").symlink_to("/")
    (data / "self").symlink_to(".")
    found = ImageFolder(str(data)).items
    assert sorted((item.path, item.label) for item in found) == sorted(
        (f"{name}/{file}.png", name) for name in "ab" for file in range(10)
    )


def test_a_class_may_be_called_train_if_no_folders_are_in_it(images):
    (images / "dogs").rename(images / "train")
    data = ImageFolder(str(images))
    assert data.class_names == ["cats", "train"]
    data.setup()
    assert [len(samples) for samples in data.splits().values()] == [18, 2, 4]


@pytest.mark.parametrize("deep", [True, False])
def test_val_and_test_without_train_are_no_classes(deep, images, tmp_path):
    root = tmp_path / "root"
    for part, name in (("val", "cats"), ("test", "dogs")):
        (root / part).mkdir(parents=True)
        (images / name).rename(root / part / name if deep else root / part / "x")
        if not deep:
            for file in (root / part / "x").iterdir():
                file.rename(root / part / file.name)
            (root / part / "x").rmdir()
    with pytest.raises(
        DataError, match=r"root: holds test and val, but no train with a folder for each class; add it$"
    ):
        ImageFolder(str(root)).setup()


def test_class_names_with_dollars_are_drawn_as_they_are(tmp_path):
    names = ["$a$", "$\\oops{$"]
    figures = [draw_confusions(torch.eye(2, dtype=torch.int64), names), draw_images(torch.zeros(2, 1, 4, 4), names)]
    for number, figure in enumerate(figures):
        figure.savefig(tmp_path / f"{number}.png")  # as mathematics the second is an error, and the first slanted
    assert not any(
        text.get_parse_math() for figure in figures for text in figure.findobj(Text) if "$" in text.get_text()
    )
    assert sum("$" in text.get_text() for figure in figures for text in figure.findobj(Text)) >= 6


def test_file_names_that_are_not_utf_8_are_written_down(images, tmp_path):
    (images / "cats/00.png").rename(images / os.fsdecode(b"cats/\xff.png"))
    data = ImageFolder(str(images))
    data.setup()
    data.save_splits(tmp_path / "splits.csv")
    assert b"\ncats/\xff.png,cats," in (tmp_path / "splits.csv").read_bytes().replace(b"\r", b"")
