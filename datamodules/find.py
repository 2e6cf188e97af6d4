"""Find the files of a folder of class folders."""

import os
from collections.abc import Iterator
from pathlib import Path

from datamodules.errors import DataError, say
from datamodules.files import Item
from datamodules.scan import leads_up, walk

SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


def find_in_class_folders(root: Path, suffixes: frozenset[str]) -> Iterator[Item]:
    """The rows of a folder of class folders, or of such folders inside train, val and test. Folders with files that are
    left out beside these are said.

    Raises:
        DataError: If a class has no file or a name that is not UTF-8, or if there are splits but no train. A test may
            be alone.
    """
    folders = [path for path in sorted(root.iterdir()) if _may_be_class(path)]
    named = [folder for folder in folders if folder.name.lower() in SPLITS]
    # a class may have the name of a split, but then its folder holds no folders
    parts = [folder for folder in named if any(map(_may_be_class, folder.iterdir()))]
    splits = [SPLITS[folder.name.lower()] for folder in parts]
    is_split = "train" in splits or (splits == ["test"] and folders == parts)
    if not is_split and (parts or folders == named != []):
        names = " and ".join(folder.name for folder in parts or named)
        raise DataError(f"{root}: holds {names}, but no train with a folder for each class; add it")
    for folder in folders if is_split else ():
        left_out = next(iter(walk(folder, suffixes)), None) if folder not in parts else None
        if left_out is not None:
            why = "in no folder of a class" if folder in named else "neither in train, nor in val, nor in test"
            say(f"{folder}: left out with all its files, such as {left_out.name}, which are {why}")
    for part in parts if is_split else [root]:
        split = SPLITS[part.name.lower()] if is_split else ""
        for folder in sorted(filter(_may_be_class, part.iterdir())):
            name = os.fsencode(folder.name).decode(errors="backslashreplace")
            if name != folder.name:  # names of classes are drawn and written, so they must be text
                raise DataError(f"{part}/{name}: the name of a class is not UTF-8; rename the folder")
            files = list(walk(folder, suffixes))
            if not files:
                raise DataError(f"{folder}: class {folder.name} has no readable file; add some, or take the folder out")
            for path in files:
                yield Item(str(path.relative_to(root)), folder.name, split)


def _may_be_class(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".") and not leads_up(path)
