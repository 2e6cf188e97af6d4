"""Where windows of one length lie that cover a recording."""

import math


def starts_of_windows(length: float, window: float, hop: float, least: float) -> list[float]:
    """From when on each window is, in seconds. The last one ends with the recording, and may overlap the one before it
    more; a recording that is shorter than a window has one.

    Args:
        length: Of the recording.
        window: Length of a window.
        hop: From the start of one window to that of the next.
        least: A remainder that is too short for a window of its own.
    """
    last = max(length - window, 0.0)
    return [number * hop for number in range(math.ceil((last - least) / hop))] + [last]
