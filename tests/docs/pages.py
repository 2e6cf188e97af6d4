"""What the README and the pages of the site show: snippets of Python, commands, and flags inside of sentences."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    if path.name != "table.md" and "results/needles" not in str(path)  # written by commands
)

# flags for a short training of a small model
TINY = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2", "--trainer.limit_val_batches", "1",
        "--trainer.limit_test_batches", "1", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar",
        "false"]  # fmt: skip
SMALL_MODEL = ["--model.encoder.dim", "8", "--model.encoder.depth", "1", "--model.encoder.heads", "1"]


@dataclass(frozen=True)
class Block:
    """A block of code on a page; the language is empty for an indented block."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of code of a page, fenced or indented by four spaces."""
    lines = page.read_text().split("\n")
    number = 0
    while number < len(lines):
        fence = re.fullmatch(r"```(\w*)", lines[number])
        is_indented = lines[number].startswith("    ") and (number == 0 or not lines[number - 1].strip())
        if not fence and not is_indented:
            number += 1
            continue
        start = number + 1 if fence else number
        end = start
        while (lines[end] != "```") if fence else lines[end].startswith("    "):
            end += 1
        text = "\n".join(line if fence else line[4:] for line in lines[start:end])
        yield Block(page, start + 1, fence[1] if fence else "", text)
        number = end + 1


def snippets(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def commands(page: Path) -> Iterator[tuple[Block, list[str]]]:
    """The words of each command of a page, without comments; an alias that the page defines is replaced."""
    aliases: dict[str, list[str]] = {}
    for block in blocks(page):
        if block.language or block.text.startswith(("train.py,", "cli ->")):  # the tree of the code, and its layers
            continue
        for line in block.text.replace("\\\n", " ").split("\n"):
            words = shlex.split(line, comments=True)
            if words[:1] == ["alias"]:
                name, _, value = words[1].partition("=")
                aliases[name] = shlex.split(value)
            elif words:
                yield block, [*aliases.get(words[0], words[:1]), *words[1:]]


def flags(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The flags in sentences and tables, `--flag VALUE`, split into words; the first column of a table of
    docs/coming-from holds another program's flags."""
    for line in re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).split("\n"):
        if line.startswith("    "):
            continue
        if page.parent.name == "coming-from" and line.startswith("|"):
            line = "|".join(re.split(r"(?<!\\)\|", line)[2:])
        for code in re.findall(r"`([^`]+)`", line):
            if code.startswith("--"):
                first, *others = re.split(r" ?\\?\| ?", code)  # --flag A | B | C
                yield code, shlex.split(first)
                yield from ((code, [shlex.split(first)[0], *shlex.split(other)]) for other in others)


FIGURE = re.compile(r"(?<![\w.,])0\.[1-9]\d{1,2}(?!\d)(?: \(0\.\d+ to [01]\.\d+)?")  # an accuracy, with its range
CITED = re.compile(r"\bresults/([\w./-]+\.md)(?:#([\w-]+))?")


def plain(text: str) -> str:
    """Text as one line, without code, emphasis and the addresses of links."""
    return " ".join(re.sub(r"`[^`]*`|\*|\]\([^)]*\)|\[", " ", text).split())


def section(page: str, anchor: str) -> str:
    """A section of a page of docs/results up to the next heading, or without an anchor the whole page."""
    text = (ROOT / "docs/results" / page).read_text()
    for part in re.split(r"^#+ ", text, flags=re.MULTILINE) if anchor else ():
        if re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", part.partition("\n")[0]).lower()) == anchor:
            return part
    if anchor:
        raise LookupError(f"docs/results/{page} has no section #{anchor}")
    return text


def unfounded(text: str, cites: str = "") -> list[str]:
    """The accuracies of a text, with their ranges, that stand in none of the sections of docs/results which the text or
    `cites` names."""
    found = plain(" ".join(section(*cited) for cited in CITED.findall(cites + text)))
    figures = [figure[0] for figure in FIGURE.finditer(plain(text))]
    return [figure for figure in figures if not re.search(rf"(?<![\w.]){re.escape(figure)}(?!\d)", found)]
