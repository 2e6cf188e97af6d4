"""torchmetrics: saving the state of a metric, a metric that does not wait for a GPU, and means over classes."""

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
    """Copies of a metric's state, on the CPU."""
    state = {key: _copied(value) for key, value in metric.metric_state.items()}
    return {**state, "updates": metric._update_count}


def restore_states(metric: Metric, states: Sequence[dict[str, Any]], device: torch.device) -> None:
    """Set an empty metric to the combined states that ``state_of`` returned for several metrics, so that it resumes
    from there."""
    for state in states:
        values = {key: _copied(value, device) for key, value in state.items() if key != "updates"}
        metric._update_count += state["updates"]
        if metric._update_count == state["updates"]:
            for key, value in values.items():
                setattr(metric, key, value)
        else:
            metric._reduce_states(values)


class UnwaitedF1(MulticlassF1Score):
    """torchmetrics' F1, the mean over classes, for logits (b, classes) and labels (b,). It counts by comparisons; the
    bincount of the original would make the host wait for the device."""

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
    """A figure for each class that occurs, or the mean over these classes. In torchmetrics' own means, classes that do
    not occur count as 0.

    Args:
        num_classes: Number of classes.
        by_class: True for one figure per class, NaN if it has none; False for their mean, 0 if no class has a figure.
        options: As torchmetrics takes them.
    """

    def __init__(self, num_classes: int, by_class: bool = False, **options: Any) -> None:
        super().__init__(num_classes, average="none", **options)  # type: ignore[call-arg]
        self.by_class = by_class

    def compute(self) -> Tensor:
        figures = super().compute().masked_fill(~self.has_figure(), torch.nan)  # type: ignore[misc]
        return figures if self.by_class else figures.nanmean().nan_to_num(0)

    def has_figure(self) -> Tensor:
        """Which classes have a figure, from the labels (n, classes): here those of some but not all samples."""
        labels = dim_zero_cat(self.target)  # type: ignore[attr-defined]
        return (labels == 1).any(0) & (labels == 0).any(0)


class _OfRanks(_OfClasses):
    """A figure that depends only on the order of the samples. It ranks logits if it gets them, because in float32 the
    probability of every logit above 17 is 1, and torchmetrics converts logits to probabilities."""

    def update(self, preds: Tensor, target: Tensor, logits: Tensor | None = None) -> None:
        super().update(preds, target)  # type: ignore[misc]
        if logits is not None:
            self.preds[-1] = logits.detach().float()  # type: ignore[attr-defined]


class AUROC(_OfRanks, MultilabelAUROC):
    """The area under the ROC curve."""


class AveragePrecision(_OfRanks, MultilabelAveragePrecision):
    """The average precision; it is 1 for a class that all samples have."""

    def has_figure(self) -> Tensor:
        return (dim_zero_cat(self.target) == 1).any(0)


class _OfCounts(_OfClasses):
    def has_figure(self) -> Tensor:
        return torch.as_tensor(self.tp + self.fn) > 0  # type: ignore[attr-defined]


class F1(_OfCounts, MultilabelF1Score):
    """The F1."""


class PrecisionOfOne(_OfCounts, MulticlassPrecision):
    """The precision for one class per sample."""


class RecallOfOne(_OfCounts, MulticlassRecall):
    """The recall for one class per sample."""


class F1OfOne(_OfCounts, MulticlassF1Score):
    """The F1 for one class per sample."""


def _copied(value: Any, device: torch.device | str = "cpu") -> Any:
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value
