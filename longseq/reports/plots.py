"""The style of all figures, and writing a report's table as Markdown, CSV and PNG."""

import csv
import platform
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from longseq.files.storage import refuse_foreign, replacing, write_text

# Okabe and Ito's colours, which colour-blind readers can tell apart too.
COLOURS = ["#000000", "#999999", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
_STYLE: Any = {
    "figure.dpi": 150,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
}

_MARK = "drawn by longseq"
styled = rc_context(_STYLE)  # a decorator for the functions that draw


def can_be_drawn(path: str) -> bool:
    """Whether the suffix of a file is .png, .pdf or .svg, which matplotlib writes without other programs."""
    return Path(path).suffix.lower() in (".png", ".pdf", ".svg")


def refuse_foreign_picture(path: Path, argument: str) -> None:
    """Check that a path holds no picture that longseq did not draw.

    Raises:
        ValueError: If it does; the message names the argument.
    """
    refuse_foreign(path, argument, _MARK.encode())


def save(figure: Figure, path: Path, **options: Any) -> None:
    """Write a picture with longseq's mark; a .png, .pdf or .svg."""
    mark = {"Software" if path.suffix.lower() == ".png" else "Creator": _MARK}
    with replacing(path) as part:
        figure.savefig(part, metadata=mark, **options)


def panels(columns: int, rows: int = 1, width: float = 4.2, height: float = 3.2) -> tuple[Figure, list[Axes]]:
    """A figure and its panels, in reading order."""
    figure = Figure((width * columns, height * rows))
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def colour_of(name: str, names: Sequence[str]) -> str:
    """The same colour for the same name in every panel."""
    return COLOURS[list(names).index(name) % len(COLOURS)]


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown; numbers are written as they are given."""
    return "".join([markdown_row(header), "|" + "---|" * len(header) + "\n", *map(markdown_row, rows)])


def markdown_row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |\n"


class Report:
    """A folder with table.csv and table.md of a measurement, and a figure of it at the end. The folder is made.

    Args:
        out: The folder.
        about: What is measured, and on which machine: the paragraph above the table.
        command: The command line after ``python``, for the first line of table.md; if empty, there is no such line.
    """

    def __init__(self, out: str | Path, about: str, command: Sequence[str] = ()) -> None:
        self.folder = Path(out)
        self.folder.mkdir(parents=True, exist_ok=True)
        first = f"    python {shlex.join(command)}" if command else ""
        self.above = "".join(f"{part}\n\n" for part in (first, about) if part)

    def write(self, header: Sequence[str], rows: Sequence[Sequence[Any]], text: str | None = None) -> str:
        """Write the rows so far, and return the content of table.md: the table, or ``text`` instead of it."""
        write_csv(self.folder / "table.csv", header, rows)
        whole = self.above + (markdown(header, rows) if text is None else text)
        write_text(self.folder / "table.md", whole)
        return whole

    def end(self, whole: str, figure: Figure, *names: str) -> None:
        """Save the figure under the first name, and print what ``write`` returned and the names of all files."""
        figure.savefig(self.folder / names[0])
        print(f"\n{whole}\n{self.folder}/" + ", ".join(["table.md", "table.csv", *names]))


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Write a table. A process that reads it meanwhile finds the whole old table or the whole new one."""
    with replacing(path) as part, open(part, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(header)
        table.writerows(rows)


def machine(device: str = "cpu") -> str:
    """What a figure was measured on: hardware and versions.

    Args:
        device: A device, or an accelerator as Lightning names it: ``auto`` is a GPU where there is one.
    """
    if device != "cpu" and torch.cuda.is_available():
        hardware = torch.cuda.get_device_name()
    else:
        cpu = Path("/proc/cpuinfo")
        lines = cpu.read_text().splitlines() if cpu.is_file() else []
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
        num_threads = torch.get_num_threads()
        hardware = f"{model}, {num_threads} {'thread' if num_threads == 1 else 'threads'}"
    return f"{hardware}; Python {platform.python_version()}, torch {version('torch')}, timm {version('timm')}"
