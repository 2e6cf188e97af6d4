"""Names of columns in tables of files, as other programs write them."""

import re
from collections.abc import Sequence

BEGIN_TIME = "Begin Time (s)"  # counted from the first recording, as its end is; every table of Raven has it
BEGIN_PATH = "Begin Path"  # where a recording was on the computer on which Raven ran, perhaps one with Windows
FILE_OFFSET, END_TIME = "File Offset (s)", "End Time (s)"
IN_FILE, FOLDERS = "IN FILE", ("INDIR", "FOLDER")  # Kaleidoscope: the name of a file, and the folders that it is in

# What a column is, and its names: the first that is in a table counts. Rows of Hugging Face's metadata have these.
OWN = {
    "path": ("path", "file_name"),
    "label": ("label", "class", "Species", "Common name", "Annotation"),
    "start": ("start",),
    "end": ("end",),
    "fold": ("fold",),
    "split": ("split",),
}
# Tables that a user names may also be of Raven, BirdNET, OpenSoundscape, ketos, Kaleidoscope and others.
LABELS = {"label": ("species_name", "event_label", "MANUAL ID", "TOP1MATCH", "TOP1MATCH*", "AUTO ID", "AUTO ID*")}
PATHS = {"path": (BEGIN_PATH, "Begin File", "File", "filename", "filepath", "audio_file", "input", IN_FILE)}
TIMES = {  # in seconds; offset is an end beside onset, and a start beside duration
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
        are_sounds: Whether rows are of sounds, which have times.
        is_named: Whether the user gave the table's name. Otherwise it may be about something else.
    """
    names = dict(OWN)
    for more in (*((LABELS, PATHS) if is_named else ()), *((TIMES,) if are_sounds else ())):
        names |= {what: (*names.get(what, ()), *others) for what, others in more.items()}
    return names


def columns_of(present: Sequence[str], names: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """The column of a table for each thing that it says.

    Args:
        present: The names of the table's columns.
        names: Those that each thing may have.
    """
    offset_is = "end" if "onset" in present else "start" if "duration" in present else ""
    found = {
        what: next((name for name in each if name in present and (name != "offset" or what == offset_is)), "")
        for what, each in names.items()
    }
    if not found["start"] or found["end"]:
        found["duration"] = ""  # without a start it is that of the file
    return {what: name for what, name in found.items() if name}


def unread_time(present: Sequence[str], used: dict[str, str]) -> str:
    """The name of a column that looks like the start or the end of rows, which no column that is used says; or "".

    Args:
        present: The names of the table's columns.
        used: The columns that are used, by what they say.
    """
    sought = _STARTS | _ENDS if "start" not in used else frozenset() if {"end", "duration"} & {*used} else _ENDS
    for name in present:
        words = {*re.findall("[a-z]+", re.sub("([a-z])([A-Z])", r"\1 \2", name).lower())}
        if name not in used.values() and words & sought and words <= _STARTS | _ENDS | _OTHER_WORDS:
            return name
    return ""
