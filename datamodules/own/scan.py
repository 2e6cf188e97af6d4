"""Open every file of a data set once, before any training, and cache facts about it, or its error."""

import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from datamodules.cache import cache_file, locked, replacing, sha256_of
from datamodules.errors import DataError, counted, say

_VERSION = 7  # increased when a scan detects more faults

# Folders that systems and programs make beside the user's files: thumbnails, deleted files, snapshots.
OF_SYSTEMS = frozenset(
    {"@eaDir", "#recycle", "#snapshot", "@Recycle", "@Recently-Snapshot", "$RECYCLE.BIN", "System Volume Information",
     "__MACOSX", "lost+found"}
)  # fmt: skip

Facts = dict[str, Any]  # of a file: its SHA-256 and the result of `examine`, or the error that it raised


def scan(
    root: Path,
    names: Iterable[str],
    examine: Callable[[Path], Facts],
    kind: str,
    others: Callable[[Path], Iterable[Path]] = lambda path: (),
) -> dict[str, Facts]:
    """Examine the files of a folder. Files that have not changed since the last scan are not read again.

    Args:
        root: The folder.
        names: Paths in it.
        examine: Reads a whole file and returns plain values, or raises a DataError. A file that has parts in other
            files returns "sha256" itself.
        kind: The name of this kind of scan, for the cache.
        others: The other files in which parts of a file are. If one of them changes, the file is read again.

    Returns:
        For each name the result of examine with "sha256", or "error": what is wrong, and its remedy.
    """
    names = list(names)
    path = cache_file("scans", f"{kind} {_VERSION}\n{root.resolve()}", ".json")
    with locked(path):
        known: dict[str, list[Any]] = _read(path)
        before = dict(known)
        stamps = {name: _stamp(root / name, *others(root / name)) for name in names}
        changed = [name for name in names if known.get(name, [None])[0] != stamps[name]]

        def record(name: str) -> Facts:
            try:
                facts = examine(root / name)
                return {"sha256": sha256_of(root / name), **facts}
            except (DataError, OSError) as error:
                return {"error": str(error).removeprefix(f"{root / name}: ")}

        for name, facts in zip(changed, in_threads(record, changed, f"checking {root}"), strict=True):
            known[name] = [stamps[name], facts]
        # broken files are read again next time: the fault may be the disk's, a permission or a missing decoder
        good = {name: entry for name, entry in known.items() if "error" not in entry[1]}
        if good != before:
            with replacing(path) as temporary:
                temporary.write_text(json.dumps(good))
    return {name: known[name][1] for name in names}


def in_threads(work: Callable[[Any], Any], items: list[Any], title: str) -> list[Any]:
    """The results of a function that waits for a disk or a decoder, with a progress bar if it takes long."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(progress(pool.map(work, items), title, len(items)))


def progress(work: Iterable[Any], title: str, total: int | None = None) -> Iterable[Any]:
    """The same, with a progress bar if it takes long."""
    return tqdm(work, title, total, delay=2, leave=False, disable=None)


@dataclass
class LeftOut:
    """What a search for files leaves out, except for hidden files.

    Attributes:
        runs: Folders of longseq's own runs, whose pictures are not samples.
        folders: The number of folders made by a system, by name.
        kinds: The number of files with other suffixes than the wanted ones, by suffix.
    """

    runs: list[Path] = field(default_factory=list)
    folders: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)

    def is_folder(self, path: Path) -> bool:
        """Whether a folder is left out. If so, it is noted."""
        if path.name in OF_SYSTEMS:
            self.folders[path.name] += 1
        elif _holds_runs_alone(path):
            self.runs.append(path)
        else:
            return False
        return True

    def lines(self) -> Iterator[str]:
        """A line for each of the three attributes that is not empty."""
        if self.runs:
            others = f" and {len(self.runs) - 1} more" if len(self.runs) > 1 else ""
            yield f"left out the folder {self.runs[0].name}{others}: runs of longseq"
        if self.folders:
            yield f"left out folders that a system has made: {_listed(self.folders)}"
        if self.kinds:
            yield f"left out {counted(self.kinds.total(), 'file')} of other kinds: {_listed(self.kinds)}"


def _listed(numbers: Counter[str], most: int = 10) -> str:
    """The most common names with their numbers."""
    others = len(numbers) - most
    return ", ".join(f"{number} {name}" for name, number in numbers.most_common(most)) + (
        f" and {counted(others, 'more kind')}" if others > 0 else ""
    )


def _holds_runs_alone(folder: Path) -> bool:
    """Whether a folder is that of a run, which longseq/cli/runs/folders.py makes, or contains only such folders."""
    try:
        if (folder / ".lock").is_file() and (folder / ".lock").read_bytes().startswith(b"process "):
            return True
        if (folder / "config.yaml").is_file() and (folder / "splits.csv").is_file():  # copied without its hidden file
            return True
        inside = [path for path in folder.iterdir() if not path.name.startswith(".")]
        return bool(inside) and all(
            path.is_dir() and not path.is_symlink() and _holds_runs_alone(path) for path in inside
        )
    except OSError:
        return False


def walk(root: Path, suffixes: frozenset[str], left_out: LeftOut | None = None) -> Iterator[Path]:
    """The files below a folder with one of the suffixes, sorted, without hidden files.

    A linked folder is followed once, and never if it contains the link. The user is told the number of dead links.

    Args:
        root: The folder.
        suffixes: In lower case, with the dot.
        left_out: Collects what is left out.
    """
    seen: set[tuple[int, int]] = set()
    left_out = LeftOut() if left_out is None else left_out
    dead: list[Path] = []

    def inside(folder: Path) -> Iterator[Path]:
        status = folder.stat()
        if (status.st_dev, status.st_ino) in seen:
            return
        seen.add((status.st_dev, status.st_ino))
        for path in sorted(folder.iterdir()):
            if path.name.startswith(".") or leads_up(path):
                continue
            if path.is_dir():
                if not left_out.is_folder(path):
                    yield from inside(path)
            elif leads_nowhere(path):
                if path.suffix.lower() in suffixes or not path.suffix:  # without a suffix, the target may be a folder
                    dead.append(path)
            elif path.suffix.lower() not in suffixes:
                left_out.kinds[path.suffix.lower() or "without a suffix"] += 1
            else:
                yield path

    try:
        yield from inside(root)
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); check its permissions") from error
    say_of_dead_links(root, dead)


def say_of_dead_links(folder: Path, links: list[Path]) -> None:
    """Tell the user how many links in a folder lead nowhere, if any do."""
    if links:
        lead = "link leads" if len(links) == 1 else "links lead"
        say(f"{folder}: {len(links)} {lead} nowhere, such as {links[0].relative_to(folder)}; left out")


def leads_up(path: Path) -> bool:
    """Whether a path is a link to a folder that contains it: other files in that folder have other labels."""
    if not path.is_symlink() or not path.is_dir():
        return False
    above = {*path.absolute().parents, path.parent.resolve(), *path.parent.resolve().parents}
    return any(path.samefile(folder) for folder in above)


def leads_nowhere(path: Path) -> bool:
    """Whether a path is a link to a file that does not exist, or a circle of links."""
    if not path.is_symlink():
        return False
    try:
        path.stat()
    except OSError as error:
        return error.errno in (errno.ELOOP, errno.ENOENT, errno.ENOTDIR)
    return False


def _read(path: Path) -> dict[str, list[Any]]:
    """The cached facts; empty if the file is missing or truncated."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _stamp(*paths: Path) -> list[int]:
    """The sizes of files, and when they were last changed."""
    stamp = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            stamp += [-1, -1]
        else:
            stamp += [status.st_size, status.st_mtime_ns]
    return stamp
