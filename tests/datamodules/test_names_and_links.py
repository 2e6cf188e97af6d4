"""Folders whose names or links could mislead."""

import os
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from matplotlib.text import Text
from PIL import Image

from datamodules import AudioFolder, DataError, ImageFolder
from longseq.encoders.drawing import draw_images
from longseq.training.board.pictures import draw_confusions


def test_a_link_that_leads_up_gives_no_file_the_label_of_another(tmp_path):
    """Two more links: one is itself a class folder, and one lies beside the class folders."""
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
    figures = [
        draw_confusions(torch.eye(2, dtype=torch.int64), names),
        draw_images(list(torch.zeros(2, 1, 4, 4)), names),
    ]
    for number, figure in enumerate(figures):
        # read as mathematics, the second name would be an error, and the first would be slanted
        figure.savefig(tmp_path / f"{number}.png")
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


TINY = ["--model.encoder.dim", "8", "--model.encoder.depth", "1", "--model.encoder.heads", "1",
        "--trainer.max_steps", "2", "--trainer.enable_progress_bar", "false"]  # fmt: skip


def noises(folder: Path, num_samples: int) -> None:
    folder.mkdir(parents=True)
    for number in range(12):
        generator = np.random.default_rng([number, *folder.name.encode()])
        soundfile.write(folder / f"{number}.wav", generator.uniform(-0.5, 0.5, num_samples), 8000)


def test_sounds_whose_names_are_not_utf_8_are_read(tmp_path):
    noises(tmp_path / "a", 800)
    noises(tmp_path / "b", 800)
    (tmp_path / "a/0.wav").rename(tmp_path / os.fsdecode(b"a/\xff.wav"))
    data = AudioFolder(str(tmp_path))
    assert data.bad_files() == {}
    data.setup()
    assert len(data.train_set) + len(data.val_set) + len(data.test_set) == 24


def test_a_class_whose_name_is_not_utf_8_is_refused_before_a_run_begins(images, command, tmp_path):
    (images / "dogs").rename(images / os.fsdecode(b"do\xffgs"))
    for start in (["fit", "--model.encoder", "ImageEncoder", "--model.encoder.attention", "Verma"], ["check"]):
        done = command(*start, "--data", "ImageFolder", "--data.root", images)
        said = f"error: {images}/do\\xffgs: the name of a class is not UTF-8; rename the folder"
        assert (done.code, done.error) == (3, said)
    assert not list(tmp_path.glob("runs/*"))


def test_clips_of_one_sample_and_classes_called_like_broken_mathematics_train(command, tmp_path):
    noises(tmp_path / "data/$\\frac{", 1)
    noises(tmp_path / "data/$x", 1)
    sound = ["--data", "AudioFolder", "--data.root", "data", "--model.encoder", "SpectrogramEncoder"]
    linformer = ["--model.encoder.attention", "Linformer", "--model.encoder.attention.k", "1"]
    done = command("fit", *sound, *linformer, *TINY)
    assert done.code == 0, done.err
    done = command("preview", *sound, *linformer, *TINY[:6])
    assert done.code == 0, done.err
    done = command("predict", "--ckpt_path", next(tmp_path.rglob("best.ckpt")), "--input", "data")
    assert (done.code, len(done.out.splitlines())) == (0, 24), done.err
