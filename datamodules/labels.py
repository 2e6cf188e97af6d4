"""The form of labels. Only this file knows it: splits, balanced epochs and tables use these functions.

- A sample has one class: labels are int64 (n,), from 0.
- A sample has any number of classes: labels are int64 (n, classes) of 0 and 1.
- A sample has amounts: labels are float32 (n, amounts). Splits and balanced epochs then treat the samples as if they
  had ten classes, by the size of their first amount.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from datamodules.errors import DataError

Labels = Int64[Tensor, "n *classes"] | Float32[Tensor, "n amounts"]
_MOST = 2**34  # bytes of labels; AudioSet, two million clips of 527 classes, needs half of it


def labels_of(classes: Sequence[Sequence[int]], num_classes: int, are_many: bool) -> Labels:
    """Labels from the classes of each sample.

    Args:
        classes: One class for each sample, or any number if are_many.
        num_classes: Number of classes.
        are_many: Whether a sample may have any number of classes.

    Raises:
        DataError: If the labels would not fit into memory.
    """
    if not are_many:
        return torch.tensor([label for (label,) in classes], dtype=torch.int64)
    if (size := 8 * len(classes) * num_classes) > _MOST:
        what = f"{len(classes):,} samples of {num_classes:,} classes take {size / 2**30:.0f} GiB as labels"
        raise DataError(f"data: {what}; keep the classes that are not rare")
    labels = torch.zeros(len(classes), num_classes, dtype=torch.int64)
    for row, of_sample in zip(labels, classes, strict=True):
        row[list(of_sample)] = 1
    return labels


def classes_of(labels: Labels) -> list[list[int]]:
    """The classes of each sample."""
    labels = _in_tenths(labels)
    if labels.ndim == 1:
        return [[label] for label in labels.tolist()]
    return [[label for label, is_there in enumerate(row) if is_there] for row in labels.tolist()]


def counts(labels: Labels, num_classes: int = 0) -> Int64[Tensor, " classes"]:
    """The number of samples of each class, for `num_classes` classes, or more if the labels have more.

    With amounts, it is the number of samples for each amount.
    """
    if labels.is_floating_point():
        return torch.full((labels.shape[1],), len(labels))
    return labels.bincount(minlength=num_classes) if labels.ndim == 1 else labels.sum(0)


def rarest_classes(labels: Labels) -> Int64[Tensor, " n"]:
    """One class for each sample: its own, or the rarest of several; -1 for a sample without a class."""
    labels = _in_tenths(labels)
    if labels.ndim == 1:
        return labels
    sizes = torch.where(labels > 0, counts(labels), len(labels) + 1)
    return torch.where(labels.any(dim=1), sizes.argmin(dim=1), -1)


def weights_of_balanced_draw(labels: Labels) -> Float64[Tensor, " n"]:
    """The weight of each sample, so that all classes are drawn equally often. The weights do not sum to one.

    A sample of several classes has the weight of its rarest class, a sample without a class the smallest weight.
    """
    labels = _in_tenths(labels)
    of_classes = counts(labels).clamp(min=1).double().reciprocal()
    if labels.ndim == 1:
        return of_classes[labels]
    return (labels * of_classes).amax(dim=1).clamp(min=float(of_classes.min()))


def written(labels: Labels, class_names: list[str], separator: str) -> list[str]:
    """The label of each sample as a text: its classes or its amounts, with a separator between them."""
    if labels.is_floating_point():
        return [separator.join(f"{amount:.9g}" for amount in row) for row in labels.tolist()]
    return [separator.join(class_names[label] for label in classes) for classes in classes_of(labels)]


def _in_tenths(labels: Labels) -> Int64[Tensor, "..."]:
    """Classes without changes; amounts as ten classes of equal size, or as fewer classes of ten samples each."""
    if not labels.is_floating_point():
        return labels
    number = max(1, min(10, len(labels) // 10))
    return labels[:, 0].argsort(stable=True).argsort() * number // max(len(labels), 1)
