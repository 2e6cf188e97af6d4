"""The callbacks of a training from the command line."""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from jsonargparse import Namespace
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from pytorch_lightning.cli import SaveConfigCallback
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor

from longseq.cli.config_keys import items_of
from longseq.cli.errors import UserError
from longseq.cli.names import escaped, shown
from longseq.cli.runs.epoch_lines import EpochLines
from longseq.cli.runs.folders import CONFIG, METRICS, SERIES, SPLITS, config_of, forget, numbered
from longseq.cli.runs.resuming import restore_config
from longseq.compat.lightning import callbacks_of
from longseq.files.storage import write_text
from longseq.tasks import Task
from longseq.training.board.by_class import ByClass
from longseq.training.board.event_figures import EventFigures
from longseq.training.board.samples import AttentionMaps, Embeddings, Mistakes
from longseq.training.board.summary import SequenceSummary
from longseq.training.board.tensorboard import (
    BestFigure,
    Confusions,
    DrawsSeldom,
    InputSamples,
    Overview,
    RateAndNorm,
    TaskPicture,
)
from longseq.training.data import data_of
from longseq.training.decisions import Decisions
from longseq.training.energy import EnergyMeter
from longseq.training.generators import GeneratorStates
from longseq.training.recovery import Sentinel
from longseq.training.throughput import ThroughputLogger
from longseq.training.timed import Timed

# Settings of data that do not change the samples.
_OF_SPLITS_AND_BATCHES = ("seed", "folds", "fold", "val_fraction", "balanced", "batch_size", "num_workers", "in_memory")

# Callbacks that search for a setting before training. A resumed training already has the setting.
FINDERS = (LearningRateFinder, BatchSizeFinder)


class SavedConfig(SaveConfigCallback):
    """Lightning's callback that saves the configuration of a run; here into the run's folder, even without a logger.

    A training started from the file repeats this run only. So the file has no ckpt_path and resume; --folds and --grow,
    which would train the other runs too, are in a separate file.
    """

    def __init__(self, parser: Any, config: Namespace) -> None:
        config = config.clone()
        self.series = {name: config[name] for name in ("folds", "grow") if config[name] is not None}
        config["ckpt_path"], config["resume"], config["folds"], config["grow"] = None, False, None, None
        super().__init__(parser, config, save_to_log_dir=False)

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        (record,) = callbacks_of(trainer, RunRecord)
        write_text(record.run / CONFIG, self.parser.dump(self.config, skip_unset=False))
        if self.series:
            write_text(record.run / SERIES, json.dumps(self.series))


class BestCheckpoint(ModelCheckpoint):
    """Lightning's callback that saves the checkpoint of the epoch with the best figure of the task. Among epochs whose
    figure is 1, the maximum, the one with the lowest loss is the best.

    A resumed run keeps its best score, even if its folder was moved or copied.

    Attributes:
        figures: All figures of the best validation.
        epoch: The epoch of the best validation, from 1; None before, and if a checkpoint of an older longseq has none.
    """

    def __init__(self, run: Path, task: Task) -> None:
        super().__init__(run, "best", monitor=f"val/{task.best}", mode=task.mode, enable_version_counter=False)
        self.figures: dict[str, float] = {}
        self.epoch: int | None = None
        self._wins_tie = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics = trainer.callback_metrics
        figure = metrics.get(self.monitor or "")
        if not trainer.sanity_checking and figure is not None:
            best, loss = self.best_model_score, float(metrics.get("val/loss", math.inf))
            is_tie = self.mode == "max" and best is not None and float(figure) == float(best) == 1
            self._wins_tie = is_tie and loss < self.figures.get("val/loss", -math.inf)
            if self.check_monitor_top_k(trainer, figure):
                self.figures = {name: float(value) for name, value in metrics.items() if name.startswith("val/")}
                self.epoch = trainer.current_epoch + 1
        super().on_validation_end(trainer, pl_module)

    def check_monitor_top_k(self, trainer: pl.Trainer, current: Tensor | None = None) -> bool:
        return self._wins_tie or bool(super().check_monitor_top_k(trainer, current))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.monitor in trainer.callback_metrics:  # otherwise, before the first validation, Lightning would warn
            super().on_train_epoch_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "figures": self.figures, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        folder = Path(self.dirpath or "")

        def here(path: str) -> str:
            """The file of that name in this run. A checkpoint of another program may name any file, and Lightning would
            delete that file when it saves a better checkpoint."""
            return str(folder / Path(path).name) if path else path

        state_dict = state_dict | {
            "dirpath": self.dirpath,
            "best_model_path": here(state_dict["best_model_path"]),
            "kth_best_model_path": here(state_dict["kth_best_model_path"]),
            "best_k_models": {here(path): score for path, score in state_dict["best_k_models"].items()},
        }
        best = state_dict["best_model_path"]
        if best and Path(best).exists():  # otherwise the scores do not belong to this run
            self.figures = state_dict.get("figures", {})  # checkpoints of longseq 0.1 have none
            self.epoch = state_dict.get("epoch")
            super().load_state_dict(state_dict)


class RunRecord(pl.Callback):
    """Writes which sample of a run is in which split (splits.csv) and which files were left out (skipped.txt). Also
    records whether the training has begun.

    Args:
        run: The run's folder.
        started_with: The configuration that a resumed run was started with; None for a new run.

    Attributes:
        has_begun: Whether a training step was done.
    """

    def __init__(self, run: Path, started_with: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.run, self.started_with = run, started_with
        self.has_begun = False

    def undo(self) -> None:
        """If no step was done, delete the folder of a new run, or restore the configuration of a resumed run."""
        if self.has_begun:
            return
        if self.started_with is None:
            rank_zero_only(forget)(self.run)
        else:  # otherwise the next --resume would read the settings that failed
            with suppress(UserError):  # a damaged configuration must not hide the first error
                rank_zero_only(restore_config)(self.run, self.started_with)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self.has_begun and trainer.is_global_zero:
            (self.run / METRICS).unlink(missing_ok=True)  # written when this run finished earlier, but now it continues
        self.has_begun = True

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        datamodule = data_of(trainer)
        if not trainer.is_global_zero or datamodule is None:
            return
        datamodule.save_splits(self.run / SPLITS)
        skipped = [f"{escaped(path)}: {shown(what)}" for path, what in datamodule.bad_files().items()]
        if skipped:
            (self.run / "skipped.txt").write_text("\n".join(skipped) + "\n", encoding="utf-8")


def callbacks_of_training(
    best: BestCheckpoint, record: RunRecord, settings: Namespace, is_resumed: bool, command: str, began: float
) -> list[pl.Callback]:
    """The callbacks of a training from the command line, without those that the configuration adds. `began` is when the
    command started, on the clock of time.monotonic."""
    callbacks: list[pl.Callback] = [
        *([] if settings.minutes is None else [Timed(settings.minutes, began)]),
        best,
        SequenceSummary(),
        EpochLines(best),
        ThroughputLogger(settings.peak_flops),
        EnergyMeter(),
        GeneratorStates(),
        Decisions(),
        Confusions(),
        ByClass(),
        EventFigures(),
        record,
        Sentinel(record.run / "last.ckpt", settings.checkpoint_minutes),
    ]
    if settings.trainer.logger is not False:
        callbacks += [
            DrawsSeldom(),
            RateAndNorm(),
            Overview(is_resumed, command, record.run / CONFIG),
            TaskPicture(),
            *([] if _are_inputs_shown(record.run, settings.data.as_dict()) else [InputSamples()]),
            BestFigure(is_resumed),
            Mistakes(),
            AttentionMaps(),
            Embeddings(),
        ]
    return callbacks


def make_no_folders(trainer: pl.Trainer) -> None:
    """Replace the slash of figures in the names of a user's checkpoints, ``{val/loss:.2f}``, by an underscore,
    val_loss=0.50. Otherwise it would make folders."""
    for callback in trainer.checkpoint_callbacks:
        name = getattr(callback, "filename", None)
        if isinstance(callback, ModelCheckpoint) and name and callback.auto_insert_metric_name:
            callback.filename = re.sub(r"\{([^}:]+)", lambda match: f"{match[1].replace('/', '_')}={match[0]}", name)
            callback.auto_insert_metric_name = False  # otherwise Lightning inserts names with slashes


def _are_inputs_shown(run: Path, data: Mapping[str, Any]) -> bool:
    """Whether TensorBoard shows inputs of the same data, with the same shape and augmentation, from an earlier run of
    the experiment. The splits may differ."""
    for earlier in numbered(run.parent):
        if earlier == run:
            break
        with suppress(UserError):  # a run that was killed before it wrote its configuration
            before = config_of(earlier).get("data")
            if _samples(before) == _samples(data) and any(earlier.rglob("events.out.*")):
                return True
    return False


def _samples(data: Any) -> list[tuple[str, str]]:
    """The settings of a data configuration that decide how samples look."""
    return [(key, str(value)) for key, value in items_of(data) if key not in _OF_SPLITS_AND_BATCHES]


def take_off(trainer: pl.Trainer, *kinds: type) -> list[Any]:
    """Remove the callbacks of these classes from a trainer, and return them."""
    taken = callbacks_of(trainer, *kinds)
    others = [callback for callback in callbacks_of(trainer, pl.Callback) if not isinstance(callback, kinds)]
    trainer.callbacks = others  # type: ignore[attr-defined]
    return taken
