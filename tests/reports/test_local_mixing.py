"""The benchmark of local mixing runs on a CPU, with tiny sizes."""

import csv
from pathlib import Path

import forked

SCRIPT = Path(__file__).parents[2] / "benchmarks/local_mixing.py"


def test_each_side_computes_the_formula_in_both_precisions(tmp_path: Path) -> None:
    done = forked.run(SCRIPT, "--device", "cpu", "--shapes", "2x6x5x8", "--out", tmp_path, cwd=SCRIPT.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [(row["precision"], row["side"]) for row in rows] == [
        ("bf16", "channels last"),
        ("bf16", "contiguous"),
        ("fp32", "channels last"),
    ]
    assert all(float(row["error"]) < {"bf16": 2e-2, "fp32": 1e-5}[row["precision"]] for row in rows)
