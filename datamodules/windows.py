"""Windows of one length that cover a recording."""

import math

from datamodules.errors import require

Part = tuple[str, float, float | None]  # a path, and the start and end in seconds; None is the end of the file


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


def windows_of(
    path: str, length: float, of_inputs: float, least: float, window: float | None, hop: float | None, any_length: bool
) -> list[Part]:
    """The parts of a file that are separate inputs: the whole file, or windows that cover it.

    There are windows if `window` or `hop` is given, or if the file is longer than an input and the model does not take
    longer ones. All windows have the same length. The last window ends with the file, so its overlap may be larger.

    Args:
        path: The file.
        length: Its length, in seconds.
        of_inputs: Seconds of the longest input.
        least: Seconds of a sample or a token, the shortest window.
        window: Seconds of a window; None for the longest input.
        hop: Seconds from the start of one window to the next; None for the length of the window.
        any_length: Whether the model takes inputs of any length.

    Raises:
        ArgumentError: If window or hop is out of its range.
    """
    longest = math.inf if any_length else of_inputs
    if window is None and hop is None and length <= longest + least:
        return [(path, 0.0, length)]
    window = of_inputs if window is None else window
    hop = window if hop is None else hop
    rule = "positive" if any_length else f"positive and at most {longest:g} s"
    remedy = "10 is usual" if any_length else "clips are no longer"
    require(least <= window <= longest, "window", rule, window, remedy)
    rule = f"positive and at most {window:g} s"
    require(least <= hop <= window, "hop", rule, hop, "or some sound would be skipped")
    starts = starts_of_windows(length, window, hop, least)
    return [(path, start, min(start + window, length)) for start in starts]
