"""Run folders, runs/<experiment>/<number>/, and the files in them that are not Lightning's."""

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor


def new_run(root: Path, experiment: str) -> Path:
    """Make the next free folder root/runs/experiment/0, 1, 2, ...; two runs started at once get two folders."""
    parent = root / "runs" / experiment
    parent.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(folder.name) for folder in parent.iterdir() if folder.name.isdecimal()), default=-1)
    while True:
        run = parent / str(number)
        try:
            run.mkdir()
        except FileExistsError:
            number += 1
        else:
            return run


def write_metrics(run: Path, metrics: Mapping[str, Tensor | float]) -> None:
    """Write metrics.json: the best validation accuracy and the test split's figures."""
    plain = {name: float(value) for name, value in sorted(metrics.items())}
    (run / "metrics.json").write_text(json.dumps(plain, indent=2) + "\n")
