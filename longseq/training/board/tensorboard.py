"""What TensorBoard shows in addition to curves: confusions, inputs, and the best validation figure of each run.

These callbacks need a TensorBoardLogger; with another logger, or none, they do nothing.
"""

import math
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from jaxtyping import Float
from lightning_fabric.utilities.apply_func import move_data_to_device
from matplotlib.figure import Figure
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from longseq.arguments import require_positive
from longseq.compat.lightning import callbacks_of
from longseq.encoders.lettering import key_of
from longseq.files.description import settings_of
from longseq.training.board.class_axes import MOST_IN_KEY
from longseq.training.board.pictures import draw_confusions, draw_inputs
from longseq.training.board.summary import summary
from longseq.training.classifier import Classifier
from longseq.training.data import limits_of
from longseq.training.devices.processes import data_group
from longseq.training.devices.sequence_parallel import gradient_norm


class View(pl.Callback):
    """A callback that collects from validations and tests: ``begin``, ``see`` for each batch, ``end``."""

    def begin(self, trainer: pl.Trainer, model: Classifier, stage: str) -> None:
        """Start anew.

        Args:
            trainer: Runs the evaluation.
            model: The classifier.
            stage: val or test.
        """

    def see(self, trainer: pl.Trainer, model: Classifier, seen: Mapping[str, Tensor], batch: Any, number: int) -> None:
        """Take a batch.

        Args:
            trainer: Runs the evaluation.
            model: The classifier.
            seen: The model's ``outputs``, the ``labels``, and the task's ``predicted`` of the outputs.
            batch: As the data module yields it.
            number: Of the batch, from 0.
        """

    def end(self, trainer: pl.Trainer, model: Classifier, stage: str) -> None:
        """Show what was collected."""

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        self.begin(trainer, pl_module, "val")

    def on_test_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        self.begin(trainer, pl_module, "test")

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Classifier, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self.see(trainer, pl_module, outputs, batch, batch_idx)

    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        self.end(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        self.end(trainer, pl_module, "test")


class Confusions(View):
    """The confusion matrix of validation and test, over the samples of all ranks: the images val/confusion and
    test/confusion.

    Attributes:
        of_test: The matrix of the test; None before, and where the task has none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of_test: Tensor | None = None
        self._metric: Any = None

    def begin(self, trainer: pl.Trainer, model: Classifier, stage: str) -> None:
        self._metric = None
        metric = model.task.confusion(model.num_classes)
        if metric is None or (stage == "val" and board_of(trainer) is None):  # nobody would see that of a validation
            return
        self._metric = metric.to(model.device)
        metric.process_group = data_group(trainer)

    def see(self, trainer: pl.Trainer, model: Classifier, seen: Mapping[str, Tensor], batch: Any, number: int) -> None:
        if self._metric is not None:
            self._metric.update(*model.task.measured(model.head, seen["predicted"], seen["labels"]))

    def end(self, trainer: pl.Trainer, model: Classifier, stage: str) -> None:
        if self._metric is None:
            return
        matrix = self._metric.compute().cpu()  # called on every rank, because it sums over ranks
        if stage == "test":
            self.of_test = matrix
        show(trainer, f"{stage}/confusion", lambda: draw_confusions(matrix, model.class_names))


class TaskPicture(View):
    """Show the outputs for the first batch of a validation, as the task draws them: the image val/outputs."""

    def see(self, trainer: pl.Trainer, model: Classifier, seen: Mapping[str, Tensor], batch: Any, number: int) -> None:
        if not number and not trainer.testing:
            show(trainer, "val/outputs", lambda: model.task.draw(model.encoder, seen["outputs"]))


class InputSamples(pl.Callback):
    """Show some training inputs when training starts: the image inputs/samples, and sounds to listen to.

    The inputs are read from the data set itself, so that the loader's order and all random numbers stay the same.

    Args:
        num_samples: How many inputs; they are drawn at random, but are the same in every run.

    Raises:
        ValueError: If num_samples is not positive.
    """

    def __init__(self, num_samples: int = 8) -> None:
        super().__init__()
        require_positive("leave the callback out to show none", num_samples=num_samples)
        self.num_samples = num_samples

    @torch.no_grad()
    def on_train_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        logger = board_of(trainer)
        if logger is None or not trainer.is_global_zero or trainer.global_step > 0:  # a resumed run has them
            return
        loader: Any = trainer.train_dataloader
        dataset = loader.dataset
        if isinstance(dataset, IterableDataset):
            return
        chosen = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[: self.num_samples]
        samples = DataLoader(Subset(dataset, chosen.tolist()), len(chosen), collate_fn=loader.collate_fn)
        with isolate_rng():  # a data set may augment at random
            seen, labels, *_ = trainer.strategy.batch_to_device(next(iter(samples)))  # the data may finish it
            inputs, labels = move_data_to_device((seen, labels), torch.device("cpu"))
            figure = draw_inputs(pl_module, seen, labels, limits_of(trainer))
        logger.experiment.add_figure("inputs/samples", figure, step_of(trainer), close=False)
        for number, (clip, label) in enumerate(zip(pl_module.encoder.sounds(inputs), labels, strict=False)):
            name = re.sub(r"\W", "", pl_module.task.names(label, pl_module.class_names))
            tag = f"inputs/class_{name}_sample_{number}"
            rate: Any = pl_module.encoder.sample_rate_hz
            add_sound(logger, tag, clip, rate, step_of(trainer))


class Overview(pl.Callback):
    """Put what belongs together into one chart (the tab Custom Scalars): loss and the task's best figure, of training
    and validation; learning rate, tokens a second and gradient norm. And show the model as text (the tab Text).

    Args:
        is_resumed: Whether the run continues earlier curves, which have this already.
        command: The command that has started the run, as one more text.
        config: The file with the configuration of the run, as one more text.
    """

    def __init__(self, is_resumed: bool = False, command: str | None = None, config: Path | None = None) -> None:
        super().__init__()
        self.is_resumed, self.command, self.config = is_resumed, command, config

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        logger = board_of(trainer)
        if logger is None or self.is_resumed or not trainer.is_global_zero:
            return
        best = pl_module.task.best
        charts = {
            "loss": ["train/loss", "val/loss"],
            best: [f"train/{best}", f"val/{best}"],
            "learning rate": ["learning_rate"],
            "tokens a second": ["throughput/tokens_per_second"],
            "gradient norm": ["gradient_norm"],
        }
        layout = {"training": {name: ["Multiline", tags] for name, tags in charts.items()}}
        logger.experiment.add_custom_scalars(layout)
        texts = {"model": summary(pl_module)}
        if self.command is not None:
            texts["command"] = self.command
        if self.config is not None:
            texts["configuration"] = self.config.read_text(encoding="utf-8")
        names = pl_module.class_names
        if key_of(names) or len(names) > MOST_IN_KEY:  # pictures have numbers without a key
            texts["classes"] = "\n".join(f"{number} {name}" for number, name in enumerate(names))
        for name, text in texts.items():
            logger.experiment.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()))


class DrawsSeldom(pl.Callback):
    """Keep the time for drawing figures below a twentieth of a training.

    An epoch of a small data set takes less time than its figures. Figures that would exceed the share wait, until those
    of a later validation replace them or the training ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self._start = self._spent = 0.0
        self._waiting: dict[str, Callable[[], None]] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        self._start, self._spent = time.perf_counter(), 0.0

    def on_train_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        for draw in self._waiting.values():
            draw()
        self._waiting = {}

    def draw(self, tag: str, draw: Callable[[], None]) -> None:
        """Draw now, or later if too much time went into drawing."""
        now = time.perf_counter()
        if self._spent > (now - self._start) / 20:
            self._waiting[tag] = draw
            return
        self._waiting.pop(tag, None)
        draw()
        self._spent += time.perf_counter() - now


class RateAndNorm(pl.Callback):
    """Log the learning rate, the highest of all groups, and the norm of the gradients before they are clipped."""

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: Classifier, optimizer: torch.optim.Optimizer
    ) -> None:
        log_every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not log_every or (trainer.global_step + 1) % log_every:
            return
        weights = [weight for weight in pl_module.parameters() if weight.grad is not None]
        figures = {
            "learning_rate": max(group["lr"] for group in optimizer.param_groups),
            "gradient_norm": float(gradient_norm(trainer, weights)),
        }
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)


class BestFigure(pl.Callback):
    """Show each run's best validation value of the task's ``best`` metric, hp/val_best, and the one of the test,
    hp/test, in the hparams tab, beside its settings. The names are the same for all tasks, and the setting ``metric``
    tells them apart: the tab shows only the columns that the first run of a folder declares.

    Args:
        is_resumed: Whether the run continues earlier curves, which have the settings already.
    """

    def __init__(self, is_resumed: bool = False) -> None:
        super().__init__()
        self.best: float | None = None
        self.is_resumed = is_resumed

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        if (logger := board_of(trainer)) is not None and not self.is_resumed:
            best = math.nan if self.best is None else self.best  # known if the training goes on from a checkpoint
            figures = {"hp/val_best": best, "hp/test": math.nan}
            logger.log_hyperparams(_choices(trainer, pl_module), figures, step_of(trainer))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        if (logger := board_of(trainer)) is not None:
            task, figure = pl_module.task, float(trainer.callback_metrics[f"val/{pl_module.task.best}"])
            better = max if task.mode == "max" else min
            self.best = figure if self.best is None else better(self.best, figure)
            logger.log_metrics({"hp/val_best": self.best}, step_of(trainer))

    def on_test_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        best = pl_module.task.best
        if (logger := board_of(trainer)) is not None and f"test/{best}" in trainer.callback_metrics:
            logger.log_metrics({"hp/test": float(trainer.callback_metrics[f"test/{best}"])}, step_of(trainer))

    def state_dict(self) -> dict[str, float | None]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, float | None]) -> None:
        self.best = state_dict["best"]


def _choices(trainer: pl.Trainer, model: Classifier) -> dict[str, Any]:
    """What people compare runs by, then all settings of the model. The tab sorts names, and ticks the first five."""
    data: Any = getattr(trainer, "datamodule", None)
    attention = model.encoder.attention if model.encoder.depth else None
    seed = os.environ.get("PL_GLOBAL_SEED")  # which seed_everything has set
    compared = {
        "attention": "no blocks" if attention is None else type(attention).__name__,
        "batch_size": getattr(data, "batch_size", None),
        "data": None if data is None else _name_of(data),
        "k": str(getattr(attention, "k", None)),
        "learning_rate": model.learning_rate,
        "metric": model.task.best,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "precision": trainer.precision,
        "seed": int(seed) if seed else None,
        "seed_of_data": getattr(data, "seed", None),
        "tokens": model.encoder.num_tokens,
    }
    return {
        **{name: value for name, value in compared.items() if value is not None},
        **{f"settings.{name}": value for name, value in settings_of(model.hparams).items() if value is not None},
    }


def _name_of(data: Any) -> str:
    """The class of the data module, with its folder, because two folders are two data sets."""
    root = getattr(data, "root", None)
    return type(data).__name__ + ("" if root is None else f" {root}")


def show(trainer: pl.Trainer, tag: str, draw: Callable[[], Figure | None]) -> None:
    """Draw a figure and show it as an image, where rank zero has a TensorBoardLogger and there is something to draw; in
    a training with DrawsSeldom perhaps later."""
    board, step = board_of(trainer), step_of(trainer)
    if board is None or not trainer.is_global_zero:
        return

    def now() -> None:
        if (figure := draw()) is not None:
            board.experiment.add_figure(tag, figure, step, close=False)

    seldom = next(iter(callbacks_of(trainer, DrawsSeldom)), None)
    if seldom is not None and trainer.validating and trainer.state.fn == TrainerFn.FITTING:
        seldom.draw(tag, now)
    else:
        now()


def add_sound(board: TensorBoardLogger, tag: str, clip: Float[Tensor, " _"], sample_rate_hz: int, step: int) -> None:
    """Show a sound to listen to, at full volume."""
    if len(clip) > 1:  # TensorBoard refuses a sound of one sample, and nobody would hear it
        board.experiment.add_audio(tag, clip / clip.abs().max().clamp(min=1e-6), step, sample_rate_hz)


def board_of(trainer: pl.Trainer) -> TensorBoardLogger | None:
    """The run's TensorBoardLogger, the same on every rank; None without one, and in the sanity check."""
    loggers = [] if trainer.sanity_checking else trainer.loggers
    return next((logger for logger in loggers if isinstance(logger, TensorBoardLogger)), None)


def step_of(trainer: pl.Trainer) -> int:
    return max(trainer.global_step - 1, 0)  # as Lightning logs its own values: its first step is 0
