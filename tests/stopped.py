"""A training that SIGTERM stops."""

import os
import signal
from typing import Any

import pytest
from torch import Tensor

from longseq.training import Classifier


def stop_in_fourth_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM once, in the fourth training step from now on, of whatever training."""
    steps, train = [], Classifier.training_step

    def stopped(self: Classifier, batch: Any, batch_idx: int) -> Tensor:
        steps.append(batch_idx)
        if len(steps) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return train(self, batch, batch_idx)

    monkeypatch.setattr(Classifier, "training_step", stopped)
