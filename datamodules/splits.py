"""The splits of a data set whose samples are rows of a table: the table gives the splits, or a seed draws them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from datamodules.errors import DataError
from datamodules.hold_out import Split, hold_out
from datamodules.labels import Labels, counts
from datamodules.samples import chosen

_Mask = Bool[Tensor, " n"]
_Rows = Int64[Tensor, " _"]


@dataclass(frozen=True)
class Columns:
    """The columns of a table, with a row for each sample that can be read.

    Attributes:
        sources: What each sample is read from.
        names, labels: The name and the label of each sample.
        splits, folds, groups: See Item (datamodules/own/files.py).
    """

    sources: Sequence[Any] | Int64[Tensor, " n"]
    names: Sequence[str]
    labels: Labels
    splits: Sequence[str]
    folds: Sequence[str]
    groups: Sequence[str]


def divided(data: Any, table: Columns) -> tuple[_Rows | None, _Rows | None, _Rows]:
    """The rows of the training, validation and test split.

    Training and validation are None if all rows are for the test. The validation is None if it must still be drawn.

    With data.folds, the table's own folds are used in the order of their names, and the fold before the test is the
    validation. If the table has no folds and no test split, all rows are divided into folds.

    Args:
        data: The data module, an OnDisk.
        table: Its samples.

    Raises:
        DataError: If the table contradicts itself or the settings, if a split has no row, if the training lacks a
            class, or if a group is in two splits.
    """
    rows = torch.arange(len(table.names))
    test_fold, val_fold = data.test_fold, data.val_fold
    given = [name for name in ("test_fold", "val_fold", "folds") if getattr(data, name) is not None]
    if given and any(table.splits) and any(table.folds):
        what = f"the table has both split and fold; choose: leave out its column split, or data.{given[0]}"
        raise DataError(f"{data.root}: {what}")
    own = [] if data.folds is None else sorted({*table.folds} - {""}, key=lambda name: (len(name), name))
    if own:
        if len(own) != data.folds:
            what = f"{data.root} has {len(own)} folds of its own ({', '.join(own)}), got {data.folds}"
            raise DataError(f"data.folds: {what}; give {len(own)}, or leave out the column fold")
        _refuse_divided_groups(data, table, [f"fold {fold}" for fold in table.folds])
        test_fold, val_fold = own[data.fold - 1], own[data.fold - 2] if len(own) > 2 else None
    elif data.folds is None and len(given) == 2 and str(test_fold) == str(val_fold):
        raise DataError(f"data.val_fold: {val_fold} is the fold of the test too; choose another, or null")
    elif data.folds is None and {*table.splits} == {"test"}:  # a set for a test only
        return None, None, rows

    def drawn(taken: _Mask | None, draw: Callable[..., Split]) -> _Mask:
        """Which rows are held out, of the rows that are in no other split."""
        free = rows if taken is None else rows[~taken]
        return torch.isin(rows, free[draw(table.labels[free], groups=data.whole(chosen(table.names, free)))[1]])

    is_test, is_val = _given(data, table, "test", test_fold), _given(data, table, "val", val_fold)
    if data.folds is not None and not own:
        in_fold = drawn(is_test, data.hold_out_fold)
        is_test, is_val = (in_fold, is_val) if is_test is None else (is_test, in_fold)
    elif is_test is None:
        is_test = drawn(is_val, partial(hold_out, fraction=data.test_fraction, seed=data.seed))
    in_val = torch.zeros_like(is_test) if is_val is None else is_val & ~is_test
    is_train = ~is_test & ~in_val
    for name, number in zip(data.class_names, counts(table.labels[is_train], data.num_classes).tolist(), strict=True):
        if not number:
            what = f"no readable {data.noun} of class {name} to train on"
            raise DataError(f"{data.root}: {what}; add some, or take the class out")
    both = zip(is_test.tolist(), in_val.tolist(), strict=True)
    _refuse_divided_groups(data, table, ["test" if test else "val" if val else "train" for test, val in both])
    if not is_test.any():
        what = f"nothing is left for the test split, because each class has only one {data.noun}"
        raise DataError(f"data.root: {what}; add some of each class")
    if is_val is not None and not in_val.any():
        raise DataError(f"{data.root}: no readable {data.noun} to validate on; add some, or leave the split out")
    return rows[is_train], None if is_val is None else rows[in_val], rows[is_test]


def _given(data: Any, table: Columns, split: str, fold: str | int | None) -> _Mask | None:
    """Which rows belong to a split according to the table's splits or folds; None if they do not decide."""
    column, value = (table.splits, split) if fold is None else (table.folds, str(fold))
    is_there = torch.tensor([of_row == value for of_row in column], dtype=torch.bool)
    if fold is not None and not is_there.any():
        folds = ", ".join(sorted({*table.folds} - {""})) or "none"
        raise DataError(f"data.{split}_fold: no fold {fold} in {data.root}; it has {folds}")
    return is_there if is_there.any() else None


def _refuse_divided_groups(data: Any, table: Columns, places: Sequence[str]) -> None:
    first: dict[str, str] = {}
    for row, (group, place) in enumerate(zip(table.groups, places, strict=True)):
        if group and first.setdefault(group, place) != place:
            what = f"group {group} is in {first[group]} and in {place} ({table.names[row]})"
            raise DataError(f"{data.root}: {what}; give all {data.noun}s of a group one split or fold")
