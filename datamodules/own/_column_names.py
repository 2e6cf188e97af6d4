"""Names of columns in tables of files, as other programs write them."""

import re
from collections.abc import Sequence

BEGIN_TIME = "Begin Time (s)"  # Raven's, in every table: from the start of the first recording, like End Time (s)
FILE_OFFSET, END_TIME = "File Offset (s)", "End Time (s)"
IN_FILE, FOLDERS = "IN FILE", ("INDIR", "FOLDER")  # Kaleidoscope's: the name of a file, and its folders

# The meaning of a column, and its possible names; the first name that occurs in a table is used. These names are also
# those of Hugging Face's metadata.
OWN = {
    "path": ("path", "file_name"),
    "label": ("label", "class", "Species", "Common name", "Annotation"),
    "start": ("start",),
    "end": ("end",),
    "fold": ("fold",),
    "split": ("split",),
}
# Tables that a user names may also be from Raven, BirdNET, OpenSoundscape, ketos, Kaleidoscope and others. Begin Path:
# the path of a recording on the computer with Raven, perhaps on Windows.
_LABELS = {"label": ("species_name", "event_label", "MANUAL ID", "TOP1MATCH", "TOP1MATCH*", "AUTO ID", "AUTO ID*")}
_PATHS = {"path": ("Begin Path", "Begin File", "File", "filename", "filepath", "audio_file", "input", IN_FILE)}
_TIMES = {  # in seconds; offset is an end if there is onset, and a start if there is duration
    "start": (FILE_OFFSET, BEGIN_TIME, "start_time", "onset", "begin", "begin_time", "offset"),
    "end": (END_TIME, "end_time", "offset", "stop"),
    "duration": ("duration",),
}

_STARTS = frozenset(("start", "begin", "onset", "from", "tmin", "time", "timestamp"))
_ENDS = frozenset(("end", "stop", "offset", "finish", "to", "until", "tmax"))
_UNITS = frozenset(
    ("s", "sec", "secs", "second", "seconds", "ms", "msec", "min", "minutes", "sample", "samples", "frame")
)
_OTHER_WORDS = _UNITS | {"t", "at", "in", "of", "event", "call", "clip", "segment", "window", "annotation", "selection"}


def names_of(are_sounds: bool, is_named: bool) -> dict[str, tuple[str, ...]]:
    """The names that each column may have.

    Args:
        are_sounds: Whether the rows are sounds, which have times.
        is_named: Whether the user gave the table's name. Otherwise it may be about something else.
    """
    names = dict(OWN)
    for more in (*((_LABELS, _PATHS) if is_named else ()), *((_TIMES,) if are_sounds else ())):
        names |= {what: (*names.get(what, ()), *others) for what, others in more.items()}
    return names


def columns_of(present: Sequence[str], names: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """The column of a table for each meaning.

    Args:
        present: The names of the table's columns.
        names: The possible names for each meaning.
    """
    offset_is = "end" if "onset" in present else "start" if "duration" in present else ""
    columns = {
        what: next((name for name in possible if name in present and (name != "offset" or what == offset_is)), "")
        for what, possible in names.items()
    }
    if not columns["start"] or columns["end"]:
        columns["duration"] = ""  # without a start it is the duration of the file
    return {what: name for what, name in columns.items() if name}


def unread_time(present: Sequence[str], used: dict[str, str]) -> str:
    """The name of an unused column that looks like a missing start or end of the rows; or "".

    Args:
        present: The names of the table's columns.
        used: The used columns, by meaning.
    """
    sought = _STARTS | _ENDS if "start" not in used else frozenset() if {"end", "duration"} & {*used} else _ENDS
    for name in present:
        words = {*re.findall("[a-z]+", re.sub("([a-z])([A-Z])", r"\1 \2", name).lower())}
        if name not in used.values() and words & sought and words <= _STARTS | _ENDS | _OTHER_WORDS:
            return name
    return ""
