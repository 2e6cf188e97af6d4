"""What labels mean: splits, balanced epochs and tables use these functions, so that only this file knows their form.

A sample's label is its class: labels are int64 (n,), from 0.
"""

from collections.abc import Iterator

from jaxtyping import Float64, Int64
from torch import Tensor

Labels = Int64[Tensor, " n"]


def classes_of(labels: Labels) -> list[list[int]]:
    """The classes of each sample."""
    return [[label] for label in labels.tolist()]


def samples_of_classes(labels: Labels) -> Iterator[Int64[Tensor, " members"]]:
    """For each class that has samples, in order, the indices of its samples."""
    for label in labels.unique():
        yield (labels == label).nonzero()[:, 0]


def counts(labels: Labels, num_classes: int = 0) -> Int64[Tensor, " classes"]:
    """How many samples each class has, for `num_classes` classes or more if the labels hold more."""
    return labels.bincount(minlength=num_classes)


def weights_of_balanced_draw(labels: Labels) -> Float64[Tensor, " n"]:
    """Weights with which all classes are drawn equally often, one for each sample; they do not sum to one."""
    return counts(labels).clamp(min=1).double().reciprocal()[labels]


def written(labels: Labels, class_names: list[str]) -> list[str]:
    """The label of each sample, as a table shows it."""
    return [class_names[label] for label in labels.tolist()]
