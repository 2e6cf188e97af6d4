"""The GPU's benchmark runs from end to end on a CPU, with tiny sizes."""

import csv
from pathlib import Path

import forked

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu.py"


def test_the_benchmark_of_a_gpu_runs_on_a_cpu_and_writes_a_row_for_each_part(tmp_path: Path) -> None:
    done = forked.run(SCRIPT, "--device", "cpu", "--n", 64, 128, "--width", 32, "--out", tmp_path, cwd=SCRIPT.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = list(csv.reader((tmp_path / "table.csv").open()))
    measured = [" ".join(row[:1]).split(",")[0] for row in rows[1:]]
    kinds = ["training step", "MFU of a training step", "block", "attention", "training step on 121 tokens"]
    kinds += ["longest sequence trained at batch 1", "Verma without E", "window of 512 tokens", "softmax over tokens"]
    assert sorted(set(measured), key=measured.index) == kinds
    assert rows[1][2] == "4 images of 8 x 8, width 96" and "ms" in rows[1][3]
    assert "n = 256" in [row[3] for row in rows if row[0].startswith("longest")], "twice the most that is allowed"
    assert rows[-1][0] in (tmp_path / "table.md").read_text()


def test_no_row_begins_after_the_minutes(tmp_path: Path) -> None:
    small = ["--device", "cpu", "--n", 64, "--width", 32, "--minutes", 0]
    assert forked.run(SCRIPT, *small, "--out", tmp_path, cwd=SCRIPT.parent).returncode == 0
    table = (tmp_path / "table.md").read_text()
    assert "No row was begun after 0 minutes" in table and table.count("| training step") == 1
