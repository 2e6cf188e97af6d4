"""Which samples are held out at random if a data set has no split of its own."""

import hashlib
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch
from jaxtyping import Int64
from torch import Tensor

from datamodules.labels import Labels, classes_of, rarest_classes

Split = tuple[Int64[Tensor, " kept"], Int64[Tensor, " held"]]


def hold_out(labels: Labels, fraction: float, seed: int, groups: Sequence[str] | None = None) -> Split:
    """Split 0..n-1 into the indices to keep and the indices to hold out, with the same fraction of every class.

    A class of two or more samples has at least one on each side; a class of one sample is kept. Where samples have any
    number of classes, this holds as near as their combinations allow. Both parts are sorted, and depend only on the
    arguments. If each sample has a group, `hold_out_files` decides.
    """
    if groups is None and labels.ndim > 1:  # by sets of classes it would hold out nothing if each sample has its own
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
    """Like hold_out, but all samples of one file stay together, and the names of files decide, not their positions.

    A training on some clips of a recording would learn the answers for a test on its other clips. A new file moves few
    other files to the other side, so that a checkpoint is not tested on the files that it was trained on.

    Args:
        labels: The label of each sample.
        files: The file of each sample.
        fraction: Share of each class's samples to hold out, as near as whole files allow.
        seed: Decides, by a hash, the order in which files are taken.
    """
    samples_of: dict[str, Counter[int]] = {}
    classes_of_each = [classes or [-1] for classes in classes_of(labels)]  # samples without a class are shared out too
    for file, classes in zip(files, classes_of_each, strict=True):
        samples_of.setdefault(file, Counter()).update(classes)
    sizes = Counter(chain.from_iterable(classes_of_each))
    wanted = {label: _share(size, fraction) for label, size in sizes.items()}
    counts: Counter[int] = Counter()  # samples held out so far, by class
    chosen: set[str] = set()

    def strays(file: str) -> int:
        """By how many samples this file would take the classes further from the wanted counts; negative if nearer."""
        return sum(
            abs(counts[label] + count - wanted[label]) - abs(counts[label] - wanted[label])
            for label, count in samples_of[file].items()
        )

    def is_spare(file: str) -> bool:
        return all(counts[label] + count < sizes[label] for label, count in samples_of[file].items())

    def take(file: str) -> None:
        counts.update(samples_of[file])
        chosen.add(file)

    ranked = sorted(samples_of, key=lambda file: _rank(seed, file))
    for file in ranked:
        if strays(file) < 0 and is_spare(file):
            take(file)
    for label in sizes:  # a file may be larger than the wanted share, but each class should have one if it can
        if wanted[label] and not counts[label]:
            spare = [file for file in ranked if label in samples_of[file] and is_spare(file)]
            for file in sorted(spare, key=strays)[:1]:
                take(file)
    held_out = torch.tensor([file in chosen for file in files], dtype=torch.bool)
    return (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]


def folds_of(labels: Labels, groups: Sequence[str] | None, folds: int, seed: int) -> Int64[Tensor, " n"]:
    """The fold of each sample, 1..folds, by scikit-learn: the same share of every class in each, and groups whole.

    StratifiedKFold, or StratifiedGroupKFold if any group has two samples. A sample of several classes counts for its
    rarest one.

    Args:
        labels: The label of each sample. The largest class has `folds` samples or more.
        groups: The group of each sample; None if each is its own.
        folds: How many.
        seed: Decides, together with the order of the samples.
    """
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold  # it takes half a second to import

    has_groups = groups is not None and len(set(groups)) < len(groups)
    kind = StratifiedGroupKFold if has_groups else StratifiedKFold
    strata = rarest_classes(labels).numpy()
    numbers = torch.zeros(len(labels), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a class with fewer samples than folds
        divided = kind(folds, shuffle=True, random_state=seed % 2**32).split(strata, strata, groups)
        for number, (_, held_out) in enumerate(divided, start=1):
            numbers[torch.from_numpy(held_out)] = number
    return numbers


def _share(size: int, fraction: float) -> int:
    return min(max(round(fraction * size), 1), size - 1)


def _rank(seed: int, file: str) -> bytes:
    return hashlib.sha256(f"{seed} {file}".encode(errors="surrogateescape")).digest()
