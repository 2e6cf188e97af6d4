"""Windows of one length that cover a recording."""

import math


def starts_of_windows(length: float, window: float, hop: float, least: float) -> list[float]:
    """The start of each window, in seconds.

    The last window ends with the recording, so its overlap may be larger. A recording that is shorter than a window has
    one window.

    Args:
        length: Seconds of the recording.
        window: Seconds of a window.
        hop: Seconds from the start of one window to the start of the next.
        least: A remainder of this many seconds or less gets no window.
    """
    last = max(length - window, 0.0)
    return [number * hop for number in range(math.ceil((last - least) / hop))] + [last]
