"""Clips of one length from recordings in which rows of a table say what is heard when."""

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
    """Clips of one length that cover the recordings of a table, each with the classes of all rows that are heard in it.

    A row is heard in a clip if min_overlap seconds of it, or half of it, lie there; and a row that is a point in time,
    if the point does.

    The last clip ends with the recording, and may overlap the one before it. A shorter recording is one clip. Rows that
    begin behind the end of their recording, or of one that cannot be read, come back as they are: the scan of all files
    says what is wrong with them.

    Args:
        items: Rows with the times at which something is heard; a row without times is of the whole recording.
        seconds: The length of a clip.
        length_of: The length of a recording, in seconds, from its path; 0 if it cannot be read.
        separator: What stands between the classes of a label.
        min_overlap: Seconds of a longer row that a clip must hold; with 0 any will do.
    """
    by_path: dict[str, list[Item]] = {}
    for item in items:
        by_path.setdefault(item.path, []).append(item)
    clips = []
    for path, rows in by_path.items():
        length = length_of(path)
        waiting = sorted(rows, key=lambda row: row.start, reverse=True)  # the next row is the last
        going_on: list[Item] = []
        for start in starts_of_windows(length, seconds, seconds, least=1e-6 * seconds):
            start, end = round(start, 6), round(min(start + seconds, length), 6)  # as tables write them
            while waiting and waiting[-1].start < end:
                going_on.append(waiting.pop())
            going_on = [row for row in going_on if row.end is None or row.end > start or row.start >= start]
            heard = sorted(
                (row for row in going_on if _is_heard(row, start, end, length, min_overlap)), key=lambda row: row.line
            )
            label = separator.join(dict.fromkeys(name for row in heard for name in row.classes(separator)))
            clips.append(replace(rows[0], label=label, start=start, end=end))
        clips += waiting
    return clips


def _is_heard(row: Item, start: float, end: float, length: float, min_overlap: float) -> bool:
    """Whether a row that begins before the end of a clip is heard in it. Clips have times rounded to microseconds."""
    last = length if row.end is None else min(row.end, length)
    inside = min(last, end) - max(row.start, start)
    if last <= row.start:  # a point
        return row.start >= start
    return inside > 1e-6 and inside >= min(min_overlap, (last - row.start) / 2) - 1e-6
