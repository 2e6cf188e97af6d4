"""Check what Linformer's papers say of matrices: python benchmarks/claims.py [--parts lemma ...] [--out FOLDER].

lemma: random projections keep a scalar product to epsilon |x| |y|, and the theorems need epsilon |x y'|.
rank: the rank of the logits of random queries and keys, and of their softmax.
images: the error of shortened attention on the same photographs at 32, 64 and 128 pixels, every pixel a token.

A part takes up to a minute of a core, and writes table.md, table.csv and a picture to a folder of its own.
claims_of_cost.py has the claims of operations and time.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_sample_images
from torch import Tensor

from longseq.attention import TokenGrid
from longseq.reports.plots import COLOURS, Report, machine, panels, styled
from longseq.reports.spectrum import cumulative, ranks

Table = tuple[list[str], list[list[Any]], Figure]


def spread(values: list[float], form: str = ".3g") -> str:
    return f"{mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


@styled
def curves(x: list[int], lines: dict[str, list[float]], **axes: Any) -> Figure:
    figure, (panel,) = panels(1, width=5)
    for (name, values), colour in zip(lines.items(), [*COLOURS[2:], *COLOURS[:2]], strict=False):
        panel.plot(x, values, "o-", color=colour, label=name)
    panel.set_xscale("log", base=2)
    panel.set(**axes)
    panel.legend(fontsize=7)
    return figure


def lemma(lengths: list[int], epsilon: float = 0.5, channels: int = 64, draws: int = 8, rows: int = 128) -> Table:
    """Theorem 1 of Linformer, P' = P R' R with its own k = 5 log n / (epsilon^2 - epsilon^3): the share of pairs within
    epsilon |u| |w|, the share within epsilon |u w'|, which the proof needs, and the error. Then theorem 2, whose bound
    is epsilon |u| |V|: with its own matrices, which make every weight 1 / k, and with zeros in place of attention."""
    table, lines = [], defaultdict(list)
    for n in lengths:
        k = round(5 * math.log(n) / (epsilon**2 - epsilon**3))
        by_column: list[list[float]] = [[] for _ in range(5)]
        for seed in range(draws):
            generator = torch.Generator().manual_seed(seed)
            queries, keys, values = torch.randn(3, n, channels, generator=generator)
            P = (queries[:rows] @ keys.mT * channels**-0.5).softmax(-1)  # some rows of P
            R = torch.randn(k, n, generator=generator) * k**-0.5
            short, product, of_rows = R @ values, P @ values, P.norm(dim=1)
            error = (P @ R.mT @ short - product).abs()
            bound = epsilon * of_rows * torch.linalg.matrix_norm(values, 2)
            shares = (
                error <= epsilon * of_rows[:, None] * values.norm(dim=0),
                error <= epsilon * product.abs(),
                (short.mean(0) - product).norm(dim=1) <= bound,
                product.norm(dim=1) <= bound,
            )
            relative = (error.norm(dim=0) / product.norm(dim=0)).median()
            for column, value in zip(by_column, [relative, *(share.float().mean() for share in shares)], strict=True):
                column.append(float(value))
        relative, kept, needed, by_theorem, by_zeros = map(spread, by_column)
        table.append([n, k, kept, needed, relative, f"{(n / k) ** 0.5:.3g}", by_theorem, by_zeros])
        lines["relative error of P' w, measured"].append(mean(by_column[0]))
        lines["sqrt(n / k)"].append((n / k) ** 0.5)
        lines["epsilon, promised"].append(epsilon)
    header = ["n", "k", "the lemma's bound holds", "the proof's bound holds", "relative error of P' w", "sqrt(n / k)"]
    header += ["theorem 2's bound holds", "theorem 2's bound holds for zeros"]
    title = "Random projections of the theorems' size"
    return header, table, curves(lengths, lines, xlabel="tokens n", ylabel="relative error", yscale="log", title=title)


def rank(n: int = 512, channels: int = 64, draws: int = 8) -> Table:
    """The logits have a rank of at most c; the exponential is no linear map, and raises it."""
    by_name: dict[str, list[Tensor]] = defaultdict(list)
    for seed in range(draws):
        queries, keys = torch.randn(2, 1, n, channels, dtype=torch.float64, generator=torch.manual_seed(seed))
        logits = queries @ keys.mT * channels**-0.5
        by_name["logits"].append(cumulative(logits)[0])
        by_name["softmax"].append(cumulative(logits.softmax(-1))[0])
    table = []
    for name, found in by_name.items():
        needed = [int((curve < 0.9).sum()) + 1 for curve in found]
        table.append([name, spread([int(ranks(c)) for c in found], ".0f"), spread([float(k) for k in needed], ".0f")])
    lines = {name: torch.stack(found).mean(0).tolist() for name, found in by_name.items()}
    labels = {"xlabel": "singular values, the largest first", "ylabel": "share of their sum"}
    figure = curves(list(range(1, n + 1)), lines, **labels, title=f"{n} tokens, {channels} channels")
    return ["matrix", "rank", "singular values that hold 90 %"], table, figure


def photographs(side: int) -> Tensor:
    """30 pieces of 128 x 128 pixels of scikit-learn's two photographs, reduced to side x side, (30, 3, side, side)."""
    whole = torch.from_numpy(np.stack(load_sample_images().images)).permute(0, 3, 1, 2) / 255
    pieces = whole[:, :, :384, :640].unfold(2, 128, 128).unfold(3, 128, 128).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
    return F.interpolate(pieces, (side, side), mode="area")


def queries_keys_values(images: Tensor, seed: int, channels: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Random linear maps of the colours and places of pixels, (b, n, c): attention to what looks alike and is near."""
    side = images.shape[-1]
    axis = (torch.arange(side) + 0.5) / side
    waves = [wave(math.pi * turn * axis) for turn in (1, 2, 4) for wave in (torch.sin, torch.cos)]
    places = torch.stack([*(w[:, None].expand(side, side) for w in waves), *(w.expand(side, side) for w in waves)])
    colours = (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)
    pixels = torch.cat([colours, places.expand(len(images), -1, -1, -1)], 1).flatten(2).mT
    maps = torch.randn(3, pixels.shape[-1], channels, generator=torch.Generator().manual_seed(seed))
    queries, keys, _ = (pixels @ (weights / pixels.shape[-1] ** 0.5) for weights in maps)
    return 4 * queries, keys, colours.flatten(2).mT


def error_of_means(images: Tensor, k: int, seed: int, queried: int = 256) -> float:
    """The relative error of attention to means over k windows of the grid, for some queries of each image."""
    queries, keys, values = queries_keys_values(images, seed)
    n = keys.shape[1]
    side = math.isqrt(n)
    E = TokenGrid((side, side)).window_means(k)
    chosen = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:queried]
    errors = []
    for image in zip(queries[:, chosen], keys, values, strict=True):
        Q, K, V = (part[None] for part in image)
        exact = F.scaled_dot_product_attention(Q, K, V)
        errors.append(float((F.scaled_dot_product_attention(Q, E @ K, E @ V) - exact).norm() / exact.norm()))
    return mean(errors)


def images(sides: list[int], k: int = 64, seeds: int = 4) -> Table:
    """The same k at every size, and k in proportion to n. Enlarged pieces have as many tokens, and nothing new."""
    ratio = sides[0] ** 2 // k
    kinds: dict[str, Callable[[int], tuple[Tensor, int]]] = {
        f"k = {k}": lambda side: (photographs(side), k),
        f"k = n / {ratio}": lambda side: (photographs(side), side**2 // ratio),
        f"k = {k}, {sides[0]} pixels enlarged": lambda side: (F.interpolate(photographs(sides[0]), (side, side)), k),
    }
    table, lines = [], defaultdict(list)
    for name, make in kinds.items():
        for side in sides:
            errors = [error_of_means(*make(side), seed) for seed in range(seeds)]
            table.append([name, f"{side} x {side}", side**2, make(side)[1], spread(errors)])
            lines[name].append(mean(errors))
    labels = {"xlabel": "pixels of a side", "ylabel": "relative error", "title": "The same photographs, larger"}
    return ["", "pixels", "n", "k", "relative error"], table, curves(sides, lines, **labels)


PARTS: dict[str, tuple[str, Callable[[], Table]]] = {
    "lemma": ("e = 0.5, 64 channels, 8 draws", lambda: lemma([128, 512, 2048, 8192, 32768])),
    "rank": ("random queries and keys, 512 tokens, 64 channels, 8 draws", rank),
    "images": (
        "30 pieces of photographs, means over windows, 4 draws of the maps of queries and keys",
        lambda: images([32, 64, 128]),
    ),
}


def main(
    script: str = "claims", about: str | None = __doc__, parts: dict[str, tuple[str, Callable[[], Table]]] = PARTS
) -> None:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=[*parts], default=[*parts])
    parser.add_argument("--out", type=Path, default=Path("claims"))
    options = parser.parse_args()
    for part in options.parts:
        what, measure = parts[part]
        report = Report(options.out / part, f"{what}; {machine()}", [f"benchmarks/{script}.py", "--parts", part])
        header, rows, figure = measure()
        report.end(report.write(header, rows), figure, f"{part}.png")


if __name__ == "__main__":
    main()
