"""Hold samples out at random, if a data set has no split of its own."""

import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch
from jaxtyping import Int64
from torch import Tensor

from datamodules.cache import sha256_of_text
from datamodules.labels import Labels, classes_of, rarest_classes

Split = tuple[Int64[Tensor, " kept"], Int64[Tensor, " held"]]


def hold_out(labels: Labels, fraction: float, seed: int, groups: Sequence[str] | None = None) -> Split:
    """Split 0..n-1 into the indices to keep and the indices to hold out, with the same fraction of every class.

    A class of two or more samples has at least one sample in each part; a class of one sample is not held out. If
    samples have any number of classes, this is approximate. Both parts are sorted, and depend only on the arguments.
    With groups, the result is that of `hold_out_files`.
    """
    if groups is None and labels.ndim > 1:  # a draw by sets of classes would hold out nothing if all sets differ
        groups = [str(number) for number in range(len(labels))]
    if groups is not None:
        return hold_out_files(labels, groups, fraction, seed)
    generator = torch.Generator().manual_seed(seed)
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        count = _share(len(members), fraction)
        held_out[members[torch.randperm(len(members), generator=generator)[:count]]] = True
    return (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]


def hold_out_files(labels: Labels, files: Sequence[str], fraction: float, seed: int) -> Split:
    """Like hold_out, but all samples of a file stay together, and the names of files decide, not their positions.

    A model that was trained on some clips of a recording would recognise its other clips in a test. A new file moves
    few other files to the other part, so that a checkpoint is not tested on the files that it was trained on.

    Args:
        labels: The label of each sample.
        files: The file or the group of each sample.
        fraction: Share of each class's samples to hold out, approximately, because files are not divided.
        seed: Decides the order in which files are tried, by a hash.
    """
    samples_of: dict[str, Counter[int]] = {}
    all_classes = [classes or [-1] for classes in classes_of(labels)]  # samples without a class are divided too
    for file, classes in zip(files, all_classes, strict=True):
        samples_of.setdefault(file, Counter()).update(classes)
    sizes = Counter(chain.from_iterable(all_classes))
    wanted = {label: _share(size, fraction) for label, size in sizes.items()}
    counts: Counter[int] = Counter()  # samples held out so far, by class
    chosen: set[str] = set()

    def strays(file: str) -> int:
        """By how many samples this file moves the classes away from the wanted counts; negative if towards them."""
        return sum(
            abs(counts[label] + count - wanted[label]) - abs(counts[label] - wanted[label])
            for label, count in samples_of[file].items()
        )

    def is_spare(file: str) -> bool:
        return all(counts[label] + count < sizes[label] for label, count in samples_of[file].items())

    def take(file: str) -> None:
        counts.update(samples_of[file])
        chosen.add(file)

    ranked = sorted(samples_of, key=lambda file: sha256_of_text(f"{seed} {file}"))
    for file in ranked:
        if strays(file) < 0 and is_spare(file):
            take(file)
    for label in sizes:  # a class should have a held-out file, if possible, even if all files exceed the wanted share
        if wanted[label] and not counts[label]:
            spare = [file for file in ranked if label in samples_of[file] and is_spare(file)]
            for file in sorted(spare, key=strays)[:1]:
                take(file)
    held_out = torch.tensor([file in chosen for file in files], dtype=torch.bool)
    return (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]


def folds_of(labels: Labels, groups: Sequence[str] | None, folds: int, seed: int) -> Int64[Tensor, " n"]:
    """The fold of each sample, 1..folds. Each fold has the same share of every class, and groups are not divided.

    This is scikit-learn's StratifiedKFold, or StratifiedGroupKFold if any group has two samples. A sample of several
    classes counts for the rarest of them.

    Args:
        labels: The label of each sample. The largest class has `folds` samples or more.
        groups: The group of each sample, or None.
        folds: The number of folds.
        seed: Decides the folds, together with the order of the samples.
    """
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold  # this import takes half a second

    has_groups = groups is not None and len(set(groups)) < len(groups)
    kind = StratifiedGroupKFold if has_groups else StratifiedKFold
    strata = rarest_classes(labels).numpy()
    numbers = torch.zeros(len(labels), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about a class with fewer samples than folds
        divided = kind(folds, shuffle=True, random_state=seed % 2**32).split(strata, strata, groups)
        for number, (_, held_out) in enumerate(divided, start=1):
            numbers[torch.from_numpy(held_out)] = number
    return numbers


def _share(size: int, fraction: float) -> int:
    return min(max(round(fraction * size), 1), size - 1)
