"""Errors in data or in arguments. Each message is one line."""

import sys

from pytorch_lightning.utilities import rank_zero_only


class DataError(Exception):
    """Data is missing or broken. The message is one line: "<path or key>: <what>; <remedy>"."""

    exit_code = 3


class ArgumentError(ValueError):
    """An argument of a constructor or a function has a value that cannot be used.

    longseq has the same class. Neither package imports the other: the command line knows both by their fields.

    Args:
        argument: The name of the argument.
        what: "must ..., got ...; <remedy>".
    """

    def __init__(self, argument: str, what: str = "") -> None:
        super().__init__(argument, what)
        self.argument, self.what = argument, what

    def __str__(self) -> str:
        return f"{self.argument} {self.what}".rstrip()


def require(holds: bool, name: str, rule: str, value: object, remedy: str) -> None:
    """Check one constructor argument.

    Raises:
        ArgumentError: Unless `holds`.
    """
    if not holds:
        raise ArgumentError(name, f"must be {rule}, got {value!r}; {remedy}")


def require_in(name: str, value: float, least: float, most: float, remedy: str) -> None:
    """Check that a constructor argument is in least..most, bounds included.

    Raises:
        ArgumentError: If it is not.
    """
    require(least <= value <= most, name, f"in {least}..{most}", value, remedy)


def counted(number: int, noun: str) -> str:
    """The number with its noun: 1 file, 2 files."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(text: str) -> str:
    """A text whose unprintable characters are escaped."""
    return "".join(part if part.isprintable() else ascii(part)[1:-1] for part in text)


@rank_zero_only
def say(text: str) -> None:
    """Print a line for the user on standard error, from rank zero only; unprintable characters are escaped."""
    print(printable(text), file=sys.stderr)
