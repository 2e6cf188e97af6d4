"""The shards of a folder, and the samples in them by their numbers."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from datamodules.archives._shard_index import Index, index_of
from datamodules.archives.parquet import tar_of_parquet
from datamodules.archives.write_shards import UNFINISHED
from datamodules.decoding.packed import Packed
from datamodules.errors import DataError
from datamodules.own.find import SPLITS
from datamodules.own.scan import progress, walk

_ARCHIVES = frozenset({".tar", ".parquet", ".tgz"})
_COMPRESSED = frozenset({".tgz", ".gz", ".bz2", ".xz", ".zst"})


@dataclass(frozen=True)
class Shard:
    """An archive of samples.

    Attributes:
        name: Its path below the root.
        archive: The tar archive; for a Parquet file, a tar archive in the cache.
        split: "train", "val", "test", or "" if the samples have no split yet.
        index: Where its samples are.
        classes: The names of classes that a Parquet file lists; else empty.
    """

    name: str
    archive: Path
    split: str
    index: Index
    classes: list[str]


class ShardList:
    """The shards of a folder in the order of their paths. Samples are numbered from 0 through all shards.

    Args:
        root: The folder as the user wrote it, for messages.
        folder: The folder.
        kind: "image" or "audio".
        suffixes: The suffixes of inputs in archives.
        label: The key of .json files, or the column of .parquet files, with the label.

    Attributes:
        shards: The shards that can be listed.
        bad: The error of each other shard, with a remedy, by name.
        starts: The number of the first sample of each shard, and then the total number of samples.

    Raises:
        DataError: If there is no shard, or if a shard is missing.
    """

    def __init__(self, root: str, folder: Path, kind: str, suffixes: frozenset[str], label: str) -> None:
        files = walk(folder, _ARCHIVES | _COMPRESSED)
        paths = [path for path in files if path.suffix.lower() in _ARCHIVES or path.stem.lower().endswith(".tar")]
        if (folder / UNFINISHED).exists():
            raise DataError(f"{root}: its shards were not all written; give the same command shard again")
        if not paths:
            raise DataError(f"{root}: holds no shard; it may hold .tar and .parquet")
        names = [str(path.relative_to(folder)) for path in paths]
        _refuse_missing(root, names)
        self._folder = folder
        self.shards: list[Shard] = []
        self.bad: dict[str, str] = {}
        for path, name in progress(list(zip(paths, names, strict=True)), f"listing {root}"):
            archive, classes = path, list[str]()
            try:
                if path.suffix.lower() in _COMPRESSED:
                    raise DataError(f"{path}: compressed, so no sample can be read alone; unpack it to a .tar")
                if path.suffix.lower() == ".parquet":
                    archive, classes = tar_of_parquet(path, kind, suffixes, label)
                index = index_of(archive, suffixes, label)
                self.shards.append(Shard(name, archive, _split_of(name), index, classes))
            except DataError as error:
                self.bad[name] = str(error).removeprefix(f"{path}: ").removeprefix(f"{archive}: ")
        self.starts = [0, *accumulate(len(shard.index.labels) for shard in self.shards)]

    def place(self, number: Any) -> tuple[Shard, int]:
        """The shard of a sample, and its position in the shard, by its number: an integer, or a tensor ()."""
        at = bisect_right(self.starts, int(number)) - 1
        return self.shards[at], int(number) - self.starts[at]

    def name_of(self, number: Any) -> str:
        """The path of a sample's shard, followed by the sample's name in the shard."""
        shard, position = self.place(number)
        return f"{shard.name}/{shard.index.key(position)}"

    def packed(self, number: Any) -> Packed:
        """The file of a sample.

        Raises:
            DataError: If its shard has become shorter since it was listed.
        """
        shard, position = self.place(number)
        size = int(shard.index.sizes[position])
        with open(shard.archive, "rb", buffering=0) as archive:
            archive.seek(int(shard.index.offsets[position]))
            content = archive.read(size)
        if len(content) < size:
            raise DataError(f"{self._folder / shard.name}: cut off since it was listed; copy or download it again")
        return Packed(f"{self._folder}/{self.name_of(number)}", content)


def _split_of(name: str) -> str:
    """The split that a shard's path names; the last of several such words decides."""
    words = [word for word in re.split("[^a-z]+", name.lower()) if word in SPLITS]
    return SPLITS[words[-1]] if words else ""


def _refuse_missing(root: str, names: Sequence[str]) -> None:
    """Check that no shard is missing, where names say how many there are: x-00000-of-00002.tar.

    Hugging Face adds a fingerprint: x-00000-of-00002-0123456789abcdef.parquet.

    Raises:
        DataError: If a shard is missing.
    """
    present: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        if match := re.fullmatch(r"(.*-)(\d+)-of-(\d+)([^/]*)", name):
            suffix = re.sub(r"^-[0-9a-f]{16}(?=\.)", "-*", match[4])
            present.setdefault((match[1], match[3], suffix), set()).add(int(match[2]))
    for (prefix, count, suffix), numbers in present.items():
        # no set of all numbers, because a name may claim any number of shards
        missing = next((number for number in range(int(count)) if number not in numbers), None)
        if missing is not None:
            name = f"{prefix}{missing:0{len(count)}}-of-{count}{suffix}"
            raise DataError(f"{root}/{name}: missing, and others of its {int(count)} are there; copy or download it")
