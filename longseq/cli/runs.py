"""Run folders, runs/<experiment>/<number>/, and the files in them that are not Lightning's."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from longseq.training.storage import StorageError

METRICS = "metrics.json"  # written when a run has come to its end
_ROOT = "--trainer.default_root_dir"


def new_run(root: Path, experiment: str) -> Path:
    """Make the next free folder root/runs/experiment/0, 1, 2, ...; two runs started at once get two folders."""
    parent = root / "runs" / experiment
    try:
        parent.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(folder.name) for folder in _runs(parent)), default=-1)
        while True:
            run = parent / str(number)
            try:
                run.mkdir()
            except FileExistsError:
                number += 1
            else:
                return run
    except OSError as error:
        raise StorageError(f"{parent}: cannot be written ({error.strerror}); choose another {_ROOT}") from error


def unfinished_run(root: Path, experiment: str) -> Path | None:
    """The newest run of an experiment that has a checkpoint and did not come to its end."""
    parent = root / "runs" / experiment
    runs = sorted(_runs(parent), key=lambda folder: int(folder.name), reverse=True) if parent.is_dir() else []
    return next((run for run in runs if list(run.glob("*.ckpt")) and not (run / METRICS).exists()), None)


def refuse_full_disk(run: Path, model: nn.Module) -> None:
    """Check that the checkpoints of a training fit: two, and one that is being written.

    Raises:
        StorageError: If they do not.
    """
    size = 3 * 3 * sum(p.numel() * p.element_size() for p in model.parameters())  # weights, and AdamW's two moments
    free = shutil.disk_usage(run).free
    if free < size:
        raise StorageError(
            f"{run}: {free / 2**20:.0f} MiB are free and three checkpoints take {size / 2**20:.0f} MiB; make room or "
            f"choose another {_ROOT}"
        )


def _runs(parent: Path) -> list[Path]:
    return [folder for folder in parent.iterdir() if folder.name.isdecimal()]


def write_metrics(run: Path, metrics: Mapping[str, Tensor | float]) -> None:
    """Write metrics.json: the best validation accuracy and the test split's figures."""
    plain = {name: float(value) for name, value in sorted(metrics.items())}
    (run / METRICS).write_text(json.dumps(plain, indent=2) + "\n")
