"""A user's own files: a folder of class folders, or a table of paths and labels."""

from pathlib import Path
from typing import Any, ClassVar

from datamodules.errors import DataError, counted, require, say
from datamodules.files import FileDataModule, Item
from datamodules.find import find_in_class_folders
from datamodules.scan import walk
from datamodules.table import read_table, refuse_other_tasks


class OwnFiles(FileDataModule):
    """Files in one folder for each class, or in such folders inside train, val and test, or listed in a table.

    A table (.csv, or .tsv with tabs) has a header with the columns path and label, and optionally start and end (in
    seconds: one recording may hold many clips), fold, and split (train, val or test). A label is one class, and lists
    and amounts are refused, unless labels_separator is given. Then each file may have any number of classes, or none.

    Args:
        root: Folder of the class folders, or of the files that the table names.
        table: Path of the table; it may be relative to root.
        labels_separator: What stands between the classes of a label in the table, such as ";".
        common: Arguments of FileDataModule.
    """

    named_by: ClassVar[str | None] = "root"
    kind: ClassVar[str]  # what a file is, for messages

    def __init__(self, root: str, table: str | None = None, labels_separator: str | None = None, **common: Any) -> None:
        super().__init__(root=root, **common)
        self.table, self.labels_separator = table, labels_separator
        require(labels_separator != "", "labels_separator", "a text", labels_separator, "';' is usual")
        is_of_table = table is not None or labels_separator is None
        require(is_of_table, "table", "given with labels_separator", table, "a folder is of one class")

    def find(self) -> list[Item]:
        if self.table is None:
            items = list(find_in_class_folders(self.folder, self.predict_suffixes))
            if not items:
                suffixes = ", ".join(sorted(self.predict_suffixes))
                raise DataError(f"{self.root}: holds no folder of {self.kind}s for each class; it may hold {suffixes}")
            return items
        path = Path(self.table).expanduser()
        path = path if path.is_file() else self.folder / path
        items = read_table(path, self.labels_separator)
        if self.labels_separator is None:
            refuse_other_tasks(path, [item for item in items if item.label not in (self._classes_given or ())])
        parts = [item.line for item in items if self.kind == "image" and (item.start or item.end is not None)]
        if parts:
            raise DataError(f"{path}: line {parts[0]}: start and end are of sounds; leave them out")
        named = {(self.folder / item.path).resolve() for item in items}
        others = [path for path in walk(self.folder, self.predict_suffixes) if path.resolve() not in named]
        if others:
            count = counted(len(others), self.kind)
            say(f"{self.root}: {count} without a row in {self.table}, such as {others[0].name}")
        return items
