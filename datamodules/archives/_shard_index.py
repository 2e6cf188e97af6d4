"""The index of a shard: the offsets and the labels of its samples, as arrays of a few bytes per sample."""

import json
import mmap
import os
import tarfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int32, Int64, UInt8
from torch import Tensor

from datamodules.cache import cached, stamp
from datamodules.errors import DataError

_VERSION = 3  # increased when the content of an index changes
_BLOCK = 512  # bytes of a block of a tar archive
_LONGEST_LABEL = 1000  # characters; Python reads no number of more than 4300 digits
_LONGEST_JSON = 2**24  # bytes; Python objects may take thirty times as much
REMEDY = "copy or download it again"

_Member = tuple[bytes, int, int]  # the name of a file in an archive, the offset of its content, and its size


@dataclass(frozen=True)
class Index:
    """The samples of one shard. An index of a million samples takes about 60 MB.

    Attributes:
        offsets, sizes: The offset of each sample's file in the archive, and its size in bytes.
        keys: The names of all samples, one after the other.
        ends: The end of each sample's name in `keys`.
        labels: For each sample, the position of its label in `texts`.
        texts: The different labels, as JSON: a name, a number, or a list of these.
    """

    offsets: Int64[Tensor, " n"]
    sizes: Int64[Tensor, " n"]
    keys: UInt8[Tensor, " bytes"]
    ends: Int64[Tensor, " n"]
    labels: Int32[Tensor, " n"]
    texts: list[str]

    def key(self, number: int) -> str:
        """The name of a sample."""
        start = int(self.ends[number - 1]) if number else 0
        return os.fsdecode(self.keys[start : int(self.ends[number])].numpy().tobytes())


def index_of(path: Path, suffixes: frozenset[str], field: str) -> Index:
    """The index of a tar archive, which is cached until the archive changes.

    Args:
        path: The archive.
        suffixes: The suffixes of inputs.
        field: The key of the label in .json files.

    Raises:
        DataError: If the file is truncated or not a tar archive, or if a sample has no label or no file.
    """
    what = f"{_VERSION} {sorted(suffixes)} {field}\n{stamp(path)}"
    return Index(**cached("shards", what, lambda: vars(_read_index(path, suffixes, field))))


def _read_index(path: Path, suffixes: frozenset[str], field: str) -> Index:
    offsets, sizes, ends, labels = array("q"), array("q"), array("q"), array("i")
    keys, seen = bytearray(), set()
    codes: dict[str, int] = {}  # the number of each label
    numbers: dict[bytes, int] = {}  # the same, by the content of a .cls file
    endings = {suffix.encode() for suffix in suffixes}
    # of the sample that is read now: its name, the place of its file, the number of its label, a name with a dot
    key, place, label, dotted = b"", None, -1, b""

    def wrong(what: str) -> DataError:
        return DataError(f"{path}: sample {os.fsdecode(key)} {what}")

    def end_sample() -> None:
        if place is None and label < 0:
            if dotted:
                raise wrong(f"has a dot in its name ({os.fsdecode(dotted)}), where its name ends; write _ for it")
            return  # files that are neither inputs nor labels
        if place is None:
            raise wrong(f"has no file of {', '.join(sorted(suffixes))}; its files must follow each other")
        if label < 0:
            raise wrong("has no label; put a .cls or .json file right after it")
        if key in seen:
            raise wrong("occurs twice; give each sample another name")
        seen.add(key)
        keys.extend(key)
        ends.append(len(keys))
        offsets.append(place[0])
        sizes.append(place[1])
        labels.append(label)

    with open(path, "rb") as file:
        try:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise DataError(f"{path}: empty; {REMEDY}") from error
        with content:
            for name, offset, size in _members(path, content):
                folder, slash, base = name.rpartition(b"/")
                stem, _, ending = base.partition(b".")
                if not stem:
                    continue  # hidden
                if folder + slash + stem != key:
                    end_sample()
                    key, place, label, dotted = folder + slash + stem, None, -1, b""
                ending = b"." + ending.lower()
                if ending.count(b".") > 1 and ending[ending.rindex(b".") :] in (b".cls", *endings):
                    dotted = base
                if ending in endings:
                    if place is not None:
                        raise wrong("has two files; give each one another name")
                    place = offset, size
                elif ending == b".cls":
                    text = content[offset : offset + size]
                    label = numbers.get(text, -1)
                    if label < 0:
                        plain = text.decode(errors="replace").strip()
                        if not plain:
                            raise wrong("has an empty label; write its class into its .cls file")
                        if len(plain) > _LONGEST_LABEL:
                            raise wrong(f"has a label of {len(plain)} characters; write its class into its .cls file")
                        is_number = plain.isdecimal() and plain == str(int(plain))  # 007 is a name
                        value = json.dumps(int(plain) if is_number else plain)
                        label = numbers[text] = codes.setdefault(value, len(codes))
                elif ending == b".json" and label < 0:
                    if size > _LONGEST_JSON:
                        raise wrong(f"has a .json file of {size} bytes; write its label alone into it")
                    try:
                        value = json.loads(content[offset : offset + size])
                        if isinstance(value, dict) and value.get(field) is not None:
                            label = codes.setdefault(_label(value[field], wrong), len(codes))
                    except (ValueError, RecursionError) as error:
                        raise wrong(f"has a .json file that cannot be read ({error}); write it again") from error
            end_sample()
    if not offsets:
        raise DataError(f"{path}: holds no sample; it may hold {', '.join(sorted(suffixes))}, and their labels")
    columns = {"offsets": offsets, "sizes": sizes, "keys": keys, "ends": ends, "labels": labels}
    types = {"keys": torch.uint8, "labels": torch.int32}
    tensors = {name: torch.frombuffer(of, dtype=types.get(name, torch.int64)) for name, of in columns.items()}
    return Index(**tensors, texts=list(codes))


def _label(value: Any, wrong: Any) -> str:
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, bool) or not isinstance(part, int | str) or part == "":
            raise wrong(f"has the label {json.dumps(value)}; give the name or the number of its class, or a list")
        if isinstance(part, str) and len(part) > _LONGEST_LABEL:
            raise wrong(f"has a label of {len(part)} characters; give the name or the number of its class, or a list")
    return json.dumps(value)


def _members(path: Path, content: mmap.mmap) -> Iterator[_Member]:
    """The files of an archive.

    Headers of the plain form, which is the most common one, are read here in a few microseconds each. From the first
    other header on, Python's tarfile reads the archive, which takes twenty times as long.
    """
    at = dropped = 0
    total, nothing = len(content), bytes(_BLOCK)
    while (header := content[at : at + _BLOCK]) != nothing:
        if len(header) < _BLOCK:
            raise DataError(f"{path}: cut off after {total} bytes, before the end of the archive; {REMEDY}")
        if header[257:262] != b"ustar":
            raise DataError(f"{path}: not a tar archive, or damaged at byte {at}; {REMEDY}")
        try:
            size = int(header[124:136].rstrip(b"\0 "), 8)
        except ValueError:
            size = -1  # a number of another form
        kind, begin, start = header[156:157], at, at + _BLOCK
        at = start - (-size // _BLOCK) * _BLOCK
        if at > total:
            raise DataError(f"{path}: cut off after {total} bytes, in the middle of a file; {REMEDY}")
        if at - dropped > 2**26:  # pages of a mapped file count as used memory until they are dropped
            content.madvise(mmap.MADV_DONTNEED)
            dropped = at
        if kind == b"x" and size >= 0 and not any(word in content[start:at] for word in (b" path=", b" size=", b"GNU")):
            continue  # the time or the owner of the file that follows
        has_plain_name = header[263:265] == b"00" or header[345] == 0
        if size < 0 or not has_plain_name or kind not in (b"0", b"\0", b"5"):
            yield from (member for member in _members_of_any_form(path, content) if member[1] > begin)
            return
        if kind != b"5":
            name = header[:100].partition(b"\0")[0]
            if header[345]:
                name = header[345:500].partition(b"\0")[0] + b"/" + name
            yield name.removeprefix(b"./"), start, size
    _refuse_second(path, content, at)


def _refuse_second(path: Path, content: mmap.mmap, end: int) -> None:
    """Check that no archive follows the end of an archive: most programs would ignore it."""
    if (second := content.find(b"ustar", end)) >= 0:
        what = f"holds another archive from byte {second - 257} on, as cat writes it"
        raise DataError(f"{path}: {what}; give each a file of its own, or join them with tar --concatenate")


def _members_of_any_form(path: Path, content: mmap.mmap) -> Iterator[_Member]:
    end = 0
    try:
        # a read of a mapped file returns what there is; other files first allocate what a header declares
        with tarfile.open(fileobj=content, mode="r:") as archive:  # type: ignore[arg-type]
            for member in archive:
                archive.members.clear()  # type: ignore[attr-defined] (tarfile would store all of them)
                begin, end = end, archive.offset  # type: ignore[attr-defined]
                if end <= begin or member.size < 0:  # Python's tarfile would never end
                    raise DataError(f"{path}: damaged at byte {begin}; {REMEDY}")
                if member.issparse():
                    raise DataError(f"{path}: {member.name} is a sparse file; write the archive without --sparse")
                if member.isreg():
                    yield os.fsencode(member.name).removeprefix(b"./"), member.offset_data, member.size
            end = archive.offset  # type: ignore[attr-defined]
    # a seek in a mapped file raises ValueError beyond its end, and OverflowError far beyond it
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"{path}: cut off or damaged ({error}); {REMEDY}") from error
    _refuse_second(path, content, end)
    if content[end : end + _BLOCK] != bytes(_BLOCK):  # tarfile takes an invalid header for the end of the archive
        raise DataError(f"{path}: cut off or damaged at byte {end}; {REMEDY}")
