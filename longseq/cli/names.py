"""Make names of files and classes, which may hold any bytes, safe to print on one line."""

import re

_NAMED = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
# control characters, including ESC; line ends; characters that change the writing direction; bytes that are not UTF-8
_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str) -> str:
    """Escape the characters that would end a line or control the terminal, for people to read."""
    return _UNSHOWN.sub(lambda match: _escape(match[0]), text)


def escaped(name: str) -> str:
    r"""Escape a name for programs to read: like `shown`, with backslashes doubled, so that it can be decoded.

    \n, \r, \t and \\ have their usual meaning, \xNN is a byte (also one that is not UTF-8), and \uNNNN is a character.
    printf's %b in bash decodes the name.
    """
    return shown(name.replace("\\", r"\\"))


def _escape(character: str) -> str:
    code = ord(character)
    is_byte = code < 0x80 or 0xDC80 <= code <= 0xDCFF  # the range in which Python puts bytes that are not UTF-8
    return _NAMED.get(character) or (f"\\x{code & 0xFF:02x}" if is_byte else f"\\u{code:04x}")
