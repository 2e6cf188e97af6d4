"""What is known of the inputs and of the model besides the predictions: labels, the run's table, its figure."""

import csv
import hashlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# as recorders name their files: 20240131_235900.WAV (AudioMoth), SM4_20240131_235900.wav (Song Meter)
_STARTED = re.compile(r"(?<!\d)(\d{4})-?(\d\d)-?(\d\d)[T_ -]?(\d\d)[:_-]?(\d\d)[:_-]?(\d\d)(?!\d)")
# what divides the data of the run into clips and splits, which the page's table has as they are
_OF_ROWS = "path", "label", "start", "end"  # columns that differ between the rows of a file
_DIVIDES = ("clip_seconds", "min_overlap", "test_fold", "val_fold", "folds", "fold")


def start_of(path: str) -> int | None:
    """The time at which a recording began, by its name, in seconds since 1970 on the recorder's clock; None if its name
    has none."""
    for found in reversed([*_STARTED.finditer(Path(path).name)]):
        try:
            return int(datetime(*map(int, found.groups()), tzinfo=UTC).timestamp())
        except ValueError:  # digits that are no date
            continue
    return None


class RunTable:
    """The table of a run's samples, to which a page adds what a person decides. A row has the path below the data's
    folder, or the absolute path outside of it.

    Args:
        datamodule: The data module of the model.
        run: The folder of the checkpoint.
        input: What is predicted: a file or a folder.

    Attributes:
        root: The folder for fit's --data.root.
        columns, rows: The run's samples; none if the data is not a folder of files.
        digest: A digest of the validation split; empty if it is unknown.
    """

    def __init__(self, datamodule: Any, run: Path, input: Path) -> None:
        rows = _rows(run / "splits.csv")
        validation = [row for row in rows if row["split"] == "val"]
        self.digest = hashlib.sha256(repr(validation).encode(errors="replace")).hexdigest() if validation else ""
        self._input, self._datamodule = input if input.is_dir() else input.parent, datamodule
        is_folder = hasattr(datamodule, "table") and "path" in (rows[0] if rows else {})
        self.root = Path(datamodule.root) if is_folder else self._input
        self.columns = list(rows[0]) if is_folder else []
        self.rows = [list(row.values()) for row in rows] if is_folder else []
        is_whole = not {"start", "end"} & {*self.columns}
        self._labels = {row["path"]: row["label"] for row in rows} if is_folder and is_whole else {}
        self._of_files = {row["path"]: row for row in rows} if is_folder else {}
        self._of_groups = {row["group"]: row for row in self._of_files.values() if "group" in row}

    def path_of(self, file: str) -> str:
        """The path of a file in the table."""
        return _below(self.root, file)

    def split_of(self, row: str) -> str:
        """The split of a file in the run; empty if it was in none."""
        return self._of_files[row]["split"] if row in self._of_files else ""

    def cells_of(self, file: str) -> dict[str, str]:
        """What a new row of a file has besides its class and its times.

        A file of the run has what its other rows have. Another file has the group that the data finds in its path, and
        the split of that group. If it finds none, the file is a training sample, and its path stands for what is not
        known of it, so that it is a group of its own.
        """
        row = self.path_of(file)
        own = {name: row for name in self.columns if name not in _OF_ROWS}
        if row in self._of_files:
            return {name: self._of_files[row][name] for name in own}
        below = row if not os.path.isabs(row) else _below(self._input, row)
        group = self._datamodule.group_of(below) if self._of_groups else ""
        if group:
            own["group"] = group
        return {**own, "split": self._of_groups[group]["split"] if group in self._of_groups else "train"}

    def label_of(self, file: str, row: str, classes: Sequence[str], separator: str | None) -> list[int] | None:
        """The classes of a file: by the run's table, or else by a folder with the name of a class; None if unknown."""
        if row in self._labels:
            names = self._labels[row].split(separator) if separator else [self._labels[row]]
            return [classes.index(name) for name in names if name in classes]
        named = [part for part in reversed(Path(file).parent.parts) if part in classes]
        return [classes.index(named[0])] if named else None


def _below(folder: Path, file: str) -> str:
    """The path of a file below a folder; the absolute path if it lies elsewhere."""
    path, folder = Path(os.path.abspath(file)), Path(os.path.abspath(folder))
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
            return list(csv.DictReader(file))
    except OSError:
        return []


def figure_of(checkpoint: Mapping[str, Any]) -> tuple[str, float] | None:
    """The figure that chose a checkpoint, such as val/accuracy, and its value; None if it holds none."""
    for state in (checkpoint.get("callbacks") or {}).values():
        if isinstance(state, dict) and str(state.get("monitor")).startswith("val/"):
            score = state.get("current_score")
            return None if score is None else (str(state["monitor"]).removeprefix("val/"), float(score))
    return None


def retraining(datamodule: Any, checkpoint: Path, table: Path) -> str:
    """The command that trains from a page's table; empty if the run has no configuration for it."""
    config = checkpoint.parent / "config.yaml"
    if not hasattr(datamodule, "table") or not config.is_file():
        return ""
    words = [
        "longseq",
        "fit",
        "--config",
        str(config),
        "--model.init_from",
        str(checkpoint),
        "--data.table",
        str(table),
    ]
    if datamodule.groups is not None and datamodule.table is None:
        words += ["--data.groups", "group"]
    for name in _DIVIDES:
        if getattr(datamodule, name, None) is not None:
            words += [f"--data.{name}", "null"]
    return shlex.join(words)
