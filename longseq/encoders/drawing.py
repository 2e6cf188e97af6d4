"""Figures of an encoder's inputs, legible at TensorBoard's width of 360 points."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from longseq.encoders.lettering import cut, drawable, fits, lettering, set_title

WIDTH = 3.6  # inches
TITLE = 7  # points
small: Any = rc_context(
    {
        "figure.dpi": 200,  # sharp on screens of twice the resolution
        "figure.facecolor": "white",  # on a dark page too
        "font.size": 7,
        "axes.titlesize": TITLE,
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
    """Draw images with their names above, in grey unless they have three channels.

    Args:
        pictures: The images.
        names: One for each.
        limits: The numbers of black and of white; None for the lowest and the highest of each image.
    """
    are_short = all(fits(name, _title_width(4), TITLE) for name in names)
    columns, height = (4, 1.1) if are_short else (2, 1.5)
    figure, grid = panels(len(names), columns, height)
    for axes, picture, name in zip(grid, pictures, names, strict=True):
        axes.imshow(pixels_of(picture, limits).numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        set_title(axes, name, _title_width(min(columns, len(names))), TITLE)
        axes.set(xticks=[], yticks=[])
        axes.set_axis_off()
    return figure


def pixels_of(
    picture: Float[Tensor, "channels height width"], limits: tuple[float, float] | None
) -> Float[Tensor, "rows columns *rgb"]:
    """An image as numbers from 0 (black) to 1 (white): in colour if it has three channels, else its first channel."""
    low, high = (float(end) for end in (picture.aminmax() if limits is None else limits))
    shown = picture.permute(1, 2, 0) if len(picture) == 3 else picture[0]
    return ((shown - low) / max(high - low, 1e-30)).clamp(0, 1)


@small
def draw_spectrograms(
    pictures: Sequence[Float[Tensor, "channels _ mels"]], names: Sequence[str], sample_rate_hz: int, hop_ms: float
) -> Figure:
    """Draw log-mel spectrograms over seconds and hertz, each as long as its clip, down to 60 dB below its peak: the
    mean of the channels."""
    figure, grid = panels(len(names), 2, 1.3)
    pictures = [picture.nanmean(0).T for picture in pictures]
    mels = len(pictures[0])
    hertz = [hz for hz in (250, 500, 1000, 2000, 4000, 8000, 16000) if hz < sample_rate_hz / 2]
    for axes, picture, name in zip(grid, pictures, names, strict=True):
        loudest = float(picture.nan_to_num(-math.inf).max())
        axes.imshow(
            picture.numpy(), cmap="magma", vmin=loudest - 6 * math.log(10), vmax=loudest,
            origin="lower", aspect="auto", interpolation="nearest",
            extent=(0, picture.shape[1] * hop_ms / 1000, 0, mels),
        )  # fmt: skip
        axes.set_yticks([mel_row(hz, mels, sample_rate_hz) for hz in hertz], map(str, hertz))
        set_title(axes, name, _title_width(min(2, len(names))), TITLE)
        axes.set_xlabel("seconds")
        axes.set_ylabel("hertz")
        axes.label_outer()
    return figure


@small
def draw_waveforms(
    waveforms: Sequence[Float[Tensor, "channels _"]], names: Sequence[str], sample_rate_hz: int
) -> Figure:
    """Draw waveforms over seconds, each as long as its clip: one above another the channels, each scaled to its own
    peak."""
    figure, grid = panels(len(names), 2, 1.0 if len(waveforms[0]) == 1 else 1.6)
    for axes, waveform, name in zip(grid, waveforms, names, strict=True):
        seconds = [sample / sample_rate_hz for sample in range(waveform.shape[1])]
        for number, channel in enumerate(waveform):
            size = channel.abs().nan_to_num().max().clamp(min=1e-30) if len(waveform) > 1 else 1
            axes.plot(seconds, (channel / size - 2 * number).numpy(), linewidth=0.5, color="C0")
        set_title(axes, name, _title_width(min(2, len(names))), TITLE)
        axes.set_xlabel("seconds")
        axes.set(yticks=[])
    return figure


@small
def draw_features(
    pictures: Sequence[Float[Tensor, "features _"]], names: Sequence[str], token_seconds: float | None
) -> Figure:
    """Draw features over tokens, or over seconds if the tokens have times, from the lowest to the highest number."""
    figure, grid = panels(len(names), 2, 1.3)
    for axes, picture, name in zip(grid, pictures, names, strict=True):
        end = picture.shape[1] * (token_seconds or 1)
        axes.imshow(
            picture.numpy(), cmap="viridis", aspect="auto", interpolation="nearest", extent=(0, end, len(picture), 0)
        )
        set_title(axes, name, _title_width(min(2, len(names))), TITLE)
        axes.set_xlabel("seconds" if token_seconds else "token")
        axes.set_ylabel("feature")
        axes.label_outer()
    return figure


@small
def draw_curves(
    named: Mapping[str, tuple[Tensor, Tensor]], dots: Sequence[tuple[Tensor, Tensor]], axes_names: tuple[str, str]
) -> Figure:
    """Draw curves in the unit square, each with its name and a dot."""
    figure = Figure((WIDTH, WIDTH), layout="constrained")
    axes = figure.add_subplot(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel=axes_names[0], ylabel=axes_names[1])
    for name, (x, y), (dot_x, dot_y) in zip(named, named.values(), dots, strict=True):
        (line,) = axes.plot(x, y, label=cut(name, WIDTH * 36, 6), linewidth=1)
        axes.plot([dot_x], [dot_y], "o", color=line.get_color(), markersize=4)
    axes.grid(alpha=0.3)
    for text in axes.legend(frameon=False, fontsize=6, loc="lower left").get_texts():
        text.set(**lettering(text.get_text()))
    return figure


@small
def draw_pairs(predicted: Float[Tensor, "n amounts"], true: Float[Tensor, "n amounts"], names: Sequence[str]) -> Figure:
    """Draw predicted against true values, one panel per amount, with the line where they are equal."""
    figure, grid = panels(len(names), 3, 2.4)
    for axes, name, x, y in zip(grid, drawable(names), true.T.numpy(), predicted.T.numpy(), strict=True):
        axes.axline((float(x[0]), float(x[0])), slope=1, color="0.7", linewidth=0.8)
        axes.plot(x, y, ".", markersize=3)
        axes.set(xlabel="true", ylabel="predicted")
        set_title(axes, name, _title_width(min(3, len(names))), TITLE)
    return figure


def mel_row(hertz: int, num_mels: int, sample_rate_hz: int) -> float:
    """The row of a frequency in a mel spectrogram whose band i spans i to i + 1, by HTK's scale log(1 + f/700)."""
    return (num_mels + 1) * math.log1p(hertz / 700) / math.log1p(sample_rate_hz / 2 / 700) - 0.5


def _title_width(columns: int) -> float:
    """The room for the title of a panel that is one of so many in a row, in points."""
    return 0.88 * 72 * WIDTH / columns


def panels(count: int, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with panels in reading order.

    Args:
        count: Number of panels.
        columns: The largest number of panels in a row.
        height: Height of a panel, in inches.
    """
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    figure = Figure((WIDTH, height * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, number + 1) for number in range(count)]
