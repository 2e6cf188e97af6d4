"""Which samples are held out at random, where a data set has no split of its own."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch
from jaxtyping import Int64
from torch import Tensor

from datamodules.labels import Labels, classes_of, samples_of_classes

Split = tuple[Int64[Tensor, " kept"], Int64[Tensor, " held"]]


def hold_out(labels: Labels, fraction: float, seed: int) -> Split:
    """Split 0..n-1 into the indices kept and those held out, the same fraction of every class.

    A class of two or more has at least one index on either side, a class of one is kept. Both parts are sorted, and
    depend on the arguments alone.
    """
    generator = torch.Generator().manual_seed(seed)
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for members in samples_of_classes(labels):
        count = _share(len(members), fraction)
        held_out[members[torch.randperm(len(members), generator=generator)[:count]]] = True
    return (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]


def hold_out_files(labels: Labels, files: Sequence[str], fraction: float, seed: int) -> Split:
    """As hold_out, but all samples of one file stay together, and the files' names decide, not their number.

    Clips of one recording would tell the answers of a test to a training on its other clips. A file that is added moves
    hardly another one to the other side, so that a checkpoint's test does not hold what the checkpoint was trained on.

    Args:
        labels: Of each sample.
        files: Which file each sample is of.
        fraction: Of each class's samples, as near as whole files allow.
        seed: Of the order, by hash, in which the files are taken.
    """
    samples_of: dict[str, Counter[int]] = {}
    for file, classes in zip(files, classes_of(labels), strict=True):
        samples_of.setdefault(file, Counter()).update(classes)
    sizes = Counter(chain.from_iterable(classes_of(labels)))
    wanted = {label: _share(size, fraction) for label, size in sizes.items()}
    held: Counter[int] = Counter()
    chosen: set[str] = set()

    def strays(file: str) -> int:
        """By how many samples the classes would be further from what is wanted; negative if nearer."""
        return sum(
            abs(held[label] + count - wanted[label]) - abs(held[label] - wanted[label])
            for label, count in samples_of[file].items()
        )

    def is_spare(file: str) -> bool:
        return all(held[label] + count < sizes[label] for label, count in samples_of[file].items())

    def take(file: str) -> None:
        held.update(samples_of[file])
        chosen.add(file)

    ranked = sorted(samples_of, key=lambda file: _rank(seed, file))
    for file in ranked:
        if strays(file) < 0 and is_spare(file):
            take(file)
    for label in sizes:  # files may be larger than the share that is wanted, but no class should go without
        if wanted[label] and not held[label]:
            spare = [file for file in ranked if label in samples_of[file] and is_spare(file)]
            for file in sorted(spare, key=strays)[:1]:
                take(file)
    held_out = torch.tensor([file in chosen for file in files], dtype=torch.bool)
    return (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]


def _share(size: int, fraction: float) -> int:
    return min(max(round(fraction * size), 1), size - 1)


def _rank(seed: int, file: str) -> bytes:
    return hashlib.sha256(f"{seed} {file}".encode(errors="surrogateescape")).digest()
