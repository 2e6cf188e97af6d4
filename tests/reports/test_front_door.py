"""benchmarks/front_door.py, on a few small images and sounds and for seconds."""

import csv
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

SCRIPT = Path(__file__).parents[2] / "benchmarks/front_door.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, and in tmp_path/data images of CIFAR-10's folders and spoken digits."""
    drawn = np.random.default_rng(0)
    for split, count in (("train", 120), ("test", 3)):
        for label in range(9):
            (folder := tmp_path / f"data/CIFAR-10-images/{split}/class{label}").mkdir(parents=True)
            for number in range(count):
                pixels = drawn.integers(20 * label, 20 * label + 60, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number:03}.jpg")
    (folder := tmp_path / "data/free-spoken-digit-dataset/recordings").mkdir(parents=True)
    for speaker in ("theo", "yweweler", "george", "lucas"):
        for digit in range(3):
            for number in range(9):
                tone = 0.1 * np.sin(np.arange(4000) * (digit + 1) / 9)
                soundfile.write(folder / f"{digit}_{speaker}_{number}.wav", tone, 8000)
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("front_door", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "front_door", module)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    return module


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["front_door.py", "--data", "data", "--table", "runs.csv", *arguments])
    script.main()


def test_rates_are_tried_until_the_best_is_between_others_and_it_trains_on_and_nothing_is_trained_twice(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "--sets", "things", "fsdd", "--systems", "CNN", "--minutes", "0.01", "--seeds", "2"
    run(script, monkeypatch, *given)
    for name, split in (("things", {"train": 8 * 8, "val": 8 * 32, "test": 8 * 3}), ("fsdd", {"train": 3 * 2 * 3})):
        found = {part: sum(1 for _ in Path(f"runs/front_door/sets/{name}/{part}").glob("*/*")) for part in split}
        assert found == split
        with open("runs.csv", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["experiment"] == f"front_door/{name}/0.01 min"]
        *first, last = rows
        assert {row["seed"] for row in first} == {"0"} and last["seed"] == "1"
        validated = {float(row["setting"]): float(row["validation"]) for row in first}
        assert list(validated)[:3] == [0.001, 0.002, 0.004]
        assert validated[float(last["setting"])] == max(validated.values())
        assert min(validated) < float(last["setting"]) < max(validated)
        assert all(0 <= float(row["test"]) <= 1 and float(row["epochs"]) >= 0 for row in rows)
    assert "front_door/fsdd/0.01 min\n| system |" in capsys.readouterr().out
    monkeypatch.setattr(script, "train_cnn", None)  # what has a row is not trained again
    run(script, monkeypatch, *given)


def test_a_set_of_sounds_has_a_cnn_that_hears_no_level(script: ModuleType, tmp_path: Path) -> None:
    folder = script.written("fsdd", tmp_path / "data", tmp_path)
    clips = torch.randn(2, 8000) * torch.tensor([[0.2], [1.0]])
    heard = {}
    for subtracts in (False, True):
        sounds = script.Sounds(folder, script.SETS["fsdd"]._replace(subtracts_level=subtracts))
        heard[subtracts] = float((sounds.features(2 * clips) - sounds.features(clips)).abs().mean())
    assert heard[False] > 0.1
    assert heard[True] < 1e-3


def test_the_answers_of_systems_are_compared(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def train_longseq(folder, source, minutes, seed, flags, out):
        files = sorted((folder / "test").glob("*/*"))
        names, right = [file.relative_to(folder).as_posix() for file in files], np.arange(len(files)) % 2 == seed
        script.Tested(names, [0] * len(files), right).save(out / "answers.json")
        return {"validation": 0.5, "test": right.mean(), "minutes": minutes}

    monkeypatch.setattr(script, "train_longseq", train_longseq)
    given = "--sets", "things", "fsdd", "--systems", "longseq", "CNN", "CNN, level subtracted"
    run(script, monkeypatch, *given, "--minutes", "0.01", "--seeds", "2")
    with open("comparisons.csv", newline="") as file:
        found = {(row["experiment"], row["first"], row["second"]): row for row in csv.DictReader(file)}
    sounds = "front_door/fsdd/0.01 min"
    assert [*found] == [
        ("front_door/things/0.01 min", "CNN", "longseq"),
        (sounds, "CNN", "longseq"),
        (sounds, "CNN, level subtracted", "longseq"),
    ]
    with open("runs.csv", newline="") as file:
        of_cnn = [row for row in csv.DictReader(file) if row["experiment"] == sounds and row["system"] == "CNN"]
    rate = next(row["setting"] for row in of_cnn if row["seed"] == "1")
    accuracies = [float(row["test"]) for row in of_cnn if row["setting"] == rate]
    difference = float(found[sounds, "CNN", "longseq"]["difference"])
    test = len([*Path("runs/front_door/sets/fsdd/test").glob("*/*")])
    mean = (test // 2 + (test + 1) // 2) / 2 / test
    assert difference == pytest.approx(mean - sum(accuracies) / 2, abs=2e-3)


@pytest.mark.thorough
def test_longseq_is_trained_by_its_command_line(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    run(script, monkeypatch, "--sets", "things", "--systems", "longseq", "--minutes", "0.2", "--seeds", "1")
    with open("runs.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["system"] == "longseq" and float(row["test"]) > 0.1
    (answers,) = Path("runs/front_door").glob("*/answers.json")
    tested = script.Tested.load(answers)
    assert tested.right.mean() == pytest.approx(float(row["test"]), abs=1e-4)
    files = sorted(Path("runs/front_door/sets/things/test").glob("*/*"))
    assert [Path(name).name for name in tested.names] == [file.name for file in files]
    cnn = script.untrained_cnn(Path("runs/front_door/sets/things"), script.SETS["things"])
    assert cnn.tested(Path("runs/front_door/sets/things"))[:2] == tested[:2]
