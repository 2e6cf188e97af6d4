"""benchmarks/uea.py and benchmarks/elpv.py, on a few made signals and cells."""

import csv
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def rows_of(table: Path) -> list[dict[str, str]]:
    with open(table, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def uea(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A call of uea.py on 20 signals with two channels and 5 to 9 samples: a sine for the class a, noise for b."""
    script, drawn = loaded("uea", monkeypatch), np.random.default_rng(0)
    for official in ("TRAIN", "TEST"):
        lines = ["#made", "@problemName JapaneseVowels", "@classLabel true a b", "@data"]
        for number in range(20):
            time = np.arange(5 + number % 5)
            signal = drawn.normal(size=(2, len(time))) if number % 2 else np.stack([np.sin(time)] * 2)
            lines.append(":".join([*(",".join(f"{x:.3f}" for x in row) for row in signal), "ab"[number % 2]]))
        path = tmp_path / f"wheel/JapaneseVowels/JapaneseVowels_{official}.ts"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")

    def run(*arguments: str) -> list[dict[str, str]]:
        given = ["--sets", "JapaneseVowels", "--wheel", "wheel", "--runs", "runs", "--table", "runs.csv", *arguments]
        monkeypatch.setattr(sys, "argv", ["uea.py", *given])
        script.main()
        return rows_of(Path("runs.csv"))

    run.script = script  # type: ignore[attr-defined]
    monkeypatch.chdir(tmp_path)
    return run


def test_signals_keep_their_lengths_and_a_fifth_of_each_class_is_the_validation(uea: Any) -> None:
    folder = uea.script.written("JapaneseVowels", 0, Path("wheel"), Path("runs"))
    files = sorted(folder.glob("*/*/*.npz"))
    assert Counter(file.relative_to(folder).parts[:2] for file in files) == {
        ("train", "a"): 8, ("train", "b"): 8, ("val", "a"): 2, ("val", "b"): 2, ("test", "a"): 10, ("test", "b"): 10
    }  # fmt: skip
    shapes = Counter(np.load(file)["signal"].shape for file in files)
    assert shapes == {(2, length): 8 for length in range(5, 10)}
    first, second = (uea.script.written("JapaneseVowels", seed, Path("wheel"), Path("runs")) for seed in (0, 1))
    assert len({tuple(file.name for file in sorted(of.glob("val/*/*"))) for of in (first, second)}) == 2


def test_the_setting_that_is_best_on_the_validation_of_seed_0_is_used_for_other_seeds(
    uea: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def trained(run: Path, *flags: str) -> Any:
        size = flags[flags.index("--model.encoder.patch_size") + 1]
        loss, test = (0.2, 0.5) if size == "2" else (0.3, 1.0)
        return {"validation": 0.9, "loss": loss, "test": test, "f1": 0.5}

    monkeypatch.setattr(uea.script, "train_longseq", trained)
    rows = uea("--seeds", "2")
    tried = [(row["setting"], row["seed"]) for row in rows if row["system"] == "softmax"]
    assert tried == [("patch size 1", "0"), ("patch size 2", "0"), ("patch size 2", "1")]  # not the best on the test
    forest = [row for row in rows if row["system"] == "random forest"]
    assert len(forest) == 3 and all(float(row["test"]) > 0.9 for row in forest)  # a sine's deviation is known
    assert "| softmax | patch size 2 | 2 | 0.900 (0.900 to 0.900) | 0.500" in capsys.readouterr().out
    monkeypatch.setattr(uea.script, "train_longseq", None)  # what has a row is not trained again
    assert uea("--seeds", "2") == rows


@pytest.mark.thorough
def test_longseq_trains_on_the_signals_of_a_wheel(uea: Any) -> None:
    rows = uea("--seeds", "1", "--epochs", "1")
    assert {row["system"] for row in rows} == {"Verma", "no attention", "softmax", *uea.script.SIMPLE}


def test_a_quarter_of_each_kind_of_cell_is_the_test_and_two_thirds_is_defective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = loaded("elpv", monkeypatch)
    kinds = [(p, t) for p in ("0.0", "0.3333333333333333", "0.6666666666666666", "1.0") for t in ("mono", "poly")]
    lines = [f"images/cell{n:04}.png  {kinds[n % 8][0]}   {kinds[n % 8][1]}" for n in range(160)]
    (tmp_path / "labels.csv").write_text("\n".join(lines) + "\n")
    rows = rows_of(script.written(0, tmp_path, tmp_path))
    assert [row["label"] for row in rows[:8]] == ["functional"] * 4 + ["defective"] * 4
    assert [row["path"] for row in rows[:2]] == ["images/cell0000.png", "images/cell0001.png"]
    counts = Counter((number % 8, row["split"]) for number, row in enumerate(rows))
    assert counts == {(kind, split): n for kind in range(8) for split, n in (("train", 12), ("val", 3), ("test", 5))}
    assert rows_of(script.written(1, tmp_path, tmp_path)) != rows
