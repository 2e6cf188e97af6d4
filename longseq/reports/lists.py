"""The lists of numbers along which a report measures."""

from collections.abc import Sequence

from longseq.arguments import ArgumentError


def refuse_wrong_lists(**lists: Sequence[int] | Sequence[float]) -> None:
    """Check lists of lengths or durations, by their names.

    Raises:
        ValueError: If one is empty, or holds a number that is not positive, or one twice.
    """
    for name, values in lists.items():
        if not values:
            raise ArgumentError(name, "must hold one number or more, got []; the defaults are a start")
        if min(values) <= 0:
            raise ArgumentError(name, f"must be positive, got {min(values)}; the defaults are a start")
        if len(set(values)) < len(values):
            raise ArgumentError(name, f"must hold each number once, got {list(values)}; leave out the second one")
