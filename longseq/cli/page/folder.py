"""The folder of a page: index.html, which holds its data, its style and its script, with pictures and sounds beside it.

Files of the folder:
    index.html      The page.
    files/          A picture of each input, and copies of its sounds.
    decisions.json  What a person decided, written by review.
    labels.csv      The table for fit, written by review.
"""

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from longseq.arguments import ArgumentError
from longseq.files.storage import write_text

INDEX, FILES, DECISIONS, TABLE = "index.html", "files", "decisions.json", "labels.csv"
_MARK = '<meta name="generator" content="longseq predict --page">'
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
_OWN = {INDEX, FILES, DECISIONS, TABLE}
_REMEDY = "give the folder that longseq predict --page has written"


def read_page(folder: Path, argument: str, remedy: str = _REMEDY) -> dict[str, Any]:
    """The data of a page.

    Raises:
        ArgumentError: If the folder has no page; the message names the argument and ends with the remedy.
    """
    try:
        text = (folder / INDEX).read_text()
    except (OSError, UnicodeDecodeError):
        text = ""
    found = _DATA.search(text) if _MARK in text else None
    try:
        data = json.loads(found[1]) if found else {}
    except (ValueError, RecursionError):
        data = {}
    if not isinstance(data, dict) or not {"classes", "files", "items"} <= data.keys():
        raise ArgumentError(argument, f"{folder} has no page that longseq made; {remedy}")
    return data


def page_before(folder: Path, argument: str) -> dict[str, Any] | None:
    """The data of the page that is replaced; None if the folder is empty or missing.

    Raises:
        ArgumentError: If the folder holds files of other programs.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    others = sorted(path.name for path in folder.iterdir() if path.name not in _OWN) if folder.is_dir() else [""]
    if others and not (folder / INDEX).exists():
        raise ArgumentError(argument, f"{folder} holds what longseq has not written, such as {others[0]}; give another")
    return read_page(folder, argument, "give another folder")


def decisions_in(folder: Path, classes: list[str], argument: str) -> dict[str, dict[str, Any]]:
    """What a person decided, by the key of the item; empty if review has written nothing.

    Raises:
        ArgumentError: If the file is damaged, or a class is none of the model's.
    """
    path = folder / DECISIONS
    try:
        return checked(json.loads(path.read_text()), classes, argument, str(path))
    except FileNotFoundError:
        return {}
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ArgumentError(argument, f"{path} is damaged; move it out of the folder") from error


def checked(decisions: Any, classes: list[str], argument: str, where: str) -> dict[str, dict[str, Any]]:
    """Return decisions if they are well-formed.

    Raises:
        ArgumentError: If they are not, or a class is none of the model's.
    """
    if not isinstance(decisions, dict):
        raise ArgumentError(argument, f"{where} holds no decisions; move it out of the folder")
    for decision in decisions.values():
        label = decision.get("label") if isinstance(decision, dict) else 0
        if not isinstance(label, list | None):
            raise ArgumentError(argument, f"{where} holds no decisions; move it out of the folder")
        for name in label or []:
            if name not in classes:
                what = f"{where} has decisions of the class {name!r}, which the model does not have"
                raise ArgumentError(argument, f"{what}; give another folder")
    return decisions


def write_index(folder: Path, title: str, data: dict[str, Any]) -> None:
    """Write index.html. Names inside the data stay text: no < of them reaches the parser of HTML."""
    part = files("longseq.cli.page")
    template, style, script = (part.joinpath(f"page.{kind}").read_text() for kind in ("html", "css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    content = {
        "MARK": _MARK,
        "DIGEST": digest,
        "TITLE": html.escape(title).encode("ascii", "xmlcharrefreplace").decode(),  # a name may be no UTF-8
        "STYLE": style,
        "DATA": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "SCRIPT": script,
    }
    text = re.sub(r"@(MARK|DIGEST|TITLE|STYLE|DATA|SCRIPT)@", lambda match: content[match[1]], template)
    write_text(folder / INDEX, text)
