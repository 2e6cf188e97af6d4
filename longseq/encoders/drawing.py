"""Pictures of what an encoder sees."""

import math
from collections.abc import Sequence

from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor


def draw_images(pictures: Sequence[Float[Tensor, "channels height width"]], names: Sequence[str]) -> Figure:
    """Draw images (0..255) as they are, in grey unless they have three channels, under their names."""
    figure, grid = _grid(len(names), cell=(1.7, 1.9))
    for axes, picture, name in zip(grid, pictures, names, strict=True):
        pixels = picture.permute(1, 2, 0) if len(picture) == 3 else picture[0]
        axes.imshow((pixels / 255).clamp(0, 1).numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(name, parse_math=False)
        axes.set(xticks=[], yticks=[])
        axes.set_axis_off()
    return figure


def draw_spectrograms(
    pictures: Sequence[Float[Tensor, "mels _"]], names: Sequence[str], sample_rate_hz: int, hop_ms: float
) -> Figure:
    """Draw log-mel spectrograms as long as their clips, in seconds and hertz, down to 60 dB below the loudest point."""
    figure, grid = _grid(len(names), cell=(2.6, 2.2))
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


def draw_waveforms(waveforms: Sequence[Float[Tensor, " _"]], names: Sequence[str], sample_rate_hz: int) -> Figure:
    """Draw waveforms as long as their clips, in seconds, each scaled to its own peak."""
    figure, grid = _grid(len(names), cell=(2.6, 1.6))
    for axes, waveform, name in zip(grid, waveforms, names, strict=True):
        axes.plot([sample / sample_rate_hz for sample in range(len(waveform))], waveform.numpy(), linewidth=0.5)
        axes.set_title(name, parse_math=False)
        axes.set_xlabel("seconds")
        axes.set(yticks=[])
    return figure


def mel_row(hertz: int, num_mels: int, sample_rate_hz: int) -> float:
    """The height of a frequency in a mel spectrogram whose band i spans i to i + 1, by HTK's scale log(1 + f/700)."""
    return (num_mels + 1) * math.log1p(hertz / 700) / math.log1p(sample_rate_hz / 2 / 700) - 0.5


def _grid(count: int, cell: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    columns = min(count, 4)
    rows = math.ceil(count / columns)
    figure = Figure((cell[0] * columns, cell[1] * rows), dpi=120, layout="constrained")
    return figure, [figure.add_subplot(rows, columns, number + 1) for number in range(count)]
