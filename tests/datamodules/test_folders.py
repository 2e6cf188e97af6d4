"""A user's own folders, correct and faulty, and what the command line does with them."""

import csv
import json
import os
import shutil
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import soundfile
import torch
from PIL import Image
from small_sets import picture

from datamodules import AudioFolder, DataError, ImageFolder
from datamodules.decoding.sound_files import examine_sound, header_of
from datamodules.labels import written
from datamodules.own._table import read_table
from datamodules.samples import Clips

SMALL = ["--model.encoder.dim", "8", "--model.encoder.depth", "1", "--model.encoder.heads", "1",
         "--model.encoder.attention", "Verma", "--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false",
         "--trainer.accelerator", "cpu", "--trainer.devices", "1"]  # fmt: skip
IMAGES = ["fit", "--experiment", "imagefolder", "--data", "ImageFolder", "--model.encoder", "ImageEncoder", *SMALL]
SOUNDS = [
    "fit",
    "--experiment",
    "audiofolder",
    "--data",
    "AudioFolder",
    "--model.encoder",
    "SpectrogramEncoder",
    *SMALL,
]


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    """Two classes; each has twelve noises of 0.1 s at 8 kHz."""
    generator = np.random.default_rng(0)
    for name in ("bells", "horns"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(12):
            soundfile.write(tmp_path / "data" / name / f"{number:02}.wav", generator.uniform(-0.5, 0.5, 800), 8000)
    return tmp_path / "data"


def splits(folder: Path) -> list[dict[str, str]]:
    with open(folder / "splits.csv", newline="") as file:
        return list(csv.DictReader(file))


# Correct folders


def test_a_folder_of_class_folders_trains_and_its_split_is_written_down(images, command, tmp_path):
    done = command(*IMAGES, "--data.root", images)
    assert done.code == 0, done.err
    rows = splits(tmp_path / "runs/imagefolder/0")
    assert {row["path"] for row in rows} == {f"{name}/{n:02}.png" for name in ("cats", "dogs") for n in range(12)}
    counts = {(row["label"], row["split"]): 0 for row in rows}
    for row in rows:
        counts[row["label"], row["split"]] += 1
    assert counts == {(name, split): n for name in ("cats", "dogs") for split, n in
                      (("train", 9), ("val", 1), ("test", 2))}  # fmt: skip


def test_its_checkpoint_predicts_when_the_folder_is_gone(images, command, tmp_path):
    command(*IMAGES, "--data.root", images)
    images.rename(tmp_path / "elsewhere")
    done = command("predict", "--ckpt_path", "runs/imagefolder/0/best.ckpt", "--input", tmp_path / "elsewhere/cats")
    assert done.code == 0, done.err
    rows = [line.split("\t") for line in done.out.strip().split("\n")]
    assert [Path(path).name for path, *_ in rows] == [f"{number:02}.png" for number in range(12)]
    assert {name for _, name, _ in rows} <= {"cats", "dogs"}

    (tmp_path / "elsewhere/cats/03.png").write_bytes(b"broken")
    predict = ["predict", "--ckpt_path", "runs/imagefolder/0/best.ckpt", "--input", tmp_path / "elsewhere/cats"]
    assert command(*predict).code == 3
    done = command(*predict, "--data.on_error", "skip")
    assert [Path(line.split("\t")[0]).stem for line in done.out.strip().split("\n")] == [
        f"{number:02}" for number in range(12) if number != 3
    ]
    assert "left out: " in done.err and "03.png" in done.err


def test_train_val_and_test_folders_are_the_splits(images, tmp_path, capsys):
    root = tmp_path / "split"
    for part, numbers in (("train", range(8)), ("valid", range(8, 10)), ("test", range(10, 12))):
        for name in ("cats", "dogs"):
            (root / part / name).mkdir(parents=True)
            for number in numbers:
                (images / name / f"{number:02}.png").rename(root / part / name / f"{number:02}.png")
    data = ImageFolder(str(root))
    data.setup()
    assert {split: len(samples) for split, samples in data.splits().items()} == {"train": 16, "val": 4, "test": 4}
    assert all(name.startswith("valid/") for name in data.val_set.names)
    assert capsys.readouterr().err == ""
    # what lies beside them in another form is left out, and not without a word
    (root / "birds").mkdir()
    shutil.move(root / "train/dogs/00.png", root / "birds/00.png")
    shutil.rmtree(root / "test/dogs")
    (root / "test/cats").rename(root / "test/.cats")
    shutil.move(root / "train/dogs/01.png", root / "test/01.png")
    (root / "empty").mkdir()
    data = ImageFolder(str(root))
    data.setup()
    assert {split: len(samples) for split, samples in data.splits().items()} == {"train": 11, "val": 4, "test": 3}
    left_out = f"{root}/birds: left out with all its files, such as 00.png, which are neither in train, nor in val, nor"
    assert (
        capsys.readouterr().err == f"{left_out} in test\n{root}/test: left out with all its files, such as 01.png, "
        "which are in no folder of a class\n"
    )


def test_sizes_modes_and_names_of_all_kinds_are_read(images, command):
    cats = images / "cats"
    Image.new("L", (1, 1), 200).save(cats / "one pixel.png")
    Image.new("RGBA", (30, 3), (1, 2, 3, 0)).save(cats / "ünï 猫.png")
    Image.new("P", (5, 90)).save(cats / "palette.gif")
    (cats / "._00.png").write_bytes(b"what a Mac leaves behind")
    (cats / ".DS_Store").write_bytes(b"")
    (cats / "notes.txt").write_text("no image")
    (cats / "loop").symlink_to(images)
    (cats / "itself").symlink_to(cats)
    done = command("check", "--data", "ImageFolder", "--data.root", images)
    assert done.code == 0, done.err
    data = ImageFolder(str(images))
    data.setup()
    names = [name for samples in data.splits().values() for name in samples.names if name.startswith("cats/")]
    assert len(names) == 15  # 12 images and 3 new ones: neither link is followed
    assert data.shape == (3, 8, 8)


@pytest.mark.parametrize(
    ("sizes", "size", "shape"),
    [
        ([(8, 8)], None, (3, 8, 8)),
        ([(5, 7)], None, (3, 7, 5)),
        ([(28, 28)], None, (3, 32, 32)),
        ([(50, 37)], None, (3, 40, 48)),
        ([(40, 30), (20, 25), (90, 80)], None, (3, 32, 32)),
        ([(999, 500)], None, (3, 64, 64)),
        ([(9, 7)], 16, (3, 16, 16)),
        ([(9, 7)], [5, 6], (3, 5, 6)),
    ],
)
def test_the_size_follows_from_the_images_or_the_flag(sizes, size, shape, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(6):
            Image.new("RGB", sizes[number % len(sizes)], (number, ord(name), 0)).save(tmp_path / name / f"{number}.png")
    data = ImageFolder(str(tmp_path), size=size)
    data.setup()
    assert data.shape == tuple(data.train_set[0][0].shape) == shape


def test_an_image_keeps_its_aspect_unless_told_otherwise(tmp_path):
    stripes = np.zeros((10, 30, 3), np.uint8)
    stripes[:, 10:20] = 255
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(6):
            stripes[0, 0] = number, ord(name), 0  # no copies
            Image.fromarray(stripes).save(tmp_path / name / f"{number}.png")
    kept, stretched = ImageFolder(str(tmp_path), size=10), ImageFolder(str(tmp_path), size=10, keep_aspect=False)
    for data in (kept, stretched):
        data.setup()
    assert kept.train_set[0][0].min() == 255  # only the middle third is kept, and it is white
    assert stretched.train_set[0][0].float().mean() == pytest.approx(85, abs=3)


@pytest.mark.parametrize("in_memory", [True, False])
def test_decoded_by_workers_or_in_memory_batches_are_the_same(in_memory, images):
    data = ImageFolder(str(images), in_memory=in_memory, num_workers=0 if in_memory else 2)
    data.setup()
    found = [tensor for batch in data.train_dataloader() for tensor in batch]
    plain = ImageFolder(str(images))
    plain.setup()
    expected = [tensor for batch in plain.train_dataloader() for tensor in batch]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_sounds_of_any_rate_channels_encoding_and_length_train(sounds, command, tmp_path):
    for number, (rate_hz, channels, subtype) in enumerate(
        [(8000, 1, "PCM_U8"), (11025, 2, "PCM_24"), (44100, 6, "PCM_32"), (96000, 1, "FLOAT"), (192000, 2, "DOUBLE")]
    ):
        noise = np.random.default_rng(number).uniform(-0.5, 0.5, (rate_hz // 10 * (1 + number), channels))
        soundfile.write(sounds / "bells" / f"blank name {number}.wav", noise, rate_hz, subtype=subtype)
        soundfile.write(sounds / "horns" / f"鐘 {number}.flac", noise, rate_hz)
    soundfile.write(sounds / "bells" / "silence.ogg", np.zeros(4800), 48000)
    done = command(*SOUNDS, "--data.root", sounds)
    assert done.code == 0, done.err
    assert len(splits(tmp_path / "runs/audiofolder/0")) == 35
    data = AudioFolder(str(sounds))
    assert data.sample_rate_hz == 8000  # the rate that most files have
    assert data.seconds == pytest.approx(0.5)  # the length of the longest file
    assert "silent clips: 1" in command("stats", "--data", "AudioFolder", "--data.root", sounds).out


def test_a_table_names_parts_of_recordings_folds_and_splits(tmp_path):
    ramp = np.arange(8000) / 8000
    for fold in (1, 2, 3):
        soundfile.write(tmp_path / f"{fold}.wav", ramp, 8000)
    rows = [(f"{fold}.wav", label, start + later, start + later + 0.1, fold) for fold in (1, 2, 3)
            for label, later in (("a", 0), ("b", 0.05)) for start in (0.1 * fold, 0.1 * fold + 0.5)]  # fmt: skip
    text = "path\tlabel\tstart\tend\tfold\n" + "".join("\t".join(map(str, row)) + "\n" for row in rows)
    (tmp_path / "clips.tsv").write_text(text)
    data = AudioFolder(str(tmp_path), table="clips.tsv", test_fold=2, val_fold=3)
    data.setup()
    assert [len(samples) for samples in data.splits().values()] == [4, 4, 4]
    assert data.seconds == 0.1
    first = sorted(float(clip[0]) for clip in data.test_set.inputs)
    assert first == pytest.approx([0.2, 0.25, 0.7, 0.75], abs=1e-3)
    assert data.test_set.lengths is None  # None: all clips have the same length

    for split in ("train", "valid", "test"):
        soundfile.write(tmp_path / f"{split}.wav", ramp, 8000)
    (tmp_path / "split.csv").write_text("path,label,start,end,split\n" + "".join(
        f"{split}.wav,{label},{start + later},{start + later + 0.05},{split}\n"
        for label, later in (("a", 0), ("b", 0.5))
        for start, split in ((0, "train"), (0.1, "train"), (0.2, "valid"), (0.3, "test"))))  # fmt: skip
    data = AudioFolder(str(tmp_path), table=str(tmp_path / "split.csv"))
    data.setup()
    assert [len(samples) for samples in data.splits().values()] == [4, 2, 2]


def test_an_end_beyond_any_recording_is_its_end(sounds):
    rows = [f"{name}/{n:02}.wav,{name},1e308" for name in ("bells", "horns") for n in range(12)]
    (sounds / "t.csv").write_text("path,label,end\n" + "\n".join(rows) + "\n")
    data = AudioFolder(str(sounds), table="t.csv")
    data.setup()
    assert {len(clip) for clip in data.train_set.inputs} == {800}


def test_the_splits_of_a_run_are_a_table_to_train_on_again(sounds, command, tmp_path):
    assert command(*SOUNDS, "--data.root", sounds).code == 0
    again = AudioFolder(str(sounds), table=str(tmp_path / "runs/audiofolder/0/splits.csv"), seed=5)
    first = AudioFolder(str(sounds))
    for data in (again, first):
        data.setup()
    for split, samples in first.splits().items():
        assert sorted(samples.names) == sorted(again.splits()[split].names)


# Faulty folders


def png(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds one pixel."""

    def chunk(content: bytes) -> bytes:
        return struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))

    header = chunk(b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT" + zlib.compress(bytes(2)))


def test_a_root_that_is_not_there_or_empty_is_one_line(command, tmp_path):
    assert command(*IMAGES, "--data.root", "no/such").error == (
        "error: no/such: no such folder; set data.root to the one that holds the data"
    )
    (tmp_path / "empty").mkdir()
    done = command(*SOUNDS, "--data.root", "empty")
    assert done.code == 3
    assert done.error.startswith("error: empty: holds no folder of sounds for each class; it may hold .aac, ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_an_image_that_is_cut_off_is_named_before_training_or_left_out(suffix, images, command, tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)
    Image.fromarray(noise).save(tmp_path / f"whole.{suffix}")
    content = (tmp_path / f"whole.{suffix}").read_bytes()
    broken = images / "dogs" / f"broken.{suffix}"
    broken.write_bytes(content[: len(content) // 2])
    (images / "dogs/other.png").write_bytes(b"")
    done = command(*IMAGES, "--data.root", images)
    assert done.code == 3
    assert done.error.startswith(f"error: {broken}: not a readable image (")
    assert "1 more broken file: python train.py check lists all, --data.on_error skip leaves them out" in done.error
    assert not (tmp_path / "runs/imagefolder/0").exists()

    listed = command("check", "--data", "ImageFolder", "--data.root", images)
    assert listed.code == 3
    both = [f"dogs/broken.{suffix}", "dogs/other.png"]
    assert [line.partition(":")[0] for line in listed.out.splitlines()] == both
    assert listed.error == "error: data.root: 2 broken files; repair them, or give --data.on_error skip"

    done = command(*IMAGES, "--data.root", images, "--data.on_error", "skip")
    assert done.code == 0, done.err
    assert "2 broken files left out; python train.py check lists all" in done.err
    skipped = (tmp_path / "runs/imagefolder/0/skipped.txt").read_text().splitlines()
    assert [line.partition(":")[0] for line in skipped] == both
    assert len(splits(tmp_path / "runs/imagefolder/0")) == 24


def test_one_broken_file_is_one_file_and_stats_speaks_of_nothing_that_it_does_not_write(images, command, tmp_path):
    (images / "dogs/00.png").write_bytes(b"")
    flags = ["--data", "ImageFolder", "--data.root", images]
    assert command("check", *flags).error == (
        "error: data.root: 1 broken file; repair them, or give --data.on_error skip"
    )
    assert "more broken" not in command("stats", *flags).error
    done = command("stats", *flags, "--data.on_error", "skip")
    assert (done.code, done.err) == (0, f"{images}: 1 broken file left out; python train.py check lists all\n")
    assert not list(tmp_path.rglob("skipped.txt"))


def test_a_decompression_bomb_is_refused(images, command):
    (images / "cats/bomb.png").write_bytes(png(20_000, 20_000))
    done = command(*IMAGES, "--data.root", images)
    assert done.code == 3
    assert "cats/bomb.png: more pixels than the limit that guards memory; make it smaller first" in done.error


def test_a_mended_file_is_read_again(images, command):
    bad = images / "cats/00.png"
    good = bad.read_bytes()
    bad.write_bytes(b"")
    assert command("check", "--data", "ImageFolder", "--data.root", images).code == 3
    bad.write_bytes(good)
    assert command("check", "--data", "ImageFolder", "--data.root", images).code == 0


def test_a_verdict_on_a_broken_file_is_never_reused(images, command):
    """A decoder or a disk may have been missing; the size and the time of the file do not show that."""
    path = images / "cats/00.png"
    good, times = path.read_bytes(), (1_000_000_000, 1_000_000_000)
    path.write_bytes(bytes(len(good)))
    os.utime(path, times)
    assert command("check", "--data", "ImageFolder", "--data.root", images).code == 3
    path.write_bytes(good)
    os.utime(path, times)
    assert command("check", "--data", "ImageFolder", "--data.root", images).code == 0


def wav(bits: int, num_bytes: int, declared: int | None = None) -> bytes:
    chunks = b"WAVEfmt \x10\0\0\0\x01\0\x01\0" + struct.pack("<IIHH", 8000, 8000 * 2, 2, bits)
    chunks += b"data" + struct.pack("<I", num_bytes if declared is None else declared) + bytes(num_bytes)
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


def half_of(path: Path, **options) -> bytes:
    soundfile.write(path, np.random.default_rng(0).uniform(-1, 1, 20_000), 8000, **options)
    content = path.read_bytes()
    path.unlink()
    return content[: len(content) // 2]


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("x.wav", lambda path: half_of(path), "cut off, "),
        ("x.ogg", lambda path: half_of(path), ""),  # the message depends on the version of libsndfile
        ("x.flac", lambda path: half_of(path), "not a readable sound"),
        ("x.mp3", lambda path: half_of(path), "cut off, "),
        ("x.aiff", lambda path: half_of(path), "cut off, "),
        ("x.au", lambda path: half_of(path), "cut off, "),
        ("x.w64", lambda path: half_of(path), "cut off, "),
        ("x.wav", lambda path: half_of(path, format="RF64"), "cut off, "),
        ("x.wav", lambda path: wav(16, 1600, declared=1602), "cut off, "),
        ("x.wav", lambda path: b"", "not a readable sound"),
        ("x.wav", lambda path: wav(16, 0), "holds no sound"),
        ("x.wav", lambda path: wav(7, 800), "says 7 bits a sample"),
        ("x.m4a", lambda path: b"\0\0\0\x20ftypM4A ", ".m4a needs torchcodec and FFmpeg"),
        ("x.aac", lambda path: b"\xff\xf1", "a bare AAC stream does not state its length; put it into"),
    ],
)  # fmt: skip
def test_a_broken_sound_is_named_with_the_remedy(name, content, what, sounds, command):
    path = sounds / "horns" / name
    path.write_bytes(content(path))
    done = command(*SOUNDS, "--data.root", sounds)
    assert done.code == 3
    assert done.error.startswith(f"error: {path}: {what}")
    assert ";" in done.error


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_samples_that_are_not_finite_are_refused(value, sounds, command):
    samples = np.zeros(800)
    samples[700] = value
    soundfile.write(sounds / "horns/x.wav", samples, 8000, subtype="FLOAT")
    done = command(*SOUNDS, "--data.root", sounds)
    assert (done.code, "horns/x.wav: holds values that are not finite; write it again" in done.error) == (3, True)


@pytest.mark.parametrize(("peak", "fits"), [(16384.0, False), (101.0, False), (30.0, True)])
def test_floats_in_another_unit_than_full_scale_are_no_square_waves(peak, fits, sounds):
    samples = np.sin(np.arange(800)) * peak / np.sin(np.arange(800)).max()
    soundfile.write(sounds / "horns/x.wav", samples, 8000, subtype="FLOAT")
    bad = AudioFolder(str(sounds)).bad_files()
    assert list(bad) == ([] if fits else ["horns/x.wav"])
    if not fits:
        assert bad["horns/x.wav"].startswith(
            f"values up to {peak:g}, beyond full scale 1; divide by full scale, such as 32768"
        )
        with pytest.raises(DataError, match=r"x\.wav: values up to .*, beyond full scale 1"):  # predict reads this way
            AudioFolder(str(sounds), sample_rate_hz=8000, seconds=0.1).read(sounds / "horns/x.wav")


@pytest.mark.parametrize("in_memory", ["true", "false"])
def test_a_row_that_starts_after_its_recording_is_found_before_training_or_left_out(in_memory, sounds, command):
    rows = [f"{name}/{n:02}.wav,{name},{0 if n else 5}" for name in ("bells", "horns") for n in range(12)]
    (sounds / "t.csv").write_text("path,label,start\n" + "\n".join(rows) + "\n")
    flags = ["--data.root", sounds, "--data.table", "t.csv", "--data.in_memory", in_memory]
    checked = command("check", "--data", "AudioFolder", *flags)
    what = "holds no sound from 5 s on, it is 0.1 s long; correct start and end"
    assert checked.code == 3
    assert checked.out.splitlines() == [
        f"bells/00.wav 5-end: line 2 of the table: {what}",
        f"horns/00.wav 5-end: line 14 of the table: {what}",
    ]
    assert f"bells/00.wav 5-end: line 2 of the table: {what}; 1 more broken file:" in command(*SOUNDS, *flags).error
    done = command(*SOUNDS, *flags, "--data.on_error", "skip")
    assert done.code == 0, done.err
    assert len(splits(Path("runs/audiofolder/0"))) == 22


def test_a_recorder_that_streams_and_knows_no_length_is_no_broken_one(sounds, command):
    (sounds / "horns/stream.wav").write_bytes(wav(16, 1600, declared=0xFFFFFFFF))
    assert command("check", "--data", "AudioFolder", "--data.root", sounds).code == 0


@pytest.mark.parametrize("frames", [40, 20_000])
@pytest.mark.parametrize("fault", ["the size of the file as that of RIFF", "a list of tags that is cut off"])
def test_a_wav_whose_sound_is_whole_is_not_cut_off(fault, frames, tmp_path):
    content = wav(16, 2 * frames)
    if fault.startswith("a list"):
        content += b"LIST" + struct.pack("<I", 26) + b"INFOISFT"
    size = len(content) if "RIFF" in fault else len(content) - 8
    (tmp_path / "x.wav").write_bytes(b"RIFF" + struct.pack("<I", size) + content[8:])
    assert header_of(tmp_path / "x.wav") == (frames / 8000, "")
    assert examine_sound(tmp_path / "x.wav")["frames"] == frames


def test_one_class_and_a_class_without_a_file_are_refused(images, command):
    (images / "birds").mkdir()
    done = command(*IMAGES, "--data.root", images)
    assert (done.code, done.error) == (
        3, f"error: {images}/birds: class birds has no readable file; add some, or take the folder out"
    )  # fmt: skip
    (images / "birds").rmdir()
    for file in (images / "dogs").iterdir():
        file.write_bytes(b"")
    done = command(*IMAGES, "--data.root", images, "--data.on_error", "skip")
    assert (done.code, "no readable file of class dogs to train on" in done.error) == (3, True)
    for file in (images / "dogs").iterdir():
        file.unlink()
    (images / "dogs").rmdir()
    done = command(*IMAGES, "--data.root", images)
    what = "must be 2 or more for the task SingleLabel, got 1 (cats)"
    remedy = "add a class, or pretrain without labels: the task Masked"
    assert (done.code, done.error) == (2, f"error: num_classes: {what}; {remedy}")
    done = command(*IMAGES, "--data.root", images, "--model.task", "Masked", "--trainer.max_epochs", "1")
    assert done.code == 0, done.err
    assert "test l1:" in done.out


def test_classes_too_small_to_be_split_are_refused(images, command):
    for name in ("cats", "dogs"):
        for number in range(1, 12):
            (images / name / f"{number:02}.png").unlink()
    done = command(*IMAGES, "--data.root", images)
    what = "data.root: nothing is left for the test split, because each class has only one file; add some of each class"
    assert (done.code, done.error) == (3, f"error: {what}")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            "path,label,start\nbells/00.wav,bells,nan\n",
            "t.csv: line 2: from nan to its end; give seconds from 0 on, the end after the start",
        ),
        (
            "path,label,start\nbells/00.wav,bells,inf\n",
            "t.csv: line 2: from inf to its end; give seconds from 0 on, the end after the start",
        ),
        (
            "path,label,start\nbells/00.wav,bells,-1\n",
            "t.csv: line 2: from -1 to its end; give seconds from 0 on, the end after the start",
        ),
        (
            "path,label,end\nbells/00.wav,bells,nan\n",
            "t.csv: line 2: from 0 to nan s; give seconds from 0 on, the end after the start",
        ),
        (
            "path,label,end\nbells/00.wav,bells,inf\n",
            "t.csv: line 2: from 0 to inf s; give seconds from 0 on, the end after the start",
        ),
        ("path,label\nbells/0\0.wav,bells\n", "t.csv: line 2: a NUL in the path; write the table again as UTF-8"),
        (
            "path,label\nbells/00.wav,bells\nhorns/nowhere.wav,horns\n",
            "horns/nowhere.wav: no such file; check the path",
        ),
        ("sound,label\nbells/00.wav,bells\n", "t.csv: no column path; name it in the first line"),
        ("path,label\nbells/00.wav,\n", "t.csv: line 2: no path or no label; give both"),
        ("path,label,start\nbells/00.wav,bells,soon\n", "t.csv: line 2: start or end is not a number"),
        (
            "path,label,start,end\nbells/00.wav,bells,2,1\n",
            "t.csv: line 2: from 2 to 1 s; give seconds from 0 on, the end after the start",
        ),
        ("path,label,split\nbells/00.wav,bells,tset\n", "t.csv: line 2: split tset; give train, val or test"),
        ("path,label\n", "t.csv: holds no row"),
        ("path,label,label\nbells/00.wav,bells,x\n", "t.csv: two columns are called label; keep one"),
        (
            "path,label\nbells/00.wav,bells\nbells/00.wav,horns\n",
            "t.csv: line 3: bells/00.wav is horns here and bells before; choose one, or give data.",
        ),
        (
            "path,label,split\nbells/00.wav,bells,train\n./bells//00.wav,bells,test\n",
            "t.csv: bells/00.wav is in train and test; give all rows of a file one split",
        ),
        (
            "path,label,start\nbells/00.wav,bells,1e308\nhorns/00.wav,horns,0\n",
            "line 2 of the table: holds no sound from 1e+308 s on, it is 0.1 s long; correct start and end",
        ),
        ("", "t.csv: no column label and path"),
        (None, "t.csv: no such file; check the path"),
        (
            "path,label\nbells/00.wav,bells,horns\n",
            "t.csv: line 2: more cells than columns; put quotes round those with ',' in them",
        ),
    ],
)
def test_a_table_that_is_wrong_says_where(table, said, sounds, command):
    if table is not None:
        (sounds / "t.csv").write_text(table)
    done = command(*SOUNDS, "--data.root", sounds, "--data.table", "t.csv")
    assert done.code == 3
    assert said in done.error


LIST = "is a list, and a clip has one class; give --data.labels_separator and --model.task MultiLabel, or put it into "
AMOUNT = (
    "is an amount; name its column with --data.amounts for --model.task Regression, or put it into data.class_names"
)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["noise", "speech,music"], f"line 3: label 'speech,music' {LIST}"),
        (["noise", "speech;music"], f"line 3: label 'speech;music' {LIST}"),
        (["noise", "speech | music"], f"line 3: label 'speech | music' {LIST}"),
        (["noise", "['speech', 'music']"], f"line 3: label \"['speech', 'music']\" {LIST}"),
        (["speech", "music", "speech, music"], f"line 4: label 'speech, music' {LIST}"),
        (["a, b", "b, c", "c, a"], f"line 2: label 'a, b' {LIST}"),
        (["1", "3", "1,3"], f"line 4: label '1,3' {LIST}"),
        (["1.0", "0.7", "0.3"], f"line 3: label 0.7 {AMOUNT}"),
        (["-1e-3", "2"], f"line 2: label -1e-3 {AMOUNT}"),
    ],
)
def test_several_labels_in_a_cell_and_amounts_are_refused_until_they_can_be_learned(labels, said, sounds, command):
    with open(sounds / "t.csv", "w", newline="") as file:
        rows = [
            (f"{name}/{number:02}.wav", label) for name in ("bells", "horns") for number, label in enumerate(labels)
        ]
        csv.writer(file).writerows([("path", "label"), *rows])
    for start in (SOUNDS, ["check", "--data", "AudioFolder"]):
        done = command(*start, "--data.root", sounds, "--data.table", "t.csv")
        assert (done.code, done.error.startswith(f"error: {sounds}/t.csv: {said}")) == (3, True), done.err
    names = [*dict.fromkeys(labels)]
    AudioFolder(str(sounds), table="t.csv", class_names=names).items  # noqa: B018  (given as class names: no error)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["1.5", "0.5;2"], f"line 2: label 1.5 {AMOUNT}"),
        (["bells/00.wav", "horns/00.wav"], "line 2: label bells/00.wav is a file, and there is no segmentation; give "),
        (["noise", "noise; bells/01.wav"], "line 3: label bells/01.wav is a file, and there is no segmentation; give "),
    ],
)
def test_amounts_and_files_are_no_classes_with_a_separator_either(labels, said, sounds, command):
    with open(sounds / "t.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *((f"bells/{n:02}.wav", each) for n, each in enumerate(labels))])
    separated = ["--data.labels_separator", ";", "--model.task", "MultiLabel"]
    for flags in [separated] if ";" in str(labels) else [separated, []]:
        done = command(*SOUNDS, "--data.root", sounds, "--data.table", "t.csv", *flags)
        assert (done.code, done.error.startswith(f"error: {sounds}/t.csv: {said}")) == (3, True), done.err


def test_another_separator_than_that_of_the_labels_is_named(sounds, command):
    labels = ["speech", "speech,music", "music"]
    with open(sounds / "t.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *((f"bells/{n:02}.wav", each) for n, each in enumerate(labels))])
    flags = ["--data.root", sounds, "--data.table", "t.csv", "--model.task", "MultiLabel", "--data.labels_separator"]
    done = command(*SOUNDS, *flags, ";")
    said = "line 3: label 'speech,music' is a list, and no label has ';' in it; give another --data.labels_"
    assert (done.code, done.error.startswith(f"error: {sounds}/t.csv: {said}")) == (3, True), done.err
    data = AudioFolder(str(sounds), table="t.csv", labels_separator=",")
    assert data.class_names == ["music", "speech"]
    assert list(written(torch.eye(2, dtype=torch.int64).sum(0, keepdim=True), data.class_names, ",")) == [
        "music,speech"
    ]


@pytest.mark.parametrize(
    "labels",
    [
        ["Rock, Paper", "Scissors"],
        ["maillot", "maillot, tank suit", "projectile, missile", "missile"],  # names from ImageNet
        ["Inside, small room", "Inside, public space", "Outside, urban or manmade"],  # names from AudioSet
        ["1,000 Hz", "2,4-D", "speech,"],
        ["1.0", "2.0"],  # pandas writes whole numbers so if a value is missing
        ["0.5 s", "1.5 s"],
    ],
)
def test_names_with_commas_and_whole_numbers_are_classes(labels, sounds):
    with open(sounds / "t.csv", "w", newline="") as file:
        rows = [
            (f"{name}/{number:02}.wav", label) for name in ("bells", "horns") for number, label in enumerate(labels)
        ]
        csv.writer(file).writerows([("path", "label"), *rows])
    assert AudioFolder(str(sounds), table="t.csv").class_names == sorted(labels)


def test_files_that_a_table_leaves_out_are_counted(sounds, command):
    rows = [f"{name}/{number:02}.wav,{name}" for name in ("bells", "horns") for number in range(10)]
    (sounds / "t.csv").write_text("path,label\n" + "\n".join(rows) + "\n")
    done = command(*SOUNDS, "--data.root", sounds, "--data.table", "t.csv")
    assert done.code == 0, done.err
    assert "4 sounds without a row in t.csv, such as 10.wav" in done.err


def test_a_fold_that_is_not_there_is_refused(sounds, command):
    (sounds / "t.csv").write_text("path,label,fold\nbells/00.wav,bells,1\nhorns/00.wav,horns,2\n")
    done = command(*SOUNDS, "--data.root", sounds, "--data.table", "t.csv", "--data.test_fold", "7")
    assert done.error.startswith(f"error: data.test_fold: no fold 7 in {sounds}; it has 1, 2")


def test_long_clips_are_cropped_anywhere_in_training_and_to_their_middle_in_the_test():
    ramp = torch.arange(1000) / 1000
    clips = Clips([ramp], torch.tensor([0]), max_samples=100)
    assert clips.sample(0).tolist() == ramp[450:550].tolist()
    starts = {float(clips.sample(0, torch.Generator().manual_seed(seed))[0]) for seed in range(50)}
    assert len(starts) > 40 and min(starts) < 0.1 and max(starts) > 0.8
    assert clips.lengths is None and clips.whole_lengths.tolist() == [1000]


def write_metadata(path: Path, rows: list[dict], classes: list[str] | None = None) -> None:
    if path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    else:
        table = pyarrow.Table.from_pylist(rows)
        features = {"label": {"_type": "ClassLabel", "names": classes}, "tags": [{"_type": "Value"}]}
        if classes is not None:
            table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        pyarrow.parquet.write_table(table, path)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("has_splits", [False, True])
def test_metadata_of_hugging_faces_audiofolder_and_imagefolder_is_read_without_a_flag(has_splits, suffix, tmp_path):
    names = ["cat", "dog"]
    for folder, count in (("train", 8), ("validation", 4), ("test", 4)) if has_splits else ((".", 20),):
        for number in range(count):
            picture(tmp_path / folder / f"more/{number}.png")
        labels = [number % 2 if suffix == ".parquet" else names[number % 2] for number in range(count)]
        rows = [
            {"file_name": f"more/{number}.png", "text": "some, text", "label": label}
            for number, label in enumerate(labels)
        ]
        write_metadata(tmp_path / folder / f"metadata{suffix}", rows, names)
    data = ImageFolder(str(tmp_path))
    data.setup()
    assert data.class_names == ["cat", "dog"]
    assert [len(samples) for samples in data.splits().values()] == ([8, 4, 4] if has_splits else [14, 2, 4])
    assert not has_splits or data.test_set.names[0] == "test/more/0.png"
    for samples in data.splits().values():
        expected = [int(Path(name).stem) % 2 for name in samples.names]
        assert samples.labels.tolist() == expected
    first = tmp_path / ("train" if has_splits else ".")
    for other in {"metadata.csv", "metadata.jsonl"} - {f"metadata{suffix}"}:
        (first / other).write_text("")
    with pytest.raises(DataError, match=r"holds metadata\..* and metadata\..*; keep one$"):
        ImageFolder(str(tmp_path)).setup()


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_metadata_without_labels_leaves_the_class_folders(suffix, images):
    write_metadata(images / f"metadata{suffix}", [{"file_name": "cats/00.png", "text": "a cat"}])
    assert ImageFolder(str(images)).class_names == ["cats", "dogs"]


def test_metadata_about_something_else_leaves_the_class_folders_and_a_line_says_so(images, capsys):
    write_metadata(images / "metadata.csv", [{"filename": "cats/00.png", "class": "cats", "site": "home"}])
    assert ImageFolder(str(images)).class_names == ["cats", "dogs"]
    said = f"{images}/metadata.csv: not used, because it has no column file_name\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("part", ["", "train"])
def test_files_that_metadata_leaves_out_are_counted(part, tmp_path, capsys):
    for number in range(20):
        picture(tmp_path / part / f"{number:02}.png")
    rows = [{"file_name": f"{number:02}.png", "label": "ab"[number % 2]} for number in range(8)]
    write_metadata(tmp_path / part / "metadata.csv", rows)
    assert len(ImageFolder(str(tmp_path)).items) == 8
    assert capsys.readouterr().err == f"{tmp_path}: 12 images without a row in a metadata file, such as 08.png\n"


@pytest.mark.parametrize("rows", [[{"file_name": "0.png", "text": "a cat"}], None])
def test_a_split_whose_metadata_has_no_labels_is_refused_and_not_drawn_from_another(rows, tmp_path):
    for part in ("train", "test"):
        for number in range(20):
            picture(tmp_path / f"{part}/{number}.png")
    labelled = [{"file_name": f"{number}.png", "label": "ab"[number % 2]} for number in range(20)]
    write_metadata(tmp_path / "train/metadata.csv", labelled)
    if rows is not None:
        write_metadata(tmp_path / "test/metadata.csv", rows)
    said = rf"^{tmp_path}/test: holds images, but no row of a metadata\.csv gives one of them a label; add the rows, or"
    with pytest.raises(DataError, match=said):
        ImageFolder(str(tmp_path)).setup()
    labelled = [row | {"file_name": f"{part}/{row['file_name']}"} for part in ("train", "test") for row in labelled]
    (tmp_path / "train/metadata.csv").unlink()
    write_metadata(tmp_path / "metadata.csv", labelled)  # one for all folders
    assert len(ImageFolder(str(tmp_path)).items) == 40


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_table_of_json_or_parquet_says_what_one_of_csv_says(suffix, sounds):
    rows = [
        {"path": f"{name}/{number:02}.wav", "label": [name, "loud"][: 1 + number % 2], "start": 0.01, "end": end}
        for name in ("bells", "horns")
        for number in range(12)
        for end in ([0.05, None] if number == 3 else [None])
    ]
    write_metadata(sounds / f"t{suffix}", rows)
    write_metadata(sounds / "t.csv", [row | {"label": ";".join(row["label"])} for row in rows])
    found = [read_table(sounds / f"t{each}", ";") for each in (suffix, ".csv")]
    plain = [[replace(item, line=0) for item in items] for items in found]
    assert plain[0] == plain[1] and len(plain[0]) == 26
    with pytest.raises(DataError, match=r"label \"\['bells', 'loud'\]\" is a list, and a clip has one class"):
        AudioFolder(str(sounds), table=f"t{suffix}").setup()
    write_metadata(sounds / f"one{suffix}", [row | {"label": row["label"][:1]} for row in rows])
    assert {item.label for item in read_table(sounds / f"one{suffix}")} == {"bells", "horns"}
    write_metadata(sounds / f"inside{suffix}", [{"path": "bells/00.wav", "label": ["Rock; Pop", "Jazz"]}])
    with pytest.raises(DataError, match=r"'Rock; Pop' in a list has ';' in it; give another --data\.labels_separator$"):
        read_table(sounds / f"inside{suffix}", ";")


def test_a_link_that_leads_nowhere_is_left_out_with_a_line(sounds, command, tmp_path):
    (sounds / "bells/lost.wav").symlink_to(tmp_path / "on a disk that is not here.wav")
    (sounds / "bells/lost too.wav").symlink_to("lost too.wav")
    (sounds / "bells/site").symlink_to(tmp_path / "not here")
    (sounds / "bells/notes.txt").symlink_to(tmp_path / "not here.txt")
    (sounds / "whistles").symlink_to(tmp_path / "nor this")
    done = command(*SOUNDS, "--data.root", sounds)
    assert done.code == 0, done.err
    said = [line for line in done.err.splitlines() if "nowhere" in line]
    assert said == [
        f"{sounds}: 1 link leads nowhere, such as whistles; left out",
        f"{sounds / 'bells'}: 3 links lead nowhere, such as lost too.wav; left out",
    ]
    assert len(splits(tmp_path / "runs/audiofolder/0")) == 24


def test_a_link_in_a_circle_is_no_file_without_a_row(sounds, capsys):
    (sounds / "bells/round.wav").symlink_to("round.wav")
    (sounds / "t.csv").write_text("path,label\n" + "".join(f"{name}/00.wav,{name}\n" for name in ("bells", "horns")))
    assert len(AudioFolder(str(sounds), table="t.csv").items) == 2
    assert f"{sounds}: 22 sounds without a row in t.csv" in capsys.readouterr().err
    assert AudioFolder(str(sounds)).bad_files() == {}


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ('{"path": "bells/00.wav", "label": "x"}\n{"path"', "line 2: no JSON (Expecting ':' delimiter"),
        ("[1, 2]", "line 1: no object of JSON; "),
        ('{"path": "bells/00.wav"}', "no column label; "),
        ('{"path": "bells/00.wav", "label": "x"}\n\n{"path": "bells/00.wav"}', "line 3: no path or no label; "),
        ("\n", "no column label and path; "),
    ],
)
def test_faults_in_a_table_of_json_name_the_line(table, error, tmp_path):
    (tmp_path / "t.jsonl").write_text(table)
    with pytest.raises(DataError) as found:
        read_table(tmp_path / "t.jsonl")
    assert str(found.value).startswith(f"{tmp_path}/t.jsonl: {error}") and "\n" not in str(found.value)


def test_a_table_of_parquet_that_is_cut_off_is_named(tmp_path):
    path = tmp_path / "metadata.parquet"
    write_metadata(path, [{"file_name": "a.png", "label": "x"}])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=rf"^{path}: cut off or damaged \(.*\); copy or download it again$"):
        ImageFolder(str(tmp_path)).setup()
