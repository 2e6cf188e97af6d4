"""Folds, and groups of files (patients, recordings, sites) that are never in two splits."""

import csv
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from small_sets import SMALL
from test_splits import grey, noise, of_table

from datamodules import ESC50, AudioFolder, DataError, Digits, ImageFolder, Needles
from datamodules.hold_out import folds_of
from longseq.arguments import arguments_of

SPEAKER = re.compile(r"_([a-z]+)_")


@pytest.fixture
def spoken(real_data: Path, tmp_path: Path) -> Path:
    """A table of the first recordings of FSDD with their speakers, of whom one says two digits only."""
    recordings = real_data / "free-spoken-digit-dataset" / "recordings"
    rows = [(path.name, path.name[0], SPEAKER.search(path.name)[1]) for path in sorted(recordings.glob("*_[0-3].wav"))]
    rows = [row for row in rows if row[2] != "theo" or row[1] in "01"]
    (tmp_path / "recordings").symlink_to(recordings)
    with open(tmp_path / "clips.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "speaker"), *rows])
    return tmp_path


def speakers_of(data: AudioFolder) -> dict[str, set[str]]:
    """The speakers of each split; no split is empty."""
    data.setup()
    speakers = {split: {SPEAKER.search(name)[1] for name in part.names} for split, part in data.splits().items()}
    assert all(speakers.values())
    assert sum(map(len, data.splits().values())) == 208
    return speakers


def by_speaker(folder: Path, **options) -> AudioFolder:
    return AudioFolder(str(folder / "recordings"), table=str(folder / "clips.csv"), groups="speaker", **options)


@pytest.mark.parametrize("seed", range(3))
def test_no_speaker_is_in_two_random_splits_of_real_recordings(seed: int, spoken: Path, tmp_path: Path) -> None:
    data = by_speaker(spoken, seed=seed)
    assert sum(len(names) for names in speakers_of(data).values()) == 6
    data.save_splits(tmp_path / "splits.csv")  # is such a table too
    again = AudioFolder(str(spoken / "recordings"), table=str(tmp_path / "splits.csv"), groups="speaker", seed=9)
    assert speakers_of(again) == speakers_of(data)


def test_without_groups_the_same_speakers_are_in_all_splits(spoken: Path) -> None:
    data = AudioFolder(str(spoken / "recordings"), table=str(spoken / "clips.csv"))
    assert sum(len(names) for names in speakers_of(data).values()) > 6


def test_every_speaker_is_tested_in_one_fold_and_never_trained_on_there(spoken: Path) -> None:
    tested: list[str] = []
    for fold in (1, 2, 3):
        speakers = speakers_of(by_speaker(spoken, folds=3, fold=fold))
        assert sum(len(names) for names in speakers.values()) == 6
        tested += speakers["test"]
    assert len(tested) == len(set(tested)) == 6


def test_a_folder_has_its_groups_in_the_names_of_its_files(tmp_path: Path) -> None:
    for number in range(24):
        grey(tmp_path / ("ill" if number % 2 else "well") / f"site{number % 8}" / f"{number}.png")
    for groups in ("site[0-9]", "/(.*)/"):
        data = ImageFolder(str(tmp_path), groups=groups, val_fraction=0.3, test_fraction=0.3)
        data.setup()
        places = {(name.split("/")[1], split) for split, part in data.splits().items() for name in part.names}
        assert len(places) == 8
    with pytest.raises(DataError, match=r"^data\.groups: site\[0-3\] finds nothing in ill/site5/13\.png; it must"):
        ImageFolder(str(tmp_path), groups="site[0-3]").setup()
    with pytest.raises(ValueError, match=r"^groups must be a regular expression \(.*\), or a column .*, got '\('; "):
        ImageFolder(str(tmp_path), groups="(")


@pytest.mark.parametrize("column", ["split", "fold"])
def test_a_group_in_two_splits_or_folds_of_a_table_is_refused(column: str, tmp_path: Path) -> None:
    rows = []
    for number in range(12):
        noise(tmp_path / f"{number}.wav")
        place = ("train", "val", "test")[number % 3] if column == "split" else 1 + number % 3
        rows.append(f"{number}.wav,{'ab'[number // 6]},{place},p{number % 3 if number else 1}")
    of_fold = {"folds": 3, "fold": 2} if column == "fold" else {}
    where = ("train", "val") if column == "split" else ("fold 1", "fold 2")
    with pytest.raises(
        DataError, match=rf": group p1 is in {where[0]} and in {where[1]} \(1\.wav\); give all files of"
    ):
        of_table(tmp_path, f"path,label,{column},patient\n" + "\n".join(rows), groups="patient", **of_fold).setup()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("path,label\n0.wav,a\n1.wav,b", "no column patient; name it in the first line"),
        ("path,label,patient\n0.wav,a,x\n1.wav,b,", "line 3: no patient; give each row one, or"),
        ("path,label,start,end,patient\n0.wav,a,0,1,x\n0.wav,a,1,2,y", "0.wav has patient x and y; give all rows"),
    ],
)
def test_a_table_whose_groups_are_unclear_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(f"clips.csv: {said}")):
        of_table(tmp_path, text, groups="patient").setup()


# Folds


@pytest.mark.parametrize("kind", [kind for kind in SMALL if kind is not Needles], ids=lambda kind: kind.__name__)
def test_every_sample_is_held_out_in_one_fold(kind, tmp_path, monkeypatch) -> None:
    """In the test split, or in the validation split if the data has a test split of its own."""
    arguments = arguments_of(SMALL[kind](tmp_path, monkeypatch))
    held: dict[str, Counter[str]] = {"val": Counter(), "test": Counter()}
    folds = 5 if kind is ESC50 else 2
    for fold in range(1, folds + 1):
        data = kind(**{**arguments, "folds": folds, "fold": fold})
        data.setup()
        splits = {split: list(part.names) for split, part in data.splits().items()}
        names = [f"{split == 'test'} {name}" for split, names in splits.items() for name in names]
        for split in ("val", "test"):
            held[split].update(splits[split])
        assert set(data.train_set.labels.tolist()) == set(range(data.num_classes))
    turns = held["test"] if set(held["test"].values()) == {1} else held["val"]
    stays = [] if turns is held["test"] else splits["test"]
    assert set(turns.values()) == {1} and len(turns) + len(stays) == len(names)


def test_the_folds_of_esc50_are_its_own(real_data: Path) -> None:
    for fold in range(1, 6):
        data = ESC50(str(real_data), folds=5, fold=fold)
        data.setup()
        folds = [{Path(name).name[0] for name in part.names} for part in (data.test_set, data.val_set)]
        assert folds == [{str(fold)}, {str(fold - 1 or 5)}]
    with pytest.raises(DataError, match=r"has 5 folds of its own \(1, 2, 3, 4, 5\), got 4; give 5, or leave out"):
        ESC50(str(real_data), folds=4, fold=1).setup()


def test_folds_have_the_same_share_of_every_class_and_keep_groups_whole() -> None:
    labels = torch.tensor([0] * 50 + [1] * 20 + [2] * 10)
    for seed in range(3):
        folds = folds_of(labels, None, 5, seed)
        assert all(labels[folds == fold].bincount().tolist() == [10, 4, 2] for fold in range(1, 6))
        groups = [f"{index // 2}" for index in range(80)]
        folds = folds_of(labels, groups, 5, seed)
        assert len({(group, fold) for group, fold in zip(groups, folds.tolist(), strict=True)}) == 40
        assert all(labels[folds == fold].bincount().tolist() == [10, 4, 2] for fold in range(1, 6))
    assert not torch.equal(folds_of(labels, None, 5, 0), folds_of(labels, None, 5, 1))
    many = torch.stack([torch.ones(80), labels == 1, labels == 2], dim=1).long()  # strata of their rarest classes
    assert all(many[folds_of(many, None, 5, 0) == fold].sum(0).tolist() == [16, 4, 2] for fold in range(1, 6))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"folds": 7},
            "data.folds: 7 folds of 12 files or groups, 6 samples in the largest class; ask for fewer folds",
        ),
        ({"folds": 2, "groups": "[ab]"}, "data.folds: class a is in one fold only, so nothing is left of it to train"),
        ({"folds": 3, "groups": "[ab]"}, "data.folds: 3 folds of 2 files or groups, 6 samples in the largest class"),
        ({"folds": 3, "test_fold": 2}, "data.test_fold: no fold 2 in "),
    ],
)
def test_folds_that_cannot_be_are_refused_in_the_first_one(options: dict, said: str, tmp_path: Path) -> None:
    for number in range(12):
        grey(tmp_path / "ab"[number % 2] / f"{number}.png")
    with pytest.raises(DataError, match=f"^{re.escape(said)}"):
        ImageFolder(str(tmp_path), fold=1, **options).setup()


class Spoken(Digits):
    """Digits in groups of seven: the sample 7 k + i is of group k."""

    def groups_of(self, train):
        return [f"speaker {int(name) // 7}" for name in train.names]


def test_a_drawn_validation_keeps_groups_whole() -> None:
    data = Spoken()
    data.setup()
    groups = [{int(name) // 7 for name in samples.names} for samples in (data.train_set, data.val_set)]
    assert not groups[0] & groups[1]
    num_train, num_val = len(data.train_set), len(data.val_set)
    assert num_train + num_val == 1438 and 120 <= num_val <= 170


def test_a_validation_split_that_is_drawn_has_no_folds(tmp_path, monkeypatch) -> None:
    data = Needles(**{**arguments_of(SMALL[Needles](tmp_path, monkeypatch)), "folds": 2, "fold": 1})
    with pytest.raises(DataError, match=r"^data\.folds: Needles has a validation split of its own, .*; leave it out$"):
        data.setup()


@pytest.mark.parametrize("options", [{"folds": 3}, {"fold": 1}, {"folds": 3, "fold": 4}, {"folds": 3, "fold": 0}])
def test_a_fold_without_its_number_is_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=r"^fold must be in 1\.\.folds, and given with folds, got "):
        ImageFolder("nowhere", **options)
