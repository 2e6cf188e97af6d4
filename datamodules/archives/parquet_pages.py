"""The declared sizes of a Parquet file's pages, read before decoding: a kilobyte can become terabytes in memory.

pyarrow allocates what the header of each page declares, and a run of equal numbers, or a long repeated value, takes a
few bytes of the file. The sums in the footer may be smaller than the pages, so both are compared.
"""

import mmap
from collections.abc import Collection
from pathlib import Path
from typing import Any

from datamodules.errors import DataError

SMALL = 2**26  # bytes that any file may decompress to
TIMES = 100  # a larger file may decompress to so many times its size: images and sounds are compressed already
_TIMES_OF_A_PAGE = 20  # the same for a page, which is in memory as a whole
_IN_LISTS = 2**24  # the most values in lists, in one column of a group of rows
_ROWS = 64  # the most rows that are decoded at once
BOMB = "may be a decompression bomb; if not, write it again in smaller groups of rows"
_VALUES_IN = {0: 5, 2: 7, 3: 8}  # the field with the number of values, by the kind of page: data, dictionary, data (v2)


def rows_at_once(path: Path, metadata: Any, columns: Collection[str]) -> int:
    """How many rows of some columns can be decoded at once.

    No value is longer than the longest page, so these rows take at most 64 MiB, unless it is one row.

    Args:
        path: The file.
        metadata: Its footer, from pyarrow.
        columns: The names of the columns.

    Raises:
        DataError: If they would take much more memory than the size of the file, or if a page is damaged.
    """
    first_parts = {name.split(".")[0] for name in columns}
    used = [at for at in range(metadata.num_columns) if metadata.schema.column(at).path.split(".")[0] in first_parts]
    most = max(SMALL, TIMES * path.stat().st_size)
    whole = longest = 0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for group in range(metadata.num_row_groups):
            for at in used:
                column, chunk = metadata.schema.column(at), metadata.row_group(group).column(at)
                for packed, size in _pages(path, content, chunk):
                    whole, longest = whole + size, max(longest, size)
                    if whole > most or size > max(SMALL, _TIMES_OF_A_PAGE * packed):
                        raise DataError(f"{path}: would become more than {whole} bytes; it {BOMB}")
                if column.max_repetition_level and chunk.num_values > _IN_LISTS:
                    what = f"column {column.path} has {chunk.num_values} values in lists in a group of rows"
                    raise DataError(f"{path}: {what}; it {BOMB}")
    return max(1, min(_ROWS, SMALL // max(longest, 1)))


def _pages(path: Path, content: mmap.mmap, chunk: Any) -> list[tuple[int, int]]:
    """The sizes of each page of a column in a group of rows, packed and unpacked, in bytes.

    Raises:
        DataError: If a header is invalid, or if the footer declares another number of values: pyarrow stops there.
    """
    at = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < at:
        at = chunk.dictionary_page_offset
    end = at + chunk.total_compressed_size
    pages, num_values = [], 0
    try:
        while chunk.num_values and at < end:  # without values there is no page, whatever its offset
            if at < 0:
                raise LookupError(at)
            header = _Header(content, at)
            fields = header.struct()
            kind, size, packed = fields[1], fields[2], fields[3]
            values = fields[_VALUES_IN[kind]][1] if kind in _VALUES_IN else 0
            if min(size, packed, values) < 0 or (kind == 2 and values > size):
                raise LookupError(at)
            pages.append((packed, size))
            num_values += values if kind != 2 else 0
            at = header.at + packed
    except (LookupError, TypeError) as error:
        raise DataError(f"{path}: cut off or damaged at byte {at}; copy or download it again") from error
    if num_values != chunk.num_values:
        what = f"its pages hold {num_values} values, and its end says {chunk.num_values}"
        raise DataError(f"{path}: damaged, {what}; copy or download it again")
    return pages


class _Header:
    """The header of a page: a structure in Thrift's compact protocol, PageHeader of
    https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.

    `at` is the offset in the file of the next byte to read.
    """

    def __init__(self, content: mmap.mmap, at: int) -> None:
        self._content, self.at = content, at

    def struct(self, depth: int = 3) -> dict[int, Any]:
        """The numbers and structures in a structure, by field number; texts are skipped.

        Raises:
            LookupError: If the bytes are not a structure.
        """
        fields: dict[int, Any] = {}
        number = 0
        while byte := self._byte():
            step, kind = byte >> 4, byte & 15
            number = number + step if step else self._number()
            if kind in (4, 5, 6):
                fields[number] = self._number()
            elif kind == 8:
                length = self._varint()
                self.at += length
            elif kind == 12 and depth:
                fields[number] = self.struct(depth - 1)
            elif kind == 3:
                self._byte()
            elif kind not in (1, 2):  # true and false have no bytes of their own
                raise LookupError(kind)
        return fields

    def _byte(self) -> int:
        self.at += 1
        return self._content[self.at - 1]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise LookupError(self.at)

    def _number(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
