"""Files with the same content are never in two random splits. They are said where the user's own splits share them, and
refused where their labels contradict each other."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from datamodules import AudioFolder, DataError, ImageFolder
from datamodules.hold_out import hold_out_files
from datamodules.own._copies import merged


def copy(root: Path, *pairs: tuple[str, str]) -> None:
    for first, second in pairs:
        (root / second).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / first, root / second)


def split_of(data) -> dict[str, str]:
    data.setup()
    return {name: split for split, samples in data.splits().items() for name in samples.names}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("folds", [None, 3])
def test_copies_are_never_in_two_random_splits(seed, folds, images, capsys):
    pairs = [(f"{name}/{n:02}.png", f"{name}/{n:02} - Copy.png") for name in ("cats", "dogs") for n in range(12)]
    copy(images, *pairs)
    options = {} if folds is None else {"folds": folds, "fold": 1}
    splits = split_of(ImageFolder(str(images), seed=seed, **options))
    assert len(splits) == 48 and {*splits.values()} == {"train", "val", "test"}
    assert [splits[first] for first, _ in pairs] == [splits[second] for _, second in pairs]
    said = "copies of other files in the same split: 24, such as cats/00.png of cats/00 - Copy.png"
    assert capsys.readouterr().err == f"{images}: {said}\n"


def test_without_copies_the_split_is_that_of_the_names_of_files_alone(images, capsys):
    splits = split_of(ImageFolder(str(images)))
    names = sorted(splits)
    held = hold_out_files(torch.tensor([0] * 12 + [1] * 12), names, 0.2, 0)[1]
    assert [name for name in names if splits[name] == "test"] == [names[number] for number in held]
    assert capsys.readouterr().err == ""


def test_groups_that_share_a_file_are_one_group(images):
    for n in range(12):
        (images / f"cats/{n:02}.png").rename(images / f"cats/p{n // 2}-{n}.png")
        (images / f"dogs/{n:02}.png").rename(images / f"dogs/q{n // 2}-{n}.png")
    copy(images, ("cats/p0-0.png", "cats/p5-x.png"), ("cats/p5-10.png", "cats/p2-x.png"))
    for seed in range(4):
        splits = split_of(ImageFolder(str(images), groups="[pq][0-9]+", seed=seed))
        assert len({split for name, split in splits.items() if "/p0" in name or "/p5" in name or "/p2" in name}) == 1


def test_names_are_merged_as_a_plain_search_merges_them():
    generator = np.random.default_rng(0)
    for _ in range(50):
        names = [f"n{number}" for number in generator.integers(0, 12, 20)]
        contents = [f"c{number}" for number in generator.integers(0, 15, 20)]
        expected = list(names)
        for _ in range(20):  # each sample takes the first name of all that share its content or its name
            expected = [
                min(
                    expected[j]
                    for j in range(20)
                    if contents[i] == contents[j] or names[i] == names[j] or expected[i] == expected[j]
                )
                for i in range(20)
            ]
        assert merged(names, contents) == expected


def test_a_file_of_the_test_that_is_in_the_training_too_is_said_and_is_in_the_card(images, command, tmp_path):
    root = tmp_path / "own"
    for split in ("train", "val", "test"):
        for name in ("cats", "dogs"):
            for n in {"train": range(8), "val": range(8, 10), "test": range(10, 12)}[split]:
                (root / split / name).mkdir(parents=True, exist_ok=True)
                shutil.copy(images / f"{name}/{n:02}.png", root / split / name)
    copy(root, ("train/cats/03.png", "test/cats/x.png"), ("train/cats/03.png", "val/cats/y.png"))
    said = [
        f"in {other} too: 1 of the 5 files of {split}, such as {split}/cats/{name}.png, which is "
        f"{other}/cats/{second}.png too; the figures may be too good"
        for split, name, other, second in (
            ("val", "y", "train", "03"),
            ("test", "x", "train", "03"),
            ("test", "x", "val", "y"),
        )
    ]
    for name in ("check", "stats"):
        done = command(name, "--data", "ImageFolder", "--data.root", root)
        assert (done.code, done.err) == (0, "".join(f"{root}: {line}\n" for line in said))
    flags = ["--model.encoder", "ImageEncoder", "--model.encoder.dim", "8", "--model.encoder.depth", "1"]
    flags += ["--model.encoder.heads", "1", "--model.encoder.attention", "Verma", "--trainer.max_epochs", "1"]
    done = command("fit", "--data", "ImageFolder", "--data.root", root, *flags, "--trainer.accelerator", "cpu")
    assert done.code == 0 and all(f"{root}: {line}\n" in done.err for line in said), done.err
    card = (tmp_path / "runs/own/0/README.md").read_text()
    assert "## Remarks on the data\n\n" + "".join(f"- {line}\n" for line in said) in card


def test_a_file_in_two_classes_is_refused_or_left_out(images, command):
    copy(images, ("cats/00.png", "dogs/x.png"), ("cats/00.png", "cats/y.png"))
    done = command("check", "--data", "ImageFolder", "--data.root", images)
    assert done.code == 3 and sorted(done.out.splitlines()) == [
        "cats/00.png: the same content as dogs/x.png, which is of class dogs; keep one of them",
        "cats/y.png: the same content as dogs/x.png, which is of class dogs; keep one of them",
        "dogs/x.png: the same content as cats/00.png, which is of class cats; keep one of them",
    ]
    with pytest.raises(DataError, match=r"cats/00\.png: the same content as dogs/x\.png, .*; 2 more broken files: .*"):
        ImageFolder(str(images)).setup()
    assert len(split_of(ImageFolder(str(images), on_error="skip"))) == 23


@pytest.mark.parametrize(("labels", "is_refused"), [(["low", "low"], False), (["low;high", "low"], True)])
def test_a_copy_of_a_recording_with_other_labels_is_refused_too(labels, is_refused, tmp_path):
    generator = np.random.default_rng(0)
    lines = ["path,label,start,end"]
    for n in range(12):
        soundfile.write(tmp_path / f"{n}.wav", generator.uniform(-0.5, 0.5, 1600), 8000)
        lines.append(f"{n}.wav,{'high' if n % 2 else 'low'},0,0.1")
    copy(tmp_path, ("0.wav", "x.wav"), ("1.wav", "y.wav"))
    lines[1] = f"0.wav,{labels[0]},0,0.1"
    lines += [f"x.wav,{labels[1]},0,0.1", "y.wav,low,0.1,0.2"]  # another part of a copy may have another label
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    data = AudioFolder(str(tmp_path), table="t.csv", labels_separator=";")
    if is_refused:
        classes = "which is of high, low; keep one of them"
        assert data.bad_files()["x.wav 0-0.1"] == f"the same content as 0.wav 0-0.1, {classes}"
    else:
        splits = split_of(data)
        assert splits["0.wav 0-0.1"] == splits["x.wav 0-0.1"] and splits["1.wav 0-0.1"] == splits["y.wav 0.1-0.2"]
