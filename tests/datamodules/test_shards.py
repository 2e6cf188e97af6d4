"""Shards: the same data as in files, the same order everywhere, and what is wrong with a shard is said in one line."""

import errno
import fcntl
import hashlib
import io
import json
import os
import random
import shutil
import tarfile
from datetime import date
from pathlib import Path
from typing import NoReturn

import forked
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import soundfile
import torch
from PIL import Image
from small_sets import SMALL, noise, picture

from datamodules import (
    CIFAR10,
    ESC50,
    AudioFolder,
    AudioShards,
    DataError,
    ImageFolder,
    ImageShards,
    SpeechCommands,
    Vowels,
)
from datamodules.archives._shard_index import index_of
from datamodules.archives.write_shards import write_tar

PNG = frozenset({".png"})


def png(colour: int = 0, side: int = 8) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), (colour, 0, 0)).save(file, "PNG")
    return file.getvalue()


def wav(level: float, rate_hz: int = 8000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.full(rate_hz // 10, level), rate_hz, format="WAV")
    return file.getvalue()


def tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tar(path, iter(members.items()))
    return path


def labelled(labels: list[object], first: int = 0) -> dict[str, bytes]:
    """Samples 000, 001, ... whose colour is their number."""
    members = {}
    for number, label in enumerate(labels, start=first):
        members |= {f"{number:03}.png": png(number), f"{number:03}.cls": str(label).encode()}
    return members


def shards_of(data, folder: Path, samples_per_shard: int = 6):
    """The data module that reads what this one writes, with the flags that the command prints."""
    data.setup()
    data.write_shards(folder, samples_per_shard)
    kind, *flags = data.flags_of_shards(str(folder))
    given = {name.removeprefix("--data."): value for name, value in zip(flags[::2], flags[1::2], strict=True)}
    plain = {name: json.loads(value) if name != "root" else value for name, value in given.items()}
    return {"ImageShards": ImageShards, "AudioShards": AudioShards}[kind](**plain, batch_size=data.batch_size)


def flat(batch) -> list[torch.Tensor]:
    inputs, labels = batch
    return [*(inputs.values() if isinstance(inputs, dict) else [inputs]), labels]


def assert_same_batches(one, other) -> None:
    for name in ("train", "val", "test"):
        pairs = zip(getattr(one, f"{name}_dataloader")(), getattr(other, f"{name}_dataloader")(), strict=True)
        for batch, again in pairs:
            assert all(torch.equal(a, b) for a, b in zip(flat(batch), flat(again), strict=True))


@pytest.mark.parametrize(
    "kind", [ImageFolder, AudioFolder, ESC50, SpeechCommands, CIFAR10, Vowels], ids=lambda kind: kind.__name__
)
def test_shards_give_the_batches_of_the_data_that_they_were_written_from(kind, tmp_path, monkeypatch):
    data = SMALL[kind](tmp_path / "files" if kind is not CIFAR10 else tmp_path, monkeypatch)
    if kind is SpeechCommands:
        data.task = "12"  # silence is parts of a long recording
    data.batch_size = 7
    shards = shards_of(data, tmp_path / "shards")
    shards.in_memory, shards.num_workers = (False, 2) if kind is ImageFolder else (None, 0)
    shards.setup()
    assert shards.class_names == data.class_names
    assert_same_batches(data, shards)


def test_shards_of_real_recordings_give_the_batches_of_the_recordings(real_data, tmp_path):
    names = [f"{digit}_{speaker}_{take}.wav" for digit in (3, 8) for speaker in ("theo", "lucas") for take in range(8)]
    (tmp_path / "t.csv").write_text("path,label\n" + "".join(f"{name},{name[0]}\n" for name in names))
    recordings = real_data / "free-spoken-digit-dataset/recordings"
    data = AudioFolder(str(recordings), table=str(tmp_path / "t.csv"), batch_size=7)
    shards = shards_of(data, tmp_path / "shards", 10)
    shards.setup()
    assert data.seconds == AudioShards(str(tmp_path / "shards")).seconds
    assert_same_batches(data, shards)


def test_a_sample_holds_the_bytes_of_its_file_and_a_part_of_a_recording_is_a_lossless_clip(tmp_path):
    for number in range(8):
        noise(tmp_path / f"files/{number}.wav", 8000, 1)
    rows = [f"{number}.wav,{'ab'[number % 2]},{start}\n" for number in range(8) for start in (0, 0.4)]
    (tmp_path / "files/t.csv").write_text("path,label,start\n" + "".join(rows))
    data = AudioFolder(str(tmp_path / "files"), table="t.csv")
    shards_of(data, tmp_path / "shards", 100)
    with tarfile.open(tmp_path / "shards/train-00000-of-00001.tar") as archive:
        members = {member.name: archive.extractfile(member).read() for member in archive}
    assert any(name.endswith("4-end.flac") for name in members)
    for name, content in members.items():
        if name.endswith(".wav"):
            assert content == (tmp_path / "files" / name).read_bytes()
        elif name.endswith(".flac"):
            source, _ = soundfile.read(tmp_path / f"files/{name[0]}.wav", dtype="int16", start=3200)
            assert np.array_equal(soundfile.read(io.BytesIO(content), dtype="int16")[0], source)


def test_several_classes_at_once_survive_the_writing(tmp_path):
    labels = ["a", "b", "a;b", "", "a", "b", "a;b", ""] * 3
    for number in range(len(labels)):
        picture(tmp_path / f"files/{number}.png")
    rows = [f"{number}.png,{label}\n" for number, label in enumerate(labels)]
    (tmp_path / "files/t.csv").write_text("path,label\n" + "".join(rows))
    data = ImageFolder(str(tmp_path / "files"), table="t.csv", labels_separator=";")
    shards = shards_of(data, tmp_path / "shards")
    shards.setup()
    assert shards.train_set.labels.ndim == 2
    assert_same_batches(data, shards)


@pytest.fixture
def images(tmp_path) -> Path:
    """Three shards of 10, 20 and 11 samples of two classes, of which 11 are the test."""
    tar(tmp_path / "train-0.tar", labelled([number % 2 for number in range(10)]))
    tar(tmp_path / "train-1.tar", labelled([number % 2 for number in range(20)], 10))
    tar(tmp_path / "test-0.tar", labelled([number % 2 for number in range(11)], 30))
    return tmp_path


def epoch(root: Path, workers: int = 0, rank: int = 0, world: int = 1, batches: int = 0) -> list[list[int]]:
    """The colours, which are the numbers of the samples, of each batch of an epoch."""
    data = ImageShards(str(root), num_workers=workers, in_memory=False, batch_size=4 // world)
    data.setup()
    data.load_state_dict({"epoch": 3, "batches": batches})
    loader = data.train_dataloader()
    loader.sampler.ranks = lambda: (rank, world)
    loader.sampler.set_epoch(3)
    return [inputs[:, 0, 0, 0].tolist() for inputs, _ in loader]


def test_the_order_is_the_same_on_any_number_of_workers_and_processes_and_after_a_stop_in_mid_epoch(images):
    alone = epoch(images)
    samples = [sample for batch in alone for sample in batch]
    assert len(samples) == len({*samples}) > 20
    assert epoch(images, workers=2) == alone
    of_two = zip(epoch(images, 2, 0, 2), epoch(images, 0, 1, 2), strict=True)
    whole = [[one for pair in zip(*batch, strict=False) for one in pair] for batch in of_two]
    assert whole[:-1] == alone[:-1] and whole[-1][: len(alone[-1])] == alone[-1]
    assert epoch(images, workers=2, batches=4) == alone[4:]


def test_an_index_takes_few_bytes_a_sample(tmp_path):
    path = tar(tmp_path / "a.tar", labelled([number % 2 for number in range(1000)]))
    index = index_of(path, PNG, "label")
    arrays = [value for value in vars(index).values() if isinstance(value, torch.Tensor)]
    assert sum(array.nbytes for array in arrays) == 1000 * (3 * 8 + 4 + len("000"))
    assert len(index.texts) == 2


@pytest.mark.parametrize("form", ["ustar", "gnu", "pax", "pax with times", "folders and other files"])
def test_archives_of_every_form_hold_what_tarfile_finds_in_them(form, tmp_path):
    names = ["x/a", "x/b", "ü/ß", f"{'long' * 40}/c", f"d/{'e' * 120}"][: 2 if form == "ustar" else 5]
    kind = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT}.get(form, tarfile.PAX_FORMAT)
    contents = {}
    with tarfile.open(tmp_path / "a.tar", "w", format=kind) as archive:
        for number, name in enumerate(names):
            for suffix, content in ((".png", png(number)), (".json", b'{"label": "x"}')):
                if form == "folders and other files" and suffix == ".png":
                    archive.addfile(tarfile.TarInfo("folder/"), None)
                    archive.addfile(tarfile.TarInfo(f"{name}/.hidden"), None)
                member = tarfile.TarInfo(f"./{name}{suffix}")
                member.size, member.mtime = len(content), 1.5 if form == "pax with times" else 1
                archive.addfile(member, io.BytesIO(content))
            contents[name] = png(number)
    index, raw = index_of(tmp_path / "a.tar", PNG, "label"), (tmp_path / "a.tar").read_bytes()
    places = zip(index.offsets.tolist(), index.sizes.tolist(), strict=True)
    assert {index.key(at): raw[first : first + size] for at, (first, size) in enumerate(places)} == contents


def test_an_archive_that_is_cut_off_anywhere_is_named_with_the_remedy(tmp_path):
    whole = tar(tmp_path / "whole.tar", labelled([0, 1])).read_bytes()
    until = whole.rstrip(b"\0").__len__() // 512 * 512 + 512  # of the last file's content
    for length in [*range(0, until, 512), *range(1, until, 700), until + 511]:
        path = tmp_path / f"{length}.tar"
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=rf"^{path}: (cut off|empty).*; copy or download it again$"):
            index_of(path, PNG, "label")


def test_a_sample_with_a_dot_in_its_name_is_refused_and_not_left_out(tmp_path):
    """WebDataset takes the name to end at its first dot, and XC010.5s.png for a file of kind 5s.png."""
    path = tar(tmp_path / "train-0.tar", labelled([0, 1]) | {"XC010.5s.png": png(), "XC010.5s.cls": b"1"})
    with pytest.raises(DataError, match=r"sample XC010 has a dot in its name \(XC010\.5s\.\w+\), where its name ends"):
        index_of(path, PNG, "label")


def test_a_column_of_lists_of_images_is_refused(tmp_path):
    rows = {"image": [[{"bytes": png(), "path": None}]] * 4, "label": [0, 1, 0, 1]}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "train-0.parquet")
    with pytest.raises(DataError, match=r"column image holds list<.*> and no bytes of a file; embed the f"):
        ImageShards(str(tmp_path)).setup()


def test_a_shard_that_is_cut_off_is_listed_by_check_and_ends_a_training_or_is_left_out(images, command):
    content = (images / "train-1.tar").read_bytes()
    (images / "train-1.tar").write_bytes(content[: len(content) // 2])
    flags = ["--data", "ImageShards", "--data.root", images]
    assert command("check", *flags).out.startswith("train-1.tar: cut off after ")
    done = command("stats", *flags)
    assert done.code == 3 and done.error.startswith(f"error: {images}/train-1.tar: cut off after ")
    assert "train samples: 8\n" in command("stats", *flags, "--data.on_error", "skip").out


@pytest.mark.parametrize("name", ["train-2.tar.gz", "train-2.tgz", "train-2.TAR.zst"])
def test_a_compressed_shard_is_refused_and_other_compressed_files_are_not(name, images):
    (images / name).write_bytes(b"")
    (images / "notes.txt.gz").write_bytes(b"")
    with pytest.raises(DataError, match=rf"/{name}: compressed, so no sample can be read alone; unpack it to a \.tar"):
        ImageShards(str(images)).setup()
    skipping = ImageShards(str(images), on_error="skip")
    skipping.setup()
    assert skipping.bad_files().keys() == {name}


def test_a_broken_sample_is_named_by_its_shard_before_the_training(images, command):
    members = labelled([0, 1, 0, 1], 50)
    tar(images / "train-2.tar", members | {"051.png": members["051.png"][:40]})
    done = command("stats", "--data", "ImageShards", "--data.root", images)
    assert done.code == 3
    assert done.error.startswith(f"error: {images}/train-2.tar/051: not a readable image (")


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"a.png": png()}, "sample a has no label; "),
        ({"a.cls": b"0", "b.png": png(), "b.cls": b"1"}, "sample a has no file of .png; its files must follow"),
        ({"a.png": png(), "b.png": png(), "a.cls": b"0", "b.cls": b"0"}, "sample a has no label; "),
        (labelled([0]) | {"x/y.png": png(), "x/y.cls": b" "}, "sample x/y has an empty label"),
        ({"a.png": png(), "a.json": b'{"label": 0.7}'}, "sample a has the label 0.7; "),
        ({"a.png": png(), "a.json": b"{"}, "sample a has a .json file that cannot be read"),
        ({"a.png": png(), "a.json": b"[" * 100_000}, "sample a has a .json file that cannot be read"),
        ({"a.png": png(), "a.json": b'{"label": "' + b"9" * 5000 + b'"}'}, "sample a has a label of 5000 characters; "),
        ({"a.png": png(), "a.cls": b"9" * 5000}, "sample a has a label of 5000 characters; "),
        ({"a.jpg": png(), "readme.txt": b"x"}, "holds no sample; it may hold .png"),
    ],
)
def test_a_sample_without_a_label_or_a_file_is_named(members, said, tmp_path):
    path = tar(tmp_path / "a.tar", members)
    with pytest.raises(DataError) as error:
        index_of(path, PNG, "label")
    assert str(error.value).startswith(f"{path}: {said}") and "\n" not in str(error.value)


@pytest.mark.parametrize("has_long_name", [False, True], ids=["plain", "of any form"])
def test_an_archive_behind_another_one_is_not_lost(has_long_name, tmp_path):
    first = labelled([0, 1]) | ({"n" * 120 + ".txt": b""} if has_long_name else {})
    content = [tar(tmp_path / f"{name}.tar", members).read_bytes() for name, members in
               (("a", first), ("b", labelled([0, 1], 2)))]  # fmt: skip
    (tmp_path / "both.tar").write_bytes(b"".join(content))
    with pytest.raises(DataError, match=rf"both\.tar: holds another archive from byte {len(content[0])} on"):
        index_of(tmp_path / "both.tar", PNG, "label")


def test_zeros_before_the_number_of_a_class_are_part_of_its_name(tmp_path):
    tar(tmp_path / "a.tar", labelled(["007", "7"] * 10))
    assert ImageShards(str(tmp_path)).class_names == ["007", "7"]


def test_what_is_no_archive_is_named(tmp_path):
    (tmp_path / "a.tar").write_bytes(random.Random(0).randbytes(2000))
    with pytest.raises(DataError, match=r"a\.tar: not a tar archive, or damaged at byte 0; "):
        index_of(tmp_path / "a.tar", PNG, "label")


def test_classes_are_names_or_numbers_or_lines_of_a_file_and_others_are_refused(images):
    assert ImageShards(str(images)).class_names == ["0", "1"]
    (images / "classes.txt").write_text("\ufeffcat\ndog\n")  # some editors begin a file of UTF-8 with this mark
    data = ImageShards(str(images))
    data.setup()
    assert data.class_names == ["cat", "dog"]
    tar(images / "train-2.tar", labelled(["cat", "dog", 2], 60))
    with pytest.raises(
        DataError, match=r"train-2\.tar: sample 062 is of class 2, and the classes are cat, dog; correct"
    ):
        ImageShards(str(images)).setup()
    (images / "classes.txt").unlink()
    assert ImageShards(str(images)).class_names == ["0", "1", "2", "cat", "dog"]


def test_splits_are_words_of_paths_and_are_drawn_where_there_are_none(images):
    data = ImageShards(str(images))
    data.setup()
    assert {name.partition("/")[0] for name in data.test_set.names} == {"test-0.tar"}
    (images / "validation").mkdir()
    shutil.move(images / "train-0.tar", images / "validation/0.tar")
    data = ImageShards(str(images))
    data.setup()
    assert [len(samples) for samples in data.splits().values()] == [20, 10, 11]
    shutil.move(images / "train-1.tar", images / "shard.tar")
    with pytest.raises(DataError, match=r"shard\.tar names no split, and others do; call it train, val or test$"):
        ImageShards(str(images)).setup()
    shutil.rmtree(images / "validation")
    (images / "test-0.tar").unlink()
    data = ImageShards(str(images))
    data.setup()
    assert [len(samples) for samples in data.splits().values()] == [14, 2, 4]


@pytest.mark.parametrize("samples", [1, 2])
def test_few_samples_of_each_class_are_one_line(samples, tmp_path):
    """Of one sample none is left to test on, and of two none to validate on."""
    tar(tmp_path / "a.tar", labelled(["a", "b"] * samples))
    split = {1: "test", 2: "validation"}[samples]
    said = rf"^data\.root: nothing is left for the {split} split, because each class has only one sample.*; add some"
    for in_memory in (True, False):
        with pytest.raises(DataError, match=said):
            ImageShards(str(tmp_path), size=8, in_memory=in_memory).setup()


def test_groups_are_whole_in_splits_and_folds(tmp_path):
    for number in range(3):
        members = {}
        for patient in range(4):
            for take in range(3):
                key = f"patient{number}{patient}/{take}"
                members |= {f"{key}.png": png(take), f"{key}.cls": b"ab"[patient % 2 : patient % 2 + 1]}
        tar(tmp_path / f"{number}.tar", members)
    for folds in ({}, {"folds": 3, "fold": 2}):
        data = ImageShards(str(tmp_path), groups="patient[0-9]+", **folds)
        data.setup()
        places = [{name.split("/")[1] for name in samples.names} for samples in data.splits().values()]
        assert sum(map(len, places)) == len(set.union(*places)) == 12
    with pytest.raises(DataError, match=r"^data\.groups: site finds nothing in "):
        ImageShards(str(tmp_path), groups="site").setup()


def test_folds_divide_all_samples_without_a_test_of_their_own_and_those_of_the_training_with_one(images):
    tested = []
    for fold in (1, 2, 3):
        data = ImageShards(str(images), folds=3, fold=fold)
        data.setup()
        assert len(data.test_set) == 11
        tested += data.val_set.names
    assert len(tested) == len({*tested}) == 30
    (images / "test-0.tar").unlink()
    tested = []
    for fold in (1, 2, 3):
        data = ImageShards(str(images), folds=3, fold=fold)
        data.setup()
        tested += data.test_set.names
    assert len(tested) == len({*tested}) == 30


def test_a_writing_that_was_stopped_goes_on_and_gives_the_same_bytes(tmp_path, monkeypatch):
    data = SMALL[ImageFolder](tmp_path / "files", monkeypatch)
    data.setup()
    data.write_shards(tmp_path / "whole", 5)
    file_of, left = data.file_of, iter(range(7))

    def stopped(samples, index):
        next(left)
        return file_of(samples, index)

    monkeypatch.setattr(data, "file_of", stopped)
    with pytest.raises((StopIteration, RuntimeError)):
        data.write_shards(tmp_path / "stopped", 5)
    monkeypatch.undo()
    found = {path.name for path in (tmp_path / "stopped").iterdir()}
    assert found == {".unfinished", "train-00000-of-00003.tar"}  # no half archive
    with pytest.raises(DataError, match=r"its shards were not all written; give the same command shard again$"):
        ImageShards(str(tmp_path / "stopped")).setup()
    with pytest.raises(DataError, match=r"stopped: holds other files already; give an empty folder$"):
        data.write_shards(tmp_path / "stopped", 4)
    data.write_shards(tmp_path / "stopped", 5)
    assert [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("whole", "stopped")
    ].count({path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}) == 2
    (tmp_path / "whole/train-00001-of-00003.tar").unlink()
    with pytest.raises(DataError, match=r"train-00001-of-00003\.tar: missing, and others of its 3 are there; "):
        ImageShards(str(tmp_path / "whole")).setup()


WRITING = """
import sys
from datamodules import ImageFolder
data = ImageFolder(sys.argv[1], size=8, val_fraction=0.2, test_fraction=0.2)
data.setup()
data.write_shards(__import__("pathlib").Path(sys.argv[2]), 3)
"""
KILLED = "import os, signal; os.replace = lambda old, new: os.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.mark.parametrize("renames", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_writing_that_was_killed_goes_on_and_leaves_nothing_behind(renames: int, tmp_path: Path) -> None:
    """It is killed before a file gets its name: that of the note, or that of an archive."""
    for number in range(20):
        path = tmp_path / f"files/{'ab'[number % 2]}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number))
    writing = ["-c", WRITING, tmp_path / "files"]
    assert forked.run(*writing, tmp_path / "whole", cwd=tmp_path).returncode == 0
    out = tmp_path / "killed"
    first = KILLED
    if renames:
        first = f"import os; named = os.replace\n{KILLED}kill = os.replace\n"
        first += "os.replace = lambda old, new: (kill if new.suffix == '.tar' else named)(old, new)\n"
    killed = forked.run("-c", first + WRITING, tmp_path / "files", out, cwd=tmp_path)
    assert killed.returncode == -9, killed.stderr[-2000:]
    assert [path.name for path in out.iterdir() if path.suffix == ".part"] != []
    assert forked.run(*writing, out, cwd=tmp_path).returncode == 0
    whole, found = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (tmp_path / "whole", out))
    assert found == whole


def test_two_processes_do_not_write_shards_into_one_folder(tmp_path, monkeypatch, capsys):
    data = SMALL[ImageFolder](tmp_path / "files", monkeypatch)
    data.setup()
    (tmp_path / "out").mkdir()
    held = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(DataError, match=r"out: another process writes into it; wait for its end, or give another$"):
        data.write_shards(tmp_path / "out", 5)
    os.close(held)

    def without(*_: object) -> NoReturn:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", without)
    assert data.write_shards(tmp_path / "out", 5) > 1
    assert "out: cannot be locked (No locks available); write into it in one process only" in capsys.readouterr().err


def test_a_training_on_shards_has_the_figures_of_the_training_on_files(command, tmp_path):
    generator = np.random.default_rng(0)
    for number in range(40):
        path = tmp_path / f"files/{'ab'[number % 2]}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (8, 8, 3), np.uint8)).save(path)
    files = ["--data", "ImageFolder", "--data.root", tmp_path / "files"]
    done = command("shard", *files, "--out", tmp_path / "shards", "--samples_per_shard", 10)
    assert done.out.startswith("shards:   5, of 28 train, 4 val, 8 test samples\nto train: --data ImageShards ")
    flags = done.out.split("to train: ")[1].replace("'", "").split()
    small = [
        "--model.encoder", "ImageEncoder", "--model.encoder.attention", "Linformer", "--model.encoder.attention.k", 8,
        "--model.encoder.dim", 16, "--model.encoder.depth", 1, "--model.encoder.heads", 2, "--data.batch_size", 8,
        "--trainer.max_epochs", 1, "--trainer.accelerator", "cpu",
    ]  # fmt: skip
    for name, data in (("files", files), ("shards", flags)):
        done = command("fit", *data, *small, "--experiment", name)
        assert done.code == 0, done.err
    figures = [json.loads((tmp_path / f"runs/{name}/0/metrics.json").read_text()) for name in ("files", "shards")]
    assert figures[0] == figures[1]
    assert (tmp_path / "runs/shards/0/splits.csv").read_text().count("\n") == 41


def parquet(
    path: Path, column: str, files: list[bytes], labels: list, features: dict | None, row_group: int = 5
) -> Path:
    """A file as Hugging Face's datasets writes it: structs of bytes and path, and the features as metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    structs = [{"bytes": content, "path": f"{number}.x"} for number, content in enumerate(files)]
    table = pyarrow.table({column: structs, "label": labels})
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pyarrow.parquet.write_table(table, path, row_group_size=row_group)
    return path


def test_parquet_of_images_is_read_with_the_names_of_its_classes(tmp_path):
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["zebra", "ant"]}}
    for split, count in (("train", 20), ("validation", 6), ("test", 8)):
        numbers = range(count)
        path = tmp_path / f"data/{split}-00000-of-00001.parquet"
        parquet(path, "image", [png(number) for number in numbers], [number % 2 for number in numbers], features)
    data = ImageShards(str(tmp_path), batch_size=4)
    data.setup()
    assert data.class_names == ["zebra", "ant"] and data.shape == (3, 8, 8)
    assert [len(samples) for samples in data.splits().values()] == [20, 6, 8]
    for inputs, labels in data.train_dataloader():
        assert torch.equal(inputs[:, 0, 0, 0] % 2, labels)
    assert data.train_set.names[3] == "data/train-00000-of-00001.parquet/000000003"


@pytest.mark.parametrize("label", [2, -2, [0, 2], "zebra"])
def test_a_number_of_no_class_in_parquet_is_named(label, tmp_path):
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["zebra", "ant"]}}
    path = parquet(tmp_path / "train.parquet", "image", [png()], [label], features)
    wrong = max(label) if isinstance(label, list) else label
    said = rf"^{path}: row 0 has the label {wrong}, and its classes are 0 to 1; correct one of them"
    with pytest.raises(DataError, match=said):
        ImageShards(str(tmp_path)).setup()


def test_shards_with_fingerprints_of_their_content_are_parts_of_one_set(tmp_path):
    names = [f"data/train-0000{n}-of-00002-{hashlib.sha256(bytes([n])).hexdigest()[:16]}.parquet" for n in range(2)]
    for name in names:
        parquet(tmp_path / name, "image", [png(number) for number in range(10)], [0, 1] * 5, None)
    data = ImageShards(str(tmp_path))
    data.setup()
    assert sum(len(samples) for samples in data.splits().values()) == 20
    (tmp_path / names[0]).unlink()
    missing = r"data/train-00000-of-00002-\*\.parquet: missing, and others of its 2 are there; "
    with pytest.raises(DataError, match=missing):
        ImageShards(str(tmp_path)).setup()


def test_parquet_of_sounds_may_have_any_number_of_classes_a_row(tmp_path):
    labels = [["a"], ["b"], ["a", "b"], []] * 6
    levels = [number / 100 for number in range(24)]
    parquet(tmp_path / "x.parquet", "audio", [wav(level) for level in levels], labels, None)
    data = AudioShards(str(tmp_path), batch_size=24)
    data.setup()
    assert data.class_names == ["a", "b"] and data.sample_rate_hz == 8000 and data.seconds == 0.1
    for samples in data.splits().values():
        inputs, several = samples.__getitems__(list(range(len(samples))))
        for level, classes in zip(inputs["waveforms"][:, 0].tolist(), several.tolist(), strict=True):
            assert [name for name, is_there in zip("ab", classes, strict=True) if is_there] == labels[
                round(level * 100)
            ]


@pytest.mark.parametrize("kept", [0.0, 0.4, 0.999])
def test_parquet_that_is_cut_off_is_named(kept, tmp_path):
    path = parquet(tmp_path / "train.parquet", "image", [png(number) for number in range(20)], [0, 1] * 10, None)
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with pytest.raises(
        DataError, match=rf"^{path}: cut off or damaged \(.*\); copy or download it again: .*skip leaves"
    ) as e:
        ImageShards(str(tmp_path)).setup()
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("column", "labels", "said"),
    [
        ("image", [0, None], "row 1 has no label; "),
        ("image", [0.5, 1.5], "sample 000000000 has the label 0.5; "),
        ("image", [date(2024, 5, 1)] * 2, "row 0 has the label 2024-05-01; name the column of classes: --data.la"),
        ("label2", [0, 1], "columns label2 and more hold files; "),
    ],
)
def test_rows_of_parquet_that_are_no_samples_are_named(column, labels, said, tmp_path):
    path = tmp_path / "train.parquet"
    table = pyarrow.table({column: [{"bytes": png()}] * 2, "label": labels})
    if column != "image":
        table = table.append_column("more", [[png()] * 2])
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(DataError) as error:
        ImageShards(str(tmp_path)).setup()
    assert str(error.value).startswith(f"{path}: {said}")
    with pytest.raises(DataError, match=r"no column kind, only .*, label.*; name that of labels: --data\.label"):
        ImageShards(str(tmp_path), label="kind").setup()
