"""Find the files of a folder of class folders."""

import os
from collections.abc import Iterator
from pathlib import Path

from datamodules.errors import DataError, counted, say
from datamodules.own.files import Item
from datamodules.own.scan import LeftOut, leads_nowhere, leads_up, say_of_dead_links, walk

SPLITS = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test",
    "testing": "test",
}  # fmt: skip
# Such a folder may be the validation or the test; "dev" may even be everything except the test.
_UNCLEAR = frozenset({"dev", "development", "eval", "evaluation"})


def find_in_class_folders(root: Path, suffixes: frozenset[str], left_out: LeftOut) -> Iterator[Item]:
    """The rows of a folder of class folders, or of such folders inside train, val and test.

    Other files and folders are left out, and the user is told about them.

    Args:
        root: The folder.
        suffixes: The suffixes of samples.
        left_out: Collects what is left out of the class folders.

    Raises:
        DataError: If a class has no file, or a name that is not UTF-8; if there are splits but no train, except for a
            test alone; or if it is unclear which splits the folders are.
    """
    folders = _class_folders(root, left_out)
    named = [folder for folder in folders if folder.name.lower() in SPLITS]
    # a class may have the name of a split, but then its folder contains no folders
    parts = [folder for folder in named if _class_folders(folder)]
    unclear = [folder for folder in folders if folder.name.lower() in _UNCLEAR and _class_folders(folder)]
    splits = [SPLITS[folder.name.lower()] for folder in parts]
    is_split = "train" in splits or (splits == ["test"] and folders == parts)
    if not is_split and (parts or folders == named != []):
        names = " and ".join(folder.name for folder in parts or named)
        raise DataError(f"{root}: holds {names}, but no train with a folder for each class; add it")
    if not is_split and unclear and folders == unclear:
        names = " and ".join(folder.name for folder in unclear)
        raise DataError(f"{root}: holds {names}, which may be any split; call them train, val and test")
    for folder in folders if is_split else ():
        first = next(iter(walk(folder, suffixes)), None) if folder not in parts else None
        if first is not None:
            why = "in no folder of a class" if folder in named else "neither in train, nor in val, nor in test"
            remedy = "; call it val or test to use it" if folder in unclear else ""
            say(f"{folder}: left out with all its files, such as {first.name}, which are {why}{remedy}")
    for part in parts if is_split else [root]:
        split = SPLITS[part.name.lower()] if is_split else ""
        beside = [path.name for path in sorted(part.iterdir()) if path.suffix.lower() in suffixes and path.is_file()]
        beside = [name for name in beside if not name.startswith(".")]
        if beside:
            say(f"{part}: left out {counted(len(beside), 'file')} in no folder of a class, such as {beside[0]}")
        links = [path for path in sorted(part.iterdir()) if not path.name.startswith(".") and leads_nowhere(path)]
        say_of_dead_links(part, links)
        for folder in _class_folders(part, left_out if is_split else None):
            name = os.fsencode(folder.name).decode(errors="backslashreplace")
            if name != folder.name:  # names of classes are drawn and written, so they must be text
                raise DataError(f"{part}/{name}: the name of a class is not UTF-8; rename the folder")
            before = left_out.kinds.copy()
            files = list(walk(folder, suffixes, left_out))
            if not files:
                others = ", ".join(f"{number} {kind}" for kind, number in (left_out.kinds - before).most_common(5))
                what = f"class {folder.name} has no readable file{others and f', only {others}'}"
                raise DataError(f"{folder}: {what}; add some, or take the folder out")
            for path in files:
                yield Item(str(path.relative_to(root)), folder.name, split)


def _class_folders(folder: Path, left_out: LeftOut | None = None) -> list[Path]:
    """The folders in a folder that may be classes or splits."""
    left_out = LeftOut() if left_out is None else left_out
    return [path for path in sorted(folder.iterdir()) if _is_folder(path) and not left_out.is_folder(path)]


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".") and not leads_up(path)
