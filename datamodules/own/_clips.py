"""Cut recordings into clips of one length, for tables that give the start and end of each sound."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from datamodules.own.files import Item
from datamodules.windows import starts_of_windows


def cut_into_clips(
    items: Sequence[Item],
    seconds: float,
    length_of: Callable[[str], float],
    separator: str,
    min_overlap: float = 0.0,
) -> list[Item]:
    """Clips of one length that cover the recordings of a table. Each has the classes of all rows that belong to it.

    A row belongs to a clip if min_overlap seconds of it, or half of it, are in the clip. A row that is a point in time
    belongs to the clip with that point.

    The last clip ends with the recording, and may overlap the one before it. A shorter recording is one clip. Rows that
    begin after the end of their recording, and rows of recordings that cannot be read, are returned without changes:
    the scan of all files reports them.

    Args:
        items: Rows with the start and end of sounds; a row without times belongs to the whole recording.
        seconds: The length of a clip.
        length_of: The length of a recording, in seconds, from its path; 0 if it cannot be read.
        separator: The text between the classes of a label.
        min_overlap: The least seconds of a longer row in a clip; with 0 any overlap is enough.
    """
    by_path: dict[str, list[Item]] = {}
    for item in items:
        by_path.setdefault(item.path, []).append(item)
    clips = []
    for path, rows in by_path.items():
        length = length_of(path)
        waiting = sorted(rows, key=lambda row: row.start, reverse=True)  # the next row is the last element
        current: list[Item] = []
        for start in starts_of_windows(length, seconds, seconds, least=1e-6 * seconds):
            start, end = round(start, 6), round(min(start + seconds, length), 6)  # as tables write them
            while waiting and waiting[-1].start < end:
                current.append(waiting.pop())
            current = [row for row in current if row.end is None or row.end > start or row.start >= start]
            inside = [row for row in current if _is_inside(row, start, end, length, min_overlap)]
            inside.sort(key=lambda row: row.line)
            label = separator.join(dict.fromkeys(name for row in inside for name in row.classes(separator)))
            clips.append(replace(rows[0], label=label, start=start, end=end))
        clips += waiting
    return clips


def _is_inside(row: Item, start: float, end: float, length: float, min_overlap: float) -> bool:
    """Whether a row that begins before the end of a clip belongs to it. Times are rounded to microseconds."""
    last = length if row.end is None else min(row.end, length)
    overlap = min(last, end) - max(row.start, start)
    if last <= row.start:  # a point
        return row.start >= start
    return overlap > 1e-6 and overlap >= min(min_overlap, (last - row.start) / 2) - 1e-6
