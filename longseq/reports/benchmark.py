"""Time and memory against n and k: the layout of Linformer's efficiency tables (arXiv:2006.04768, table 3)."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import psutil
import torch

from longseq.arguments import ArgumentError
from longseq.reports._checks import Device, require_device, require_positive
from longseq.reports.cell import MECHANISMS, WITH_K, Cell, Result, benchmark_cell_apart
from longseq.reports.plots import COLOURS, Report, colour_of, machine, markdown, panels, styled, write_csv

_BASELINES = ("softmax-written", "softmax")
_HEADER = ["mechanism", "n", "k", "seconds", "spread", "peak MiB", "predicted", "largest batch"]
_SHARE = 0.7  # of the free memory: a cell that is expected to take more is predicted


@dataclass(frozen=True)
class Measured:
    """A cell and its figures; is_predicted says that they are extrapolated from shorter lengths, not measured. The
    largest batch is known only for cells that were measured on a GPU."""

    cell: Cell
    seconds: float
    spread: float
    peak_bytes: float
    is_predicted: bool
    largest_batch: int | None = None


def benchmark(
    n: list[int] = [512, 1024, 2048, 4096],  # noqa: B006  (jsonargparse shows it)
    k: list[int] = [128, 256],  # noqa: B006
    mechanisms: list[str] = [*MECHANISMS],  # noqa: B006
    dim: int = 256,
    depth: int = 2,
    heads: int = 4,
    batch: int = 1,
    direction: Literal["forward", "train"] = "train",
    device: Device = "cpu",
    precision: Literal["32", "bf16"] = "32",
    repeats: int = 5,
    seconds_per_step: float = 60.0,
    largest_batch: bool = True,
    out: str = "benchmark",
) -> None:
    """Measure time and memory of attention mechanisms against sequence length, and write a table, a CSV and a figure.

    Each cell is measured in a process of its own. A cell that would not fit into the free memory, or whose step would
    take too long, is not tried: its figures are predicted from the shorter lengths of the same column, and marked.

    Args:
        n: Sequence lengths.
        k: Projected lengths, for the mechanisms that take k.
        mechanisms: Mechanisms to measure; the two softmax ones are the baselines.
        dim: Width of a token.
        depth: Blocks of the stack.
        heads: Attention heads.
        batch: Sequences at once.
        direction: The forward pass alone, or the forward and backward pass of a training step.
        device: Where to measure.
        precision: float32, or bfloat16 by autocast.
        repeats: Timed steps of each cell; their median counts.
        seconds_per_step: Seconds of the longest step to measure; longer steps are predicted.
        largest_batch: Whether to search, on a GPU, for the largest batch that fits; this takes most of the time there.
        out: Folder for table.md, benchmark.png, and table.csv, which is written after each cell.

    Raises:
        ValueError: If a mechanism is unknown, a number is not positive, a list is empty or holds a number twice, or
            there is no such device.
    """
    unknown = set(mechanisms) - set(MECHANISMS)
    if unknown:
        raise ArgumentError(
            "mechanisms", f"must be some of {', '.join(MECHANISMS)}, got {min(unknown)}; check the spelling"
        )
    require_positive(n=n, k=k, dim=dim, depth=depth, heads=heads, batch=batch, repeats=repeats)
    if dim % heads:
        raise ArgumentError("heads", f"must divide dim, but {heads} does not divide {dim}; change one of them")
    require_device(device)
    floats = "float32" if precision == "32" else precision
    what = f"{direction}, batch {batch}, width {dim}, {depth} blocks of {heads} heads, {floats}"
    report = Report(out, f"{what}; {machine(device)}")
    columns = [(name, size) for name in mechanisms for size in (k if name in WITH_K else [None])]
    plain = Cell("", 0, None, batch, dim, depth, heads, direction, device, precision, repeats, largest_batch)
    cells: list[Measured] = []
    for length in sorted(n):
        for name, projected in columns:
            if projected is not None and projected > length:
                continue
            shorter = [row for row in cells if (row.cell.mechanism, row.cell.k) == (name, projected)]
            row = _measure_or_predict(replace(plain, mechanism=name, n=length, k=projected), shorter, seconds_per_step)
            if row is not None:
                cells.append(row)
                print(_line(row), flush=True)
                write_csv(report.folder / "table.csv", _HEADER, _rows(cells))
    text = "".join(part(cells, columns) for part in (_tables, _largest_batches, _fits, _crossovers))
    report.end(report.write(_HEADER, _rows(cells), text), _draw(cells, columns, what), "benchmark.png")


def _rows(cells: Sequence[Measured]) -> list[list[Any]]:
    return [
        [m.cell.mechanism, m.cell.n, m.cell.k or "", *(f"{x:.6g}" for x in (m.seconds, m.spread, m.peak_bytes / 2**20)),
         int(m.is_predicted), m.largest_batch or ""]
        for m in cells
    ]  # fmt: skip


def _measure_or_predict(cell: Cell, shorter: Sequence[Measured], most_seconds: float) -> Measured | None:
    seconds, peak = (_extrapolated(shorter, figure, cell.n) for figure in ("seconds", "peak_bytes"))
    if seconds is None or peak is None or (seconds < most_seconds and peak < _SHARE * _free_bytes(cell.device)):
        result: Result | None = benchmark_cell_apart(cell)
        if result is not None:
            spread = max(result.seconds) - min(result.seconds)
            return Measured(cell, result.median, spread, float(result.peak_bytes), False, result.largest_batch)
    if seconds is None or peak is None:
        return None  # it did not fit, and too few shorter lengths were measured to predict it
    return Measured(cell, seconds, 0.0, peak, is_predicted=True)


def _extrapolated(rows: Sequence[Measured], figure: str, n: int) -> float | None:
    """A figure at length n, by a power law through the two longest measured lengths; None if there are fewer."""
    measured = [row for row in rows if not row.is_predicted][-2:]
    if len(measured) < 2:
        return None
    (a, b), (x, y) = measured, (measured[0].cell.n, measured[1].cell.n)
    power = math.log(max(getattr(b, figure), 1e-9) / max(getattr(a, figure), 1e-9)) / math.log(y / x)
    return float(getattr(b, figure) * (n / y) ** power)


def _free_bytes(device: str) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available


def _column(cells: Sequence[Measured], name: str, k: int | None) -> dict[int, Measured]:
    return {row.cell.n: row for row in cells if (row.cell.mechanism, row.cell.k) == (name, k)}


def _title(name: str, k: int | None) -> str:
    return name if k is None else f"{name} k={k}"


def _tables(cells: Sequence[Measured], columns: Sequence[tuple[str, int | None]]) -> str:
    """Time and memory of the baselines, and the factors by which the other mechanisms take less."""
    text = ""
    lengths = sorted({row.cell.n for row in cells})
    ours = [column for column in columns if column[0] not in _BASELINES]
    for title, figure, scale, unit in (("Time", "seconds", 1e3, "ms"), ("Memory", "peak_bytes", 2**-20, "MiB")):
        for baseline in (name for name in _BASELINES if (name, None) in columns):
            rows = []
            base = _column(cells, baseline, None)
            for n in lengths:
                if n not in base:
                    continue
                row = [str(n), _marked(getattr(base[n], figure) * scale, base[n])]
                for name, k in ours:
                    cell = _column(cells, name, k).get(n)
                    if cell is None:
                        row.append("")
                    else:
                        saved = getattr(base[n], figure) / max(getattr(cell, figure), 1e-9)
                        row.append(f"{saved:.1f}x" + "*" * (cell.is_predicted or base[n].is_predicted))
                rows.append(row)
            header = ["n", f"{baseline}, {unit}", *(_title(*column) for column in ours)]
            text += f"{title} saved against {baseline}\n\n{markdown(header, rows)}\n"
    return text + "\\* predicted from shorter lengths, not measured\n\n"


def _largest_batches(cells: Sequence[Measured], columns: Sequence[tuple[str, int | None]]) -> str:
    """The paper's measure of memory: how many sequences fit at once, on a GPU."""
    by_column = [_column(cells, *column) for column in columns]
    lengths = sorted({row.cell.n for row in cells if row.largest_batch is not None})
    rows = [
        [str(n), *(str(column[n].largest_batch or "") if n in column else "" for column in by_column)] for n in lengths
    ]
    if not rows:
        return ""
    header = ["n", *(_title(*column) for column in columns)]
    return f"Largest batch that fits, to within an eighth\n\n{markdown(header, rows)}\n"


def _marked(value: float, row: Measured) -> str:
    return f"{value:.3g}" + "*" * row.is_predicted


def _fits(cells: Sequence[Measured], columns: Sequence[tuple[str, int | None]]) -> str:
    """The exponents p of time and memory ~ n^p, fitted to the longer half of the lengths that were measured."""
    rows = []
    for name, k in columns:
        measured = [row for row in _column(cells, name, k).values() if not row.is_predicted]
        longer = measured[len(measured) // 2 - (len(measured) == 2) :]
        if len(longer) < 2:
            continue
        n = np.log([row.cell.n for row in longer])
        time, memory = (
            np.polyfit(n, np.log([max(getattr(row, figure), 1e-9) for row in longer]), 1)[0]
            for figure in ("seconds", "peak_bytes")
        )
        rows.append([_title(name, k), f"{longer[0].cell.n}..{longer[-1].cell.n}", f"{time:.2f}", f"{memory:.2f}"])
    return "Growth with n\n\n" + markdown(["", "fitted on n", "time ~ n^", "memory ~ n^"], rows) + "\n"


def _crossovers(cells: Sequence[Measured], columns: Sequence[tuple[str, int | None]]) -> str:
    """The length from which a mechanism takes less time than a baseline, interpolated; starred beside a prediction."""
    rows = []
    for name, k in columns:
        if name in _BASELINES:
            continue
        row = [_title(name, k)]
        for baseline in _BASELINES:
            base, ours = _column(cells, baseline, None), _column(cells, name, k)
            lengths = sorted(set(base) & set(ours))
            row.append(
                _crossover(
                    [(n, math.log(base[n].seconds / ours[n].seconds)) for n in lengths],
                    {n for n in lengths if base[n].is_predicted or ours[n].is_predicted},
                )
            )
        rows.append(row)
    return "Faster from n = \n\n" + markdown(["", *(f"than {baseline}" for baseline in _BASELINES)], rows)


def _crossover(gains: Sequence[tuple[int, float]], predicted: Collection[int] = ()) -> str:
    """The length from which log(baseline / ours) stays positive."""
    if not gains:
        return ""
    if gains[-1][1] <= 0:
        return f"beyond {gains[-1][0]}" + "*" * (gains[-1][0] in predicted)
    for (n, gain), (m, later) in reversed(list(pairwise(gains))):
        if gain <= 0 < later:
            crossing = math.exp(math.log(n) - gain * math.log(m / n) / (later - gain))
            return f"{crossing:.0f}" + "*" * (m in predicted)
    return f"{gains[0][0]} or less"


@styled
def _draw(cells: Sequence[Measured], columns: Sequence[tuple[str, int | None]], what: str) -> Any:
    figure, (times, memories) = panels(2)
    titles = [_title(*column) for column in columns]
    for axes, name, scale, title in (
        (times, "seconds", 1e3, "Milliseconds of a step"),
        (memories, "peak_bytes", 2**-20, "MiB at its peak"),
    ):
        for column in columns:
            rows = list(_column(cells, *column).values())
            if not rows:
                continue
            colour = colour_of(_title(*column), titles)
            marker = "os^"[titles.index(_title(*column)) // len(COLOURS) % 3]
            n, values = [row.cell.n for row in rows], [getattr(row, name) * scale for row in rows]
            measured = sum(not row.is_predicted for row in rows)
            axes.plot(n[:measured], values[:measured], f"{marker}-", color=colour, label=_title(*column))
            axes.plot(n[max(measured - 1, 0) :], values[max(measured - 1, 0) :], ":", color=colour)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens n")
        axes.set_title(title)
    figure.legend(*times.get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    figure.suptitle(what + "; dotted: predicted", fontsize=8)
    return figure


def _line(row: Measured) -> str:
    how = "predicted" if row.is_predicted else f"spread {1e3 * row.spread:.1f} ms"
    title = _title(row.cell.mechanism, row.cell.k)
    return f"n {row.cell.n:>6}  {title:<20} {1e3 * row.seconds:9.1f} ms ({how})  {row.peak_bytes / 2**20:8.0f} MiB"
