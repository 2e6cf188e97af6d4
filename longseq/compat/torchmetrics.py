"""torchmetrics: what a metric has gathered so far, and one that a GPU does not wait for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassF1Score


def state_of(metric: Metric) -> dict[str, Any]:
    """Copies of everything that a metric has gathered, on the CPU."""
    gathered = {key: _copied(value) for key, value in metric.metric_state.items()}
    return {**gathered, "updates": metric._update_count}


def restore_states(metric: Metric, states: Sequence[dict[str, Any]], device: torch.device) -> None:
    """Give a metric, which has gathered nothing yet, what metrics had gathered together when ``state_of`` returned the
    states, so that it goes on from there."""
    for state in states:
        gathered = {key: _copied(value, device) for key, value in state.items() if key != "updates"}
        metric._update_count += state["updates"]
        if metric._update_count == state["updates"]:
            for key, value in gathered.items():
                setattr(metric, key, value)
        else:
            metric._reduce_states(gathered)


class UnwaitedF1(MulticlassF1Score):
    """torchmetrics' F1, the mean over classes, for logits (b, classes) and labels (b,). It counts by comparisons: after
    the bincount of the original the host waits for the device."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, average="macro", validate_args=False)

    def update(self, preds: Tensor, target: Tensor) -> None:
        classes = torch.arange(len(self.tp), device=preds.device)
        named, true = preds.argmax(1)[:, None] == classes, target[:, None] == classes
        both = (named & true).sum(0)
        only_named, only_true = named.sum(0) - both, true.sum(0) - both
        rest = len(target) - both - only_named - only_true
        for name, counts in {"tp": both, "fp": only_named, "fn": only_true, "tn": rest}.items():
            setattr(self, name, getattr(self, name) + counts)


def _copied(value: Any, device: torch.device | str = "cpu") -> Any:
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value
