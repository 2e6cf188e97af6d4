"""Draw a model's accuracy at other resolutions, without further training: python docs/resize.py RUN [--root DATA].

The script compares E as longseq.resize carries it (E' B ~ E, where B interpolates the tokens), E itself interpolated, E
cut or filled with zeros, and a new random E; a separable E is only carried. The picture also shows a row of E, and the
table goes to standard output as Markdown.
"""

import math
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from longseq import resize
from longseq.attention.projection import LinearProjection
from longseq.files.checkpoint import read_checkpoint
from longseq.files.description import build
from longseq.reports.plots import markdown, markdown_row
from longseq.training import Classifier

INK, COLOURS = "#1f2933", ("#c2410c", "#0f766e", "#6b7280", "#a8a29e")


def interpolated(E: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Each row as a picture, resized bilinearly, scaled to the number of tokens and shifted so that its sum is kept."""
    shrinks = math.prod(new) < math.prod(old)
    rows = F.interpolate(E.view(1, -1, *old), new, mode="bilinear", antialias=shrinks)[0].flatten(1)
    rows = rows * math.prod(old) / math.prod(new)
    return rows + (E.sum(1, keepdim=True) - rows.sum(1, keepdim=True)) / rows.shape[1]


def cut(E: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """The first columns, and zeros behind them."""
    m = math.prod(new)
    return F.pad(E, (0, max(m - E.shape[1], 0)))[:, :m]


def anew(E: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    m = math.prod(new)
    return torch.randn(len(E), m, generator=torch.Generator().manual_seed(0)) * m**-0.5


WAYS: dict[str, Callable[..., Tensor] | None] = {
    "carried": None, "E interpolated": interpolated, "E cut": cut, "E anew": anew
}  # fmt: skip


@torch.no_grad()
def accuracy(model: Classifier, data: Any) -> float:
    data.setup("test")
    right = [model(inputs).argmax(1) == labels for inputs, labels in data.test_dataloader()]
    return torch.cat(right).float().mean().item()


def grid(model: Classifier) -> tuple[int, int]:
    return model.encoder.trunk.patch_embed.grid_size


def projections(model: torch.nn.Module) -> list[LinearProjection]:
    return [module for module in model.modules() if isinstance(module, LinearProjection)]


@torch.no_grad()
def resized(trained: Classifier, way: Callable[..., Tensor] | None, **change: Any) -> Classifier:
    model = resize(trained, **change).eval()
    if way is not None:
        for old, new in zip(projections(trained), projections(model), strict=True):
            new.weight.copy_(way(old.weight, grid(trained), grid(model)))
    return model


@torch.no_grad()
def row_of_matrix(model: Classifier) -> Tensor:
    project = model.encoder.trunk.blocks[0].attn.project_keys
    return project(torch.eye(model.encoder.num_tokens)[None])[0, 0]


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="runs of digits or of spoken digits")
    parser.add_argument("--root", help="where the data is, if it has moved")
    parser.add_argument("--out", type=Path, default=Path("docs/resize.png"))
    arguments = parser.parse_args()

    figure = Figure(figsize=(12, 3.6 * len(arguments.runs)), layout="constrained")
    axes: Any = figure.subplots(len(arguments.runs), 3, squeeze=False, width_ratios=(1, 1, 2))
    print(markdown(["model", "trained at", "used at", "tokens", *WAYS], []), end="")
    for row, run in zip(axes, arguments.runs, strict=True):
        checkpoint = read_checkpoint(run / "best.ckpt")
        trained, description = Classifier.from_checkpoint(checkpoint).eval(), checkpoint["data"]
        options = description["init_args"]
        if arguments.root is not None and "root" in options:
            options["root"] = arguments.root
        name = type(trained.encoder.attention).__name__
        is_image = "size" in options
        changes = (
            [(f"{s} x {s} pixels", {"shape": (1, s, s)}, {"size": s}) for s in (8, 12, 16, 24, 32)]
            if is_image
            else [(f"hop {hop:g} ms", {"hop_ms": hop}, {}) for hop in (5.0, 7.0, 10.0, 15.0, 20.0)]
        )
        ways = WAYS if projections(trained) else {"carried": None}
        curves: dict[str, list[float]] = {way: [] for way in ways}
        for label, change, of_data in changes:
            data = build({**description, "init_args": {**options, **of_data}}, pl.LightningDataModule)
            for way, function in ways.items():
                curves[way].append(accuracy(resized(trained, function, **change), data))
            at = f"{options['size']} x {options['size']} pixels" if is_image else f"hop {trained.encoder.hop_ms:g} ms"
            tokens = resize(trained, **change).encoder.num_tokens
            values = [f"{curves[way][-1]:.3f}" if way in ways else "" for way in WAYS]
            print(markdown_row([f"{name}, {run.parent.name}", at, label, tokens, *values]), end="", flush=True)
        wider = changes[2][1] if is_image else changes[0][1]
        for panel, model, title in zip(
            row, (trained, resize(trained, **wider)), ("a row of E, trained", "the same row, carried"), strict=False
        ):
            E = row_of_matrix(model)
            if is_image:
                limit = E.abs().max()
                panel.imshow(E.view(grid(model)), cmap="RdBu_r", vmin=-limit, vmax=limit)
                panel.set(xticks=[], yticks=[])
            else:
                panel.plot(E, color=COLOURS[0], linewidth=1)
                panel.set(xlabel="frame")
            panel.set_title(f"{title}: {len(E)} tokens", loc="left", color=INK, fontsize=10)
        for colour, way in zip(COLOURS, ways, strict=False):
            row[2].plot([label for label, *_ in changes], curves[way], "o-", color=colour, label=way)
        row[2].set(ylim=(0, 1.02), ylabel="test accuracy")
        row[2].grid(alpha=0.2)
        row[2].legend(frameon=False, fontsize=9)
        row[2].set_title(f"{name} on {run.parent.name}, never trained at these sizes", loc="left", color=INK)
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
