"""What TensorBoard shows beside curves: confusions, inputs, and the best accuracy of each run.

All of it needs a TensorBoardLogger, and does nothing with another logger or none.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from jaxtyping import Float, Int
from lightning_fabric.utilities.apply_func import move_data_to_device
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset
from torchmetrics.classification import MulticlassConfusionMatrix

from longseq.encoders import SpectrogramEncoder
from longseq.training.checkpoint import flatten
from longseq.training.classifier import Classifier


class ConfusionMatrixImage(pl.Callback):
    """Show validation's confusion matrix, all ranks' samples in it, as the image val/confusion."""

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        self._matrix = MulticlassConfusionMatrix(pl_module.num_classes, validate_args=False).to(pl_module.device)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Classifier, outputs: Mapping[str, Tensor], *_: Any
    ) -> None:
        if _logger(trainer) is not None:
            self._matrix.update(outputs["logits"], outputs["labels"])

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        logger = _logger(trainer)
        if logger is None:
            return
        matrix = self._matrix.compute()  # on every rank, for it sums over them
        if trainer.is_global_zero:
            figure = draw_confusions(matrix.cpu(), pl_module.class_names)
            logger.experiment.add_figure("val/confusion", figure, _step(trainer), close=False)


class InputSamples(pl.Callback):
    """Show some training inputs when training starts: the image inputs/samples, and sounds to listen to.

    They are read from the data set itself, so that neither the loader's order nor any random number changes.

    Args:
        num_samples: How many, drawn at random, but the same in every run.

    Raises:
        ValueError: If num_samples is not positive.
    """

    def __init__(self, num_samples: int = 8) -> None:
        super().__init__()
        if num_samples < 1:
            raise ValueError(f"num_samples must be positive, got {num_samples}; leave the callback out to show none")
        self.num_samples = num_samples

    @torch.no_grad()
    def on_train_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        logger = _logger(trainer)
        if logger is None or not trainer.is_global_zero or trainer.global_step > 0:  # then they are there already
            return
        loader: Any = trainer.train_dataloader
        dataset = loader.dataset
        if isinstance(dataset, IterableDataset):
            return
        chosen = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[: self.num_samples]
        samples = DataLoader(Subset(dataset, chosen.tolist()), len(chosen), collate_fn=loader.collate_fn)
        with isolate_rng():  # a data set may augment at random
            inputs, labels = next(iter(samples))
        names = [pl_module.class_names[int(label)] for label in labels]
        encoder = pl_module.encoder
        on_device = move_data_to_device(inputs, pl_module.device)
        pictures, rows = encoder.picture(on_device).cpu(), encoder.rows(on_device)
        if isinstance(encoder, SpectrogramEncoder):
            frames = [pictures.shape[2]] * len(names) if rows is None else rows.tolist()
            spectrograms = [picture[0, :count].T for picture, count in zip(pictures, frames, strict=True)]
            figure = draw_spectrograms(spectrograms, names, encoder)
            waveforms = inputs["waveforms"] if isinstance(inputs, Mapping) else inputs
            lengths = inputs["lengths"] if isinstance(inputs, Mapping) else [waveforms.shape[-1]] * len(names)
            for number, (name, clip, length) in enumerate(zip(names, waveforms, lengths, strict=True)):
                tag = f"inputs/{number}_" + re.sub(r"\W", "", name)
                waveform = clip[:length]
                loud = waveform / waveform.abs().max().clamp(min=1e-6)
                logger.experiment.add_audio(tag, loud, _step(trainer), encoder.sample_rate_hz)
        else:
            figure = draw_images(pictures, names)
        logger.experiment.add_figure("inputs/samples", figure, _step(trainer), close=False)


class BestAccuracy(pl.Callback):
    """Show the best validation accuracy of each run in the hparams tab, beside what the model was made of.

    Args:
        is_resumed: Whether the run's curves go on, which say already what the model was made of.
    """

    def __init__(self, is_resumed: bool = False) -> None:
        super().__init__()
        self.best = 0.0
        self.is_resumed = is_resumed

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        if (logger := _logger(trainer)) is not None and not self.is_resumed:
            choices = dict(flatten(pl_module.hparams))
            choices.pop("class_names", None)  # of the data, and long
            logger.log_hyperparams(choices, {"hp/val_accuracy": self.best}, _step(trainer))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        if (logger := _logger(trainer)) is not None:
            self.best = max(self.best, float(trainer.callback_metrics["val/accuracy"]))
            logger.log_metrics({"hp/val_accuracy": self.best}, _step(trainer))

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self.best = state_dict["best"]


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
        axes.set_xticks(range(num_classes), class_names, rotation=0 if upright else 90)
        axes.set_yticks(range(num_classes), class_names)
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
        axes.set_title(name)
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
        axes.set_title(name)
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


def _logger(trainer: pl.Trainer) -> TensorBoardLogger | None:
    """The run's TensorBoardLogger, the same on every rank; none in the sanity check."""
    loggers = [] if trainer.sanity_checking else trainer.loggers
    return next((logger for logger in loggers if isinstance(logger, TensorBoardLogger)), None)


def _step(trainer: pl.Trainer) -> int:
    return max(trainer.global_step - 1, 0)  # Lightning's own values are logged so: its first step is 0
