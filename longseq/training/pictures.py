"""Pictures of inputs and of confusions."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from longseq.encoders import SpectrogramEncoder
from longseq.training.classifier import Classifier


@torch.no_grad()
def draw_inputs(model: Classifier, inputs: Any, labels: Tensor) -> Figure:
    """Draw a batch as the model sees it, under the names of the classes; in training mode mixed and masked.

    Args:
        model: Whose encoder has measured its inputs.
        inputs: As the data module yields them, on the model's device.
        labels: Of each input.
    """
    encoder = model.encoder
    targets = labels
    if model.training and model.mix is not None:
        inputs, targets = model.mix(inputs, model.task.targets(labels, model.num_classes).to(model.device))
    names = [model.task.names(target, model.class_names) for target in targets]
    pictures, rows = encoder.picture(inputs), encoder.rows(inputs)
    if model.training:
        pictures = encoder.augment((pictures - encoder.mean) / encoder.std) * encoder.std + encoder.mean
    pictures = pictures.float().cpu()
    if not isinstance(encoder, SpectrogramEncoder):
        return draw_images(pictures, names)
    frames = [pictures.shape[2]] * len(names) if rows is None else rows.tolist()
    spectrograms = [picture[0, :count].T for picture, count in zip(pictures, frames, strict=True)]
    return draw_spectrograms(spectrograms, names, encoder)


def draw_confusions(matrix: Int[Tensor, "classes classes"], class_names: Sequence[str]) -> Figure:
    """Draw how often each true class (row) is taken for each class (column): the counts, coloured by share of the row.

    Colours grow with the square root of the share, so that one error in a hundred is seen.
    """
    num_classes = len(class_names)
    shares = matrix / matrix.sum(1, keepdim=True).clamp(min=1)
    side = min(3 + 0.35 * num_classes, 10)
    figure = Figure((side + 1, side), dpi=120, layout="constrained")
    axes = figure.add_subplot(
        xlabel="predicted class",
        ylabel="true class",
        title=f"{int(matrix.trace())} of {int(matrix.sum())} right ({matrix.trace() / matrix.sum():.1%})",
    )
    image = axes.imshow(shares.numpy(), cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    figure.colorbar(image, label="share of the true class", shrink=0.8)
    if num_classes <= 50:
        upright = max(map(len, class_names)) <= 3
        axes.set_xticks(range(num_classes), class_names, rotation=0 if upright else 90, parse_math=False)
        axes.set_yticks(range(num_classes), class_names, parse_math=False)
    if num_classes <= 20:
        for row, column in matrix.nonzero().tolist():
            colour = "white" if shares[row, column] > 0.4 else "black"
            axes.text(column, row, str(int(matrix[row, column])), ha="center", va="center", color=colour, fontsize=8)
    return figure


def draw_images(pictures: Float[Tensor, "b channels height width"], names: Sequence[str]) -> Figure:
    """Draw images (0..255) as they are, in grey unless they have three channels, under their names."""
    figure, grid = _grid(len(names), cell=(1.7, 1.9))
    for axes, picture, name in zip(grid, pictures / 255, names, strict=True):
        pixels = picture.permute(1, 2, 0) if len(picture) == 3 else picture[0]
        axes.imshow(pixels.clamp(0, 1).numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(name, parse_math=False)
        axes.set_axis_off()
    return figure


def draw_spectrograms(
    pictures: Sequence[Float[Tensor, "mels frames"]], names: Sequence[str], encoder: SpectrogramEncoder
) -> Figure:
    """Draw log-mel spectrograms as long as their clips, 60 dB down from their loudest points, in seconds and hertz."""
    figure, grid = _grid(len(names), cell=(2.6, 2.2))
    mels = encoder.num_mels
    hertz = [hz for hz in (250, 500, 1000, 2000, 4000, 8000, 16000) if hz < encoder.sample_rate_hz / 2]
    for axes, picture, name in zip(grid, pictures, names, strict=True):
        loudest = float(picture.max())
        axes.imshow(
            picture.numpy(), cmap="magma", vmin=loudest - 6 * math.log(10), vmax=loudest,
            origin="lower", aspect="auto", interpolation="nearest",
            extent=(0, picture.shape[1] * encoder.hop_ms / 1000, 0, mels),
        )  # fmt: skip
        axes.set_yticks([mel_row(hz, mels, encoder.sample_rate_hz) for hz in hertz], map(str, hertz))
        axes.set_title(name, parse_math=False)
        axes.set_xlabel("seconds")
        axes.set_ylabel("hertz")
        axes.label_outer()
    return figure


def mel_row(hertz: int, num_mels: int, sample_rate_hz: int) -> float:
    """Where a frequency lies in a mel spectrogram whose band i reaches from i to i + 1: HTK's scale, log(1 + f/700)."""
    return (num_mels + 1) * math.log1p(hertz / 700) / math.log1p(sample_rate_hz / 2 / 700) - 0.5


def _grid(count: int, cell: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    columns = min(count, 4)
    rows = math.ceil(count / columns)
    figure = Figure((cell[0] * columns, cell[1] * rows), dpi=120, layout="constrained")
    return figure, [figure.add_subplot(rows, columns, number + 1) for number in range(count)]
