"""Recordings whose table says what is heard when become clips, each with all classes that overlap it."""

import csv
import itertools
from pathlib import Path

import numpy as np
import pytest
import soundfile

from datamodules import AudioFolder, DataError
from datamodules.files import Item
from datamodules.table import cut_into_clips

ROWS = [
    ("a.wav", "bird", 0.5, 1.5),
    ("a.wav", "frog", 1.2, 1.4),
    ("a.wav", "bird", 1.9, 2.0),
    ("a.wav", "rain", 5.5, 5.8),
    ("b.wav", "frog", "", ""),
    ("c.wav", "", "", ""),
]
SECONDS = {"a.wav": 6.5, "b.wav": 2.0, "c.wav": 0.7}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for name, seconds in SECONDS.items():
        soundfile.write(tmp_path / name, 0.1 * generator.standard_normal(round(seconds * 8000)), 8000)
    with open(tmp_path / "events.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "start", "end"), *ROWS])
    return tmp_path


def clips(root: Path, seconds: float) -> list[tuple[str, float, float | None, set[str]]]:
    data = AudioFolder(str(root), table="events.csv", labels_separator=";", clip_seconds=seconds)
    return [(item.path, item.start, item.end, set(item.label.split(";")) - {""}) for item in data.items]


def test_every_clip_has_the_classes_that_overlap_it(root: Path) -> None:
    assert clips(root, 2.0) == [
        ("a.wav", 0.0, 2.0, {"bird", "frog"}),
        ("a.wav", 2.0, 4.0, set()),
        ("a.wav", 4.0, 6.0, {"rain"}),
        ("a.wav", 4.5, 6.5, {"rain"}),  # the last one ends with the recording
        ("b.wav", 0.0, 2.0, {"frog"}),
        ("c.wav", 0.0, 0.7, set()),
    ]


@pytest.mark.parametrize("seconds", [0.3, 0.5, 1.0, 6.5, 20.0])
def test_clips_cover_a_recording_and_miss_no_event(root: Path, seconds: float) -> None:
    for path, length in SECONDS.items():
        of_path = [clip for clip in clips(root, seconds) if clip[0] == path]
        assert of_path[0][1] == 0 and of_path[-1][2] == pytest.approx(length)
        for (_, start, end, _), (_, after, _, _) in itertools.pairwise(of_path):
            assert start < after <= end + 1e-6
        for of_row, name, begin, stop in ROWS:
            if of_row == path:
                for _, start, end, heard in of_path:
                    overlaps = begin == "" or (begin < end and stop > start)
                    assert name == "" or (name in heard) >= overlaps


def test_one_second_of_each_clip_is_read(root: Path) -> None:
    data = AudioFolder(str(root), table="events.csv", labels_separator=";", clip_seconds=1.0, sample_rate_hz=8000)
    assert data.seconds == 1.0 and data.class_names == ["bird", "frog", "rain"]
    first = data.read_item(data.items[1])
    sound = soundfile.read(root / "a.wav", dtype="float32")[0]
    assert np.allclose(first.numpy(), sound[8000:16000])


def test_clips_need_labels_of_several_classes_and_a_length() -> None:
    with pytest.raises(ValueError, match=r"^labels_separator must be given with clip_seconds, got None; "):
        AudioFolder("nowhere", table="t.csv", clip_seconds=3.0)
    with pytest.raises(ValueError, match=r"^clip_seconds must be 0\.01 or more, got 0\.0; "):
        AudioFolder("nowhere", table="t.csv", labels_separator=";", clip_seconds=0.0)


def test_a_broken_recording_is_named_as_ever(root: Path) -> None:
    (root / "b.wav").write_bytes(b"RIFF")
    data = AudioFolder(str(root), table="events.csv", labels_separator=";", clip_seconds=1.0)
    with pytest.raises(DataError, match=r"b\.wav: not a readable sound"):
        data.setup()


def test_a_row_keeps_its_split_and_fold() -> None:
    item = Item("a.wav", "bird", "test", "3", 0.0, 1.0, 7)
    (clip,) = cut_into_clips([item], 5.0, lambda path: 2.0, ";")
    assert (clip.split, clip.fold, clip.end, clip.label) == ("test", "3", 2.0, "bird")
