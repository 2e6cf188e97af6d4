"""Draw the first picture of the site from two runs: python docs/picture.py runs/digits/0 runs/vowels/0.

Each run gets one row: an input as the model reads it, the first layer's learned E, and the run's validation accuracy.
The script needs the run's data where the checkpoint says that it was, or in another folder with ``--root DIR``.
"""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch.utils._pytree import tree_map

from longseq.encoders import SpectrogramEncoder
from longseq.files.checkpoint import read_checkpoint
from longseq.files.description import build
from longseq.training import Classifier
from longseq.training.board.curves import read_curves

INK, ACCENT = "#1f2933", "#c2410c"
CLASS = 3


def draw_input(axes: Axes, model: Classifier, inputs: Any, label: str) -> None:
    """Draw the picture that the encoder makes of a batch of one input; every cell is a part of one token."""
    picture = model.encoder.front_end(inputs)[0, 0]
    if isinstance(model.encoder, SpectrogramEncoder):
        seconds = len(picture) * model.encoder.hop_ms / 1000
        axes.imshow(picture.T, origin="lower", aspect="auto", cmap="magma", extent=(0, seconds, 0, picture.shape[1]))
        axes.set(xlabel="time (s): a token every frame", ylabel="mel band")
    else:
        axes.imshow(picture, cmap="gray", aspect="equal")
        axes.set(xlabel="every pixel is a token", xticks=[], yticks=[])
    axes.set_title(f"{label!r}: {model.encoder.num_tokens} tokens", loc="left")


def draw_projection(axes: Axes, model: Classifier) -> None:
    """The learned matrix E of the first layer."""
    matrix = model.encoder.trunk.blocks[0].attn.project_keys.weight.detach()
    limit = matrix.abs().max()
    axes.imshow(matrix, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    axes.set(xlabel=f"{matrix.shape[1]} tokens", ylabel=f"{matrix.shape[0]} summaries")
    axes.set_title("learned E of the first layer", loc="left")


def draw_accuracy(axes: Axes, run: Path, mechanism: str) -> None:
    """Validation accuracy over the steps of training."""
    curves = read_curves(run)
    axes.plot(*zip(*curves["val/accuracy"], strict=True), color=ACCENT, linewidth=2)
    _, test = curves["test/accuracy"][-1]
    axes.set(xlabel="step", ylabel="validation accuracy", ylim=(0, 1.02))
    axes.grid(alpha=0.2)
    axes.set_title(f"{mechanism}: test accuracy {test:.3f}", loc="left")


def main() -> None:
    parser = ArgumentParser(description="Draw the first picture of the site from two runs.")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--root", help="where the data is, if it has moved")
    parser.add_argument("--out", type=Path, default=Path("docs/picture.png"))
    arguments = parser.parse_args()

    figure = Figure(figsize=(12, 3.4 * len(arguments.runs)), layout="constrained")
    grid: Any = figure.subplots(len(arguments.runs), 3, squeeze=False, width_ratios=(1, 1.3, 1.3))
    for row, run in zip(grid, arguments.runs, strict=True):
        checkpoint = read_checkpoint(run / "best.ckpt")
        model, description = Classifier.from_checkpoint(checkpoint).eval(), checkpoint["data"]
        if arguments.root is not None and "root" in description["init_args"]:
            description["init_args"]["root"] = arguments.root
        data = build(description, pl.LightningDataModule)
        data.prepare_data()
        data.setup("test")
        inputs, labels = next(batch for batch in data.test_dataloader() if CLASS in batch[1])
        place = int((labels == CLASS).nonzero()[0])
        one = tree_map(lambda part, at=place: part[at : at + 1], inputs)
        draw_input(row[0], model, one, model.class_names[CLASS])
        draw_projection(row[1], model)
        draw_accuracy(row[2], run, type(model.encoder.attention).__name__)
        for axes in row:
            axes.title.set_color(INK)
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
