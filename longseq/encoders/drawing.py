"""Pictures of what an encoder sees, legible in the 360 points of width that TensorBoard gives them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

WIDTH = 3.6  # inches
small: Any = rc_context(
    {
        "figure.dpi": 200,  # sharp where a screen has two points for one
        "figure.facecolor": "white",  # also on a dark page
        "font.size": 7,
        "axes.titlesize": 7,
        "axes.labelsize": 6.5,
        "axes.titlepad": 3,
        "axes.labelpad": 1,
        "xtick.labelsize": 6,
        "ytick.labelsize": 6,
    }
)  # a decorator for the functions that draw


@small
def draw_images(
    pictures: Sequence[Float[Tensor, "channels height width"]],
    names: Sequence[str],
    limits: tuple[float, float] | None = (0, 255),
) -> Figure:
    """Draw images as they are, in grey unless they have three channels, under their names.

    Args:
        pictures: The images.
        names: Of each.
        limits: The numbers that are black and white; None for the lowest and the highest of each image.
    """
    figure, grid = panels(len(names), 4, 1.1)
    for axes, picture, name in zip(grid, pictures, names, strict=True):
        axes.imshow(pixels_of(picture, limits).numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(name, parse_math=False)
        axes.set(xticks=[], yticks=[])
        axes.set_axis_off()
    return figure


def pixels_of(
    picture: Float[Tensor, "channels height width"], limits: tuple[float, float] | None
) -> Float[Tensor, "rows columns *rgb"]:
    """A picture as numbers from 0 (black) to 1 (white): in colour if it has three channels, else its first one."""
    low, high = (float(end) for end in (picture.aminmax() if limits is None else limits))
    shown = picture.permute(1, 2, 0) if len(picture) == 3 else picture[0]
    return ((shown - low) / max(high - low, 1e-30)).clamp(0, 1)


@small
def draw_spectrograms(
    pictures: Sequence[Float[Tensor, "mels _"]], names: Sequence[str], sample_rate_hz: int, hop_ms: float
) -> Figure:
    """Draw log-mel spectrograms as long as their clips, in seconds and hertz, down to 60 dB below the loudest point."""
    figure, grid = panels(len(names), 2, 1.3)
    mels = len(pictures[0])
    hertz = [hz for hz in (250, 500, 1000, 2000, 4000, 8000, 16000) if hz < sample_rate_hz / 2]
    for axes, picture, name in zip(grid, pictures, names, strict=True):
        loudest = float(picture.max())
        axes.imshow(
            picture.numpy(), cmap="magma", vmin=loudest - 6 * math.log(10), vmax=loudest,
            origin="lower", aspect="auto", interpolation="nearest",
            extent=(0, picture.shape[1] * hop_ms / 1000, 0, mels),
        )  # fmt: skip
        axes.set_yticks([mel_row(hz, mels, sample_rate_hz) for hz in hertz], map(str, hertz))
        axes.set_title(name, parse_math=False)
        axes.set_xlabel("seconds")
        axes.set_ylabel("hertz")
        axes.label_outer()
    return figure


@small
def draw_waveforms(waveforms: Sequence[Float[Tensor, " _"]], names: Sequence[str], sample_rate_hz: int) -> Figure:
    """Draw waveforms as long as their clips, in seconds, each scaled to its own peak."""
    figure, grid = panels(len(names), 2, 1.0)
    for axes, waveform, name in zip(grid, waveforms, names, strict=True):
        axes.plot([sample / sample_rate_hz for sample in range(len(waveform))], waveform.numpy(), linewidth=0.5)
        axes.set_title(name, parse_math=False)
        axes.set_xlabel("seconds")
        axes.set(yticks=[])
    return figure


@small
def draw_curves(
    named: Mapping[str, tuple[Tensor, Tensor]], dots: Sequence[tuple[Tensor, Tensor]], axes_names: tuple[str, str]
) -> Figure:
    """Draw curves in the unit square, each with its name and a dot on it."""
    figure = Figure((WIDTH, WIDTH), layout="constrained")
    axes = figure.add_subplot(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel=axes_names[0], ylabel=axes_names[1])
    for (name, (x, y)), (dot_x, dot_y) in zip(named.items(), dots, strict=True):
        (line,) = axes.plot(x, y, label=name, linewidth=1)
        axes.plot([dot_x], [dot_y], "o", color=line.get_color(), markersize=4)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=6, loc="lower left")
    return figure


@small
def draw_pairs(predicted: Float[Tensor, "n amounts"], true: Float[Tensor, "n amounts"], names: Sequence[str]) -> Figure:
    """Draw predicted against true amounts, a panel for each, with the line on which they are equal."""
    figure, grid = panels(len(names), 3, 2.4)
    for axes, name, x, y in zip(grid, names, true.T.numpy(), predicted.T.numpy(), strict=True):
        axes.axline((float(x[0]), float(x[0])), slope=1, color="0.7", linewidth=0.8)
        axes.plot(x, y, ".", markersize=3)
        axes.set(xlabel="true", ylabel="predicted")
        axes.set_title(name, parse_math=False)
    return figure


def mel_row(hertz: int, num_mels: int, sample_rate_hz: int) -> float:
    """The height of a frequency in a mel spectrogram whose band i spans i to i + 1, by HTK's scale log(1 + f/700)."""
    return (num_mels + 1) * math.log1p(hertz / 700) / math.log1p(sample_rate_hz / 2 / 700) - 0.5


def panels(count: int, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, in reading order.

    Args:
        count: How many panels.
        columns: At most so many beside each other.
        height: Of a panel, in inches.
    """
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    figure = Figure((WIDTH, height * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, number + 1) for number in range(count)]
