"""What a search for a user's files leaves out, and the lines that say so."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from datamodules import AudioFolder, DataError, ImageFolder
from datamodules.own.find import SPLITS

RUN = {  # the files of a run that are pictures, and those by which it is known
    ".lock": b"process 1 on host\n", "config.yaml": b"", "splits.csv": b"",
    "card.png": b"", "0/validation/sprite.png": b"",
}  # fmt: skip


def write_run(folder: Path, names: tuple[str, ...] = tuple(RUN)) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(RUN[name])


def found(root: Path) -> tuple[list[str], int]:
    """The classes of a folder of images, and how many files it has."""
    data = ImageFolder(str(root))
    return data.class_names, len(data.items)


@pytest.mark.parametrize(
    "names",
    [tuple(RUN), (".lock",), ("config.yaml", "splits.csv", "card.png")],
    ids=["whole", "just begun, as another process sees it", "copied without hidden files"],
)
@pytest.mark.parametrize("place", ["runs/data/0", "cats/runs/data/0", "trained"])
def test_a_run_in_the_folder_of_the_data_is_no_class_and_a_line_says_so(place, names, images, capsys):
    write_run(images / place, names)
    assert found(images) == (["cats", "dogs"], 24)
    name = {"runs/data/0": "runs", "cats/runs/data/0": "runs", "trained": "trained"}[place]
    assert capsys.readouterr().err == f"{images}: left out the folder {name}: runs of longseq\n"


def test_a_run_beside_train_and_test_is_left_out_too(images, tmp_path, capsys):
    for split in ("train", "test"):
        shutil.copytree(images, tmp_path / "split" / split)
    write_run(tmp_path / "split/runs/split/0")
    write_run(tmp_path / "split/train/runs/split/0")
    assert found(tmp_path / "split") == (["cats", "dogs"], 48)
    assert capsys.readouterr().err == f"{tmp_path}/split: left out the folder runs and 1 more: runs of longseq\n"


def test_a_class_of_digits_and_one_called_runs_stay_classes(tmp_path):
    for name in ("0", "runs"):
        (tmp_path / name).mkdir()
        Image.new("L", (8, 8)).save(tmp_path / name / "a.png")
        (tmp_path / name / ".lock").touch()  # of another program
    assert found(tmp_path)[0] == ["0", "runs"]


def test_training_twice_in_the_folder_of_the_data_has_the_same_classes(images, command, monkeypatch):
    monkeypatch.chdir(images)
    flags = ["--model.encoder", "ImageEncoder", "--model.encoder.dim", "8", "--model.encoder.depth", "1"]
    flags += ["--model.encoder.heads", "1", "--model.encoder.attention", "Verma", "--trainer.max_epochs", "1"]
    for number in range(2):
        done = command("fit", "--data", "ImageFolder", "--data.root", ".", *flags, "--trainer.accelerator", "cpu")
        assert done.code == 0, done.err
        Image.new("L", (8, 8)).save(images / f"runs/data/{number}/card.png")
    done = command("check", "--data", "ImageFolder", "--data.root", ".")
    assert "samples of 2 classes" in done.out and "left out the folder runs: runs of longseq" in done.err
    done = command("predict", "--ckpt_path", "runs/data/1/best.ckpt", "--input", ".")
    assert len(done.out.splitlines()) == 24
    assert ".: left out the folder runs/data/0 and 1 more: runs of longseq" in done.err.replace("./", "")
    card = Path("runs/data/1/README.md").read_text()
    assert "## Remarks on the data\n\n- left out the folder runs: runs of longseq\n" in card


def test_files_of_other_kinds_are_counted_by_suffix(images, command):
    for name in ("cats/a.svg", "cats/b.SVG", "dogs/c.xcf", "dogs/deep/d.svg", "dogs/e", "dogs/.hidden.svg"):
        (images / name).parent.mkdir(exist_ok=True)
        (images / name).touch()
    said = f"{images}: left out 5 files of other kinds: 3 .svg, 1 .xcf, 1 without a suffix\n"
    for name in ("check", "stats", "shard"):
        flags = ["--out", images.parent / "shards"] if name == "shard" else []
        done = command(name, "--data", "ImageFolder", "--data.root", images, *flags)
        assert done.code == 0 and said in done.err


def test_a_class_of_other_kinds_alone_says_which(images):
    shutil.rmtree(images / "dogs")
    (images / "dogs").mkdir()
    (images / "dogs/a.svg").touch()
    with pytest.raises(DataError, match=r"dogs: class dogs has no readable file, only 1 \.svg; add some"):
        found(images)


def test_an_image_beside_the_folders_of_classes_is_not_left_out_in_silence(images, capsys):
    shutil.copy(images / "cats/00.png", images / "explained.png")
    assert found(images)[1] == 24
    said = "left out 1 file in no folder of a class, such as explained.png"
    assert capsys.readouterr().err == f"{images}: {said}\n"


def test_folders_that_a_system_makes_hold_no_samples(images, capsys):
    for folder in ("cats/@eaDir/00.png", "@eaDir", "#recycle/old", "__MACOSX/cats"):
        (images / folder).mkdir(parents=True)
        shutil.copy(images / "cats/00.png", images / folder / "SYNOPHOTO_THUMB_M.png")
    assert found(images) == (["cats", "dogs"], 24)
    said = "left out folders that a system has made: 2 @eaDir, 1 #recycle, 1 __MACOSX"
    assert capsys.readouterr().err == f"{images}: {said}\n"


def test_testing_is_the_test_of_training(images, tmp_path):
    for split in ("Training", "Testing"):
        shutil.copytree(images, tmp_path / "mri" / split)
    data = ImageFolder(str(tmp_path / "mri"))
    assert {item.split for item in data.items} == {"train", "test"} and len(data.items) == 48


def test_folders_of_splits_with_unclear_names_are_never_classes(images, tmp_path, capsys):
    for split in ("dev", "eval"):
        shutil.copytree(images, tmp_path / "unclear" / split)
    with pytest.raises(DataError, match="holds dev and eval, which may be any split; call them train, val and test"):
        found(tmp_path / "unclear")
    (tmp_path / "unclear/eval").rename(tmp_path / "unclear/train")
    assert found(tmp_path / "unclear")[1] == 24
    assert capsys.readouterr().err.endswith("nor in test; call it val or test to use it\n")
    assert not {"dev", "eval"} & {*SPLITS}


def test_sounds_of_other_kinds_are_counted_too(tmp_path, capsys):
    for name in "ab":
        (tmp_path / name).mkdir()
        soundfile.write(tmp_path / name / "x.wav", np.zeros(100), 8000)
        (tmp_path / name / "x.xyz").touch()
    assert len(AudioFolder(str(tmp_path)).items) == 2
    assert capsys.readouterr().err == f"{tmp_path}: left out 2 files of other kinds: 2 .xyz\n"


def test_classes_that_differ_in_capitals_alone_are_said(images, capsys):
    for name, other in (("cats", "Cats"), ("dogs", "dögs"), ("dogs", "do\u0308gs")):
        shutil.copytree(images / name, images / other)
        for number, path in enumerate(sorted((images / other).iterdir())):
            Image.new("L", (8, 8), number + 20 * len(other) + ord(other[0])).save(path)
    ImageFolder(str(images)).setup()
    said = "differ in capitals or blanks alone; if they are one, rename one"
    assert capsys.readouterr().err == (
        f"{images}: classes Cats and cats {said}\n{images}: classes do\u0308gs and dögs {said}\n"
    )


def test_a_class_with_one_file_is_said_to_be_untested(images, capsys):
    (images / "birds").mkdir()
    Image.new("L", (8, 8), 7).save(images / "birds/0.png")
    data = ImageFolder(str(images))
    data.setup()
    said = "no sample to test of class birds, so no figure says how well it is known; add some"
    assert capsys.readouterr().err == f"{images}: {said}\n" and data.remarks == [said]


def test_pages_that_are_not_read_are_counted_in_a_line(tmp_path: Path) -> None:
    for label in "ab":
        (tmp_path / label).mkdir()
        for number in range(6):
            pages = [Image.new("L", (8, 8), 10 * number + page + 100 * (label == "b")) for page in range(3)]
            pages[0].save(tmp_path / label / f"{number}.png")
    pages[0].save(tmp_path / "b/stack.tif", save_all=True, append_images=pages[1:])
    pages[1].save(tmp_path / "a/one.tif")
    data = ImageFolder(root=str(tmp_path))
    data.setup()
    (line,) = [line for line in data.remarks if "pages" in line]
    assert line.startswith("1 image of 14 has several pages or frames, the most 3 in b/stack.tif; "), line


@pytest.mark.parametrize("second", ["opposite", "equal", "silent", "other"])
def test_channels_that_cancel_each_other_are_said(second: str, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (2, 12, 4000))
    channels = {"opposite": -noise[0], "equal": noise[0], "silent": 0 * noise[0], "other": noise[1]}[second]
    for number, (left, right) in enumerate(zip(noise[0], channels, strict=True)):
        path = tmp_path / "ab"[number % 2] / f"{number}.wav"
        path.parent.mkdir(exist_ok=True)
        soundfile.write(path, np.stack([left, right], axis=1), 8000)
    data = AudioFolder(root=str(tmp_path))
    data.setup()
    lines = [line for line in data.remarks if "cancel" in line]
    assert len(lines) == (second == "opposite"), lines
    assert all(line.startswith("12 files of 12 have channels that cancel each other") for line in lines)
