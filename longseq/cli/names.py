"""Names of files and classes may hold any bytes: here they become text that keeps to its line and its terminal."""

import re

_NAMED = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
# control characters, ESC among them; ends of lines; what turns the direction of writing; bytes that are no UTF-8
_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str) -> str:
    """A line for people: what would end it, or steer the terminal, is written as an escape. All else stays."""
    return _UNSHOWN.sub(lambda found: _escape(found[0]), text)


def escaped(name: str) -> str:
    r"""A name in a row for programs: as `shown`, and a backslash is doubled, so that the name can be had back.

    \n, \r, \t and \\ are what they always are, \xNN is a byte (of a name that is not UTF-8 too) and \uNNNN a character:
    printf's %b in bash undoes it.
    """
    return shown(name.replace("\\", r"\\"))


def _escape(character: str) -> str:
    code = ord(character)
    is_byte = code < 0x80 or 0xDC80 <= code <= 0xDCFF  # the latter as Python reads a name that is not UTF-8
    return _NAMED.get(character) or (f"\\x{code & 0xFF:02x}" if is_byte else f"\\u{code:04x}")
