"""Trainings of several runs, and how they are killed: what tests of --folds and of --grow share."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longseq.files.storage import read_whole
from longseq.training import Classifier


def weights(run: str, runs: Path = Path("runs")) -> dict[str, Tensor]:
    return read_whole(runs / run / "last.ckpt")["state_dict"]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def killed_in(number: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Send SIGTERM to this process in the training step of that number, from 1 on; the steps that begin from now on."""
    steps, step = [], Classifier.training_step

    def stopped(self: Classifier, batch: Any, batch_idx: int) -> Tensor:
        steps.append(batch_idx)
        if len(steps) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, batch_idx)

    monkeypatch.setattr(Classifier, "training_step", stopped)
    return steps
