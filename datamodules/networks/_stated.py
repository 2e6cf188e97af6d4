"""What the file of a network states of it, in the words of whoever wrote it."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from datamodules.networks._session import Stated

_WORDS = {
    "rate_hz": ("rate_hz", "sample_rate_hz", "sample_rate", "sampling_rate"),
    "window_seconds": ("window_seconds",),
    "value_range": ("value_range",),
    "mean": ("mean", "image_mean"),
    "std": ("std", "image_std"),
    "class_names": ("class_names", "classes", "labels"),
}


def stated_in(notes: Mapping[str, Any]) -> Stated:
    """What notes state, by the names of the arguments of a network.

    Args:
        notes: Values by their words; a text is read as JSON, such as "48000" or "[0.5, 0.5, 0.5]", where it is JSON.
    """
    stated: Stated = {}
    for name, words in _WORDS.items():
        for word in words:
            if word in notes and name not in stated:
                stated[name] = _value(notes[word])
    return stated


def _value(note: Any) -> Any:
    if isinstance(note, str):
        with suppress(ValueError):
            return json.loads(note)
    return note
