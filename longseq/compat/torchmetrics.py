"""torchmetrics: what a metric has gathered so far, one that a GPU does not wait for, and means over classes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import (
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
    MultilabelAUROC,
    MultilabelAveragePrecision,
    MultilabelF1Score,
)
from torchmetrics.utilities import dim_zero_cat


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


class _OfClasses:
    """A figure of each class that some samples have, or the mean of these: in torchmetrics' own means the others count
    as 0.

    Args:
        num_classes: Number of classes.
        by_class: Whether there is a figure for each class, NaN where it has none; otherwise their mean, 0 without one.
        options: As torchmetrics takes them.
    """

    def __init__(self, num_classes: int, by_class: bool = False, **options: Any) -> None:
        super().__init__(num_classes, average="none", **options)  # type: ignore[call-arg]
        self.by_class = by_class

    def compute(self) -> Tensor:
        figures = super().compute().masked_fill(~self.has_figure(), torch.nan)  # type: ignore[misc]
        return figures if self.by_class else figures.nanmean().nan_to_num(0)

    def has_figure(self) -> Tensor:
        """Which classes have one, from the labels (n, classes): here those that are in some but not in all samples."""
        labels = dim_zero_cat(self.target)  # type: ignore[attr-defined]
        return (labels == 1).any(0) & (labels == 0).any(0)


class _OfRanks(_OfClasses):
    """A figure that depends only on the order of the samples. It ranks the logits, if they are given: in float32 every
    probability of a logit above 17 is 1, and torchmetrics makes probabilities of logits."""

    def update(self, preds: Tensor, target: Tensor, logits: Tensor | None = None) -> None:
        super().update(preds, target)  # type: ignore[misc]
        if logits is not None:
            self.preds[-1] = logits.detach().float()  # type: ignore[attr-defined]


class AUROC(_OfRanks, MultilabelAUROC):
    """The area under the ROC curve."""


class AveragePrecision(_OfRanks, MultilabelAveragePrecision):
    """The average precision; a class that all samples have has 1."""

    def has_figure(self) -> Tensor:
        return (dim_zero_cat(self.target) == 1).any(0)


class _OfCounts(_OfClasses):
    def has_figure(self) -> Tensor:
        return torch.as_tensor(self.tp + self.fn) > 0  # type: ignore[attr-defined]


class F1(_OfCounts, MultilabelF1Score):
    """The F1."""


class PrecisionOfOne(_OfCounts, MulticlassPrecision):
    """The precision where each sample has one class."""


class RecallOfOne(_OfCounts, MulticlassRecall):
    """The recall where each sample has one class."""


class F1OfOne(_OfCounts, MulticlassF1Score):
    """The F1 where each sample has one class."""


def _copied(value: Any, device: torch.device | str = "cpu") -> Any:
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value
