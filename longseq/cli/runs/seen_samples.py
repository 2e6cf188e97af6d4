"""Warns if a model is evaluated on samples of its own training."""

import csv
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

from longseq.cli.names import shown
from longseq.cli.runs.folders import SPLITS


def say_if_trained_on(ckpt_path: str, split: Literal["val", "test"], datamodule: Any) -> None:
    """Print how many samples of a split were used for training, by the table of splits beside the checkpoint: another
    seed or folder may split the same files differently. Validation samples count too in the test split, because they
    chose the best checkpoint. For other data than in training, print how much of it is tested.

    Args:
        ckpt_path: The checkpoint.
        split: The split on which it is evaluated.
        datamodule: The data, after setup.
    """
    record = Path(ckpt_path).parent / SPLITS
    if not record.is_file():
        return
    with tempfile.TemporaryDirectory() as folder:
        datamodule.save_splits(Path(folder) / SPLITS)
        now, before = _splits_by_sample(Path(folder) / SPLITS), _splits_by_sample(record)
    own = [sample for sample, splits in now.items() if split in splits]
    earlier = {"train"} if split == "val" else {"train", "val"}
    if split == "test" and len(own) < len(now) and not now.keys() & before.keys():
        what = f"these are other data than in training, and {len(own)} of their {len(now)} samples are the test split"
        print(
            f"{what}; to measure all, put the folders of classes into DIR/test alone, or give a table whose column "
            "split says test",
            file=sys.stderr,
        )
    # a name that occurs in several splits is not a file but a number within a split, so it identifies no sample
    known = sum(sample in before and before[sample] <= earlier for sample in own)
    if known:
        places = " or ".join(sorted(earlier))
        print(
            f"{known} of {len(own)} samples of {split} are in {places} in {shown(str(record))}: the figures may be too "
            "good; give --data.seed and --data.root as in training",
            file=sys.stderr,
        )


def _splits_by_sample(path: Path) -> dict[tuple[tuple[str, str], ...], set[str]]:
    """The splits in which each sample of a table occurs. All columns except label and split identify a sample."""
    splits_of: dict[tuple[tuple[str, str], ...], set[str]] = defaultdict(set)
    with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
        for row in csv.DictReader(file):
            split = row.pop("split", "")
            row.pop("label", None)
            splits_of[tuple(row.items())].add(split)
    return splits_of
