"""benchmarks/calls.py, on a few sounds, with a network of four bands, and for seconds."""

import csv
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import soundfile
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks/calls.py"


class Bands:
    """Stands for BirdNET: the deviation of windows of 0.1 s in four bands."""

    window = 4800

    def __call__(self, sound: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(sound).abs()[:240].view(4, 60).std(1)[None]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with fewer recordings, and in tmp_path/data digits that are tones."""
    (digits := tmp_path / "data/free-spoken-digit-dataset/recordings").mkdir(parents=True)
    (others := tmp_path / "data/ESC-50-master/audio").mkdir(parents=True)
    for speaker in ("george", "yweweler", "theo"):
        for digit in (0, 3, 6):
            for number in range(3):
                tone = np.sin(np.arange(400) * (digit + 1) / 9)
                soundfile.write(digits / f"{digit}_{speaker}_{number}.wav", tone, 8000)
    for fold in range(3, 6):
        soundfile.write(others / f"{fold}-1-A-0.wav", np.random.default_rng(fold).standard_normal(9000) / 9, 44100)
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("calls", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "calls", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "BirdNET", Bands)
    monkeypatch.setattr(module, "NUMBERS", {"train": 24, "val": 8, "test": 8})
    monkeypatch.chdir(tmp_path)
    return module


def test_a_row_for_each_training_and_the_best_rate_has_the_other_seeds(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    systems = ["max, clock", "Verma and convolutions", "random forest on the same"]
    given = ["--data", "data", "--seconds", "0.2", "--seeds", "2", "--table", "runs.csv", "--systems", *systems]
    monkeypatch.setattr(sys, "argv", ["calls.py", *given])
    script.main()
    for task in ("who", "order", "bouts"):
        with open("runs.csv", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["experiment"] == f"calls/{task}/0.2 s"]
        for system, seeds in zip(systems, ("0001", "0001", "01"), strict=True):
            of_system = [row for row in rows if row["system"] == system]
            assert "".join(row["seed"] for row in of_system) == seeds
            tried = [row for row in of_system if row["seed"] == "0"]
            assert of_system[-1]["setting"] == max(tried, key=lambda row: float(row["validation"]))["setting"]
        assert all(0 <= float(row["test"]) <= 1 for row in rows)
    monkeypatch.setattr(script, "train", None)  # what has a row is not trained again
    monkeypatch.setattr(script, "BirdNET", None)
    script.main()
    assert "| max, clock |" in capsys.readouterr().out


@pytest.mark.parametrize("label", [0, 1])
def test_calls_lie_in_a_recording_as_its_class_says(script: ModuleType, label: int) -> None:
    # a token of a call is 10 times its digit, and one of the background is -1
    bank = {f"train/george/{digit}": torch.full((3, 2), 10.0 * digit) for digit in range(10)}
    bank["train/background"] = torch.full((3, 2), -1.0)
    for seed in range(30):
        drawn = {
            task: script.recording(bank, task, "train", label, np.random.default_rng(seed))[:, 0].div(10)
            for task in ("who", "order", "bouts")
        }
        for task, values in drawn.items():
            places = (values >= 0).nonzero()[:, 0]
            assert len(values) == 200 and len(places) == 12
            distances = places.diff()
            if task == "bouts":  # inside a bout a call may be missing now and then
                assert int((distances > 10).sum()) + 1 <= (3, 6)[label]
            else:
                assert int((distances > 40).sum()) == 1 and int(distances[5]) > 40
        who, order = drawn["who"][drawn["who"] >= 0], drawn["order"][drawn["order"] >= 0]
        assert len(set(who.tolist())) == (1, 2)[label]
        assert order.tolist() == ([0] * 6 + [6] * 6, [6] * 6 + [0] * 6)[label]
