"""mkdocs runs this for docs/reference.md: ``::: PACKAGE all`` stands for every name that the package exports, and
``::: PACKAGE all CLASS`` for those that derive from the class. Names with a line of their own are left out."""

import importlib
import inspect
import re
from typing import Any

LINE = re.compile(r"^::: ([\w.]+)(?: all(?: ([\w.]+))?)?$", re.MULTILINE)
WITH_MEMBERS = "\n    options: {members: true}"


def expanded(page: str) -> str:
    """The page with all names in the place of such lines."""
    named = {match[1].rpartition(".")[2] for match in LINE.finditer(page) if " all" not in match[0]}

    def lines(match: re.Match[str]) -> str:
        package, base = match[1], match[2]
        if " all" not in match[0]:
            return match[0]
        home = importlib.import_module(package)
        names = [name for name in home.__all__ if name not in named and _is_of(getattr(home, name), base)]
        named.update(names)
        return "\n".join(f"::: {package}.{name}{_options(getattr(home, name))}" for name in names)

    return LINE.sub(lines, page)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return expanded(markdown) if page.file.src_uri == "reference.md" else markdown


def _is_of(value: Any, base: str | None) -> bool:
    if base is None:
        return True
    home, _, name = base.rpartition(".")
    return inspect.isclass(value) and issubclass(value, getattr(importlib.import_module(home), name))


def _options(value: Any) -> str:
    """What others derive from shows what they may write."""
    return WITH_MEMBERS if inspect.isclass(value) and inspect.isabstract(value) else ""
