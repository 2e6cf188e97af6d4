"""benchmarks/front_door.py, on a few small images and sounds and for seconds."""

import csv
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import soundfile
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


def test_a_table_has_the_three_rates_and_the_best_of_them_trains_on_and_nothing_is_trained_twice(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "--sets", "things", "fsdd", "--systems", "CNN", "--minutes", "0.01", "--seeds", "2"
    run(script, monkeypatch, *given)
    for name, split in (("things", {"train": 8 * 8, "val": 8 * 32, "test": 8 * 3}), ("fsdd", {"train": 3 * 2 * 3})):
        found = {part: sum(1 for _ in Path(f"runs/front_door/sets/{name}/{part}").glob("*/*")) for part in split}
        assert found == split
        with open("runs.csv", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["experiment"] == f"front_door/{name}/0.01 min"]
        assert [row["seed"] for row in rows] == ["0", "0", "0", "1"]
        first = {row["setting"]: float(row["validation"]) for row in rows[:3]}
        assert list(first) == ["0.001", "0.002", "0.004"]
        assert first[rows[3]["setting"]] == max(first.values())
        assert all(0 <= float(row["test"]) <= 1 and float(row["epochs"]) >= 0 for row in rows)
    assert "front_door/fsdd/0.01 min\n| system |" in capsys.readouterr().out
    monkeypatch.setattr(script, "train_cnn", None)  # what has a row is not trained again
    run(script, monkeypatch, *given)


@pytest.mark.thorough
def test_longseq_is_trained_by_its_command_line(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    run(script, monkeypatch, "--sets", "things", "--systems", "longseq", "--minutes", "0.2", "--seeds", "1")
    with open("runs.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["system"] == "longseq" and float(row["test"]) > 0.1
