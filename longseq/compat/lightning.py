"""Lightning: its command line, loops, launcher and signal handlers, and the layout of its checkpoints."""

import ast
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, TypeVar

import pytorch_lightning as pl
import torch
from lightning_fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from pytorch_lightning.callbacks import RichProgressBar, StochasticWeightAveraging, TQDMProgressBar, WeightAveraging
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.loops.fit_loop import _FitLoop
from pytorch_lightning.trainer.connectors.signal_connector import _SignalConnector
from pytorch_lightning.tuner.lr_finder import _LRCallback
from torch.optim import Optimizer

_Kind = TypeVar("_Kind")
_ON_TRAIN_EPOCH_START = TQDMProgressBar.on_train_epoch_start


class CommandLine(LightningCLI):
    """LightningCLI with commands that need only data, with further flags per command, and without its own loading of
    checkpoints, which longseq does.

    Only the command that the user runs gets its flags, because adding those of all commands takes a second.
    """

    args: list[str]  # the command and what follows it
    data_commands: ClassVar[tuple[str, ...]] = ()

    def add_arguments_to_data_command(self, parser: LightningArgumentParser) -> None:
        """Add flags to a command that needs only data. Besides these it has only those of its method."""

    def add_arguments_to_command(self, command: str, parser: LightningArgumentParser) -> None:
        """Add flags to the parser of one command, which has the flags of all commands already."""

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        if subcommand != self.args[0]:
            return self.init_parser(**kwargs)
        if subcommand in self.data_commands:
            parser = self.init_parser(**kwargs)
            skip: set[str | int] = {*self.subcommands()[subcommand]}
            of_method = parser.add_method_arguments(klass, subcommand, skip=skip)
            self._subcommand_method_arguments[subcommand] = of_method
            self.add_arguments_to_data_command(parser)
            return parser
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        self.add_arguments_to_command(subcommand, parser)
        return parser

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would let the checkpoint's hyperparameters silently override the flags."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Do nothing: Lightning would run the command as soon as everything is built."""

    def run(self) -> None:
        """Run the command."""
        super()._run_subcommand(str(self.subcommand))

    def instantiate_data(self) -> Any:
        """Build only the data module."""
        self.config_init = self.parser.instantiate(self.config)
        return self._get(self.config_init, "data")


def leave_sigterm_to_us() -> None:
    """Disable the action of Lightning's SIGTERM handler: it would end the process with exit code 0, and wait for ranks
    that are busy. It still calls the handler that was registered before it."""
    _SignalConnector._sigterm_notifier_fn = lambda *_: None  # type: ignore[method-assign]


def wait_for_ranks_within(strategy: Any, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Make a strategy enter a context while it waits, in C++, for ranks that another program starts."""
    plain = strategy.setup_environment

    def setup_environment() -> None:
        with context():
            plain()

    strategy.setup_environment = setup_environment


def restore_within(trainer: pl.Trainer, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Let a trainer enter a context while it restores the content of a checkpoint."""
    connector = trainer._checkpoint_connector

    def within(restore: Callable[..., None], *args: Any) -> None:
        with context():
            restore(*args)

    for name in ("_restore_modules_and_callbacks", "restore_training_state"):
        setattr(connector, name, partial(within, getattr(connector, name)))


def is_raised_by_lightning(error: BaseException) -> bool:
    """Whether Lightning's own code has raised an error, as it does for flags that do not fit each other or the data."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals["__name__"].startswith("pytorch_lightning.")


def callback_behind(error: BaseException, ours: tuple[str, ...]) -> str | None:
    """The name of the class of the callback in which an error was raised. None if no callback was at work, or if it had
    called code of these packages, in which the error was raised."""
    name = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(callback := frame.f_locals.get("self"), pl.Callback):
            name = type(callback).__name__
        elif frame.f_globals["__name__"].partition(".")[0] in ours:
            name = None
    return name


def words_of_arguments(message: str) -> list[str]:
    """The words of an error's message, the most likely names of arguments first: ``Trainer(max_epochs=...)``."""
    return re.findall(r"`(?:Trainer\()?(\w+)", message) + re.findall(r"\w+", message)


def end_with_dead_rank(is_ending: Callable[[], bool], exit_code: int) -> None:
    """Make Lightning, which ends all ranks when one has died, print the dead rank and exit with this exit code.

    Args:
        is_ending: Whether this process is already ending, together with all others.
        exit_code: Exit code of the process that started the ranks.
    """

    def end_all(self: Any) -> None:
        if is_ending():
            return
        for rank, process in enumerate(self._child_processes, start=1):
            if process.returncode:
                how = f"signal {signal.Signals(-process.returncode).name}" if process.returncode < 0 else "an error"
                print(
                    f"error: rank {rank}: process {process.pid} was ended by {how}, and all others with it; "
                    "fix the cause, then --resume",
                    file=sys.stderr,
                    flush=True,
                )
        for process in self._child_processes:
            process.kill()
        os._exit(exit_code)

    _ChildProcessObserver._terminate_all = end_all  # type: ignore[method-assign]


def epoch_of(trainer: pl.Trainer) -> str:
    """Which epoch runs, from 1, and of how many if that is limited."""
    last = trainer.max_epochs
    return f"{trainer.current_epoch + 1}" + ("" if last in (None, -1) else f"/{last}")


def count_epochs_from_one() -> None:
    """Make both progress bars show "Epoch 5/30", or "Epoch 5" if the number is not limited. Lightning counts from 0, in
    one bar without the number, and shows "Epoch 4/-2"."""

    def description(self: Any, current_epoch: int) -> str:
        text = f"Epoch {epoch_of(self.trainer)}"
        return text.ljust(len(self.validation_description))  # as long as the other bar's: no flickering

    def start(self: Any, trainer: pl.Trainer, *arguments: Any) -> None:
        _ON_TRAIN_EPOCH_START(self, trainer, *arguments)
        self.train_progress_bar.set_description(f"Epoch {epoch_of(trainer)}")

    RichProgressBar._get_train_description = description  # type: ignore[method-assign]
    TQDMProgressBar.on_train_epoch_start = start  # type: ignore[method-assign]


def show_beside_bar(trainer: pl.Trainer, texts: Callable[[], Mapping[str, str]]) -> None:
    """Show texts with their names next to the progress bar, before logged figures; nothing without a bar.
    The run's number, v_num, which Lightning shows there, is left out."""
    bar = trainer.progress_bar_callback
    if bar is not None:

        def get_metrics(*arguments: Any) -> dict[str, Any]:
            figures = {**texts(), **type(bar).get_metrics(bar, *arguments)}
            figures.pop("v_num", None)
            return figures

        bar.get_metrics = get_metrics  # type: ignore[method-assign]


def hand_on_exact_inputs(trainer: pl.Trainer) -> None:
    """Stop Lightning from rounding batches to the precision of the weights: in bfloat16, rounding noise covers the
    quiet parts of a sound. Front ends compute in float32, and the encoder casts their result."""
    trainer.precision_plugin.convert_input = _unchanged  # type: ignore[method-assign]


def _unchanged(data: Any) -> Any:
    return data


def stops_early(trainer: pl.Trainer) -> bool:
    """Whether a callback ends the training after this epoch."""
    return trainer.should_stop and trainer.fit_loop._can_stop_early


def has_synced_batch_norms(trainer: pl.Trainer) -> bool:
    """Whether the trainer replaces BatchNorms by torch's SyncBatchNorm."""
    return trainer._accelerator_connector._layer_sync is not None


def leave_unscaling_to_lightning(optimizer: Optimizer) -> None:
    """Let gradients of a fused optimizer be clipped under mixed precision. Such an optimizer offers to unscale the
    gradients itself, and Lightning then refuses to clip them, in bfloat16 too, which has no scale."""
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def trainer_of(model: pl.LightningModule) -> pl.Trainer | None:
    """The model's trainer; None if it has none. Lightning's own property raises an error then."""
    return model._trainer


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Whether the gradients of the finished batch are accumulated: the optimizer waits for another batch."""
    return trainer.fit_loop._should_accumulate()


def is_followed_by_validation(trainer: pl.Trainer) -> bool:
    """Whether a validation follows the finished batch: at the end of an epoch, or at a val_check_interval."""
    fit_loop: Any = trainer.fit_loop
    return trainer.enable_validation and fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher)


def callbacks_of(trainer: pl.Trainer, *kinds: type[_Kind]) -> list[_Kind]:
    """The trainer's callbacks of some kinds, in their order."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, kinds)]


def is_finding_learning_rate(trainer: pl.Trainer) -> bool:
    """Whether a LearningRateFinder is running."""
    return bool(callbacks_of(trainer, _LRCallback))


def is_resumed_averaging(callback: pl.Callback) -> bool:
    """Whether the callback is a StochasticWeightAveraging that resumes in the middle of its learning-rate schedule."""
    return isinstance(callback, StochasticWeightAveraging) and callback._scheduler_state is not None


def take_average(callback: StochasticWeightAveraging, model: pl.LightningModule) -> None:
    """Copy the averaged weights to the model; the callback itself does not do so if a training ends early."""
    assert callback._average_model is not None
    callback.transfer_weights(callback._average_model, model)


def running_averages(trainer: pl.Trainer) -> list[Any]:
    """The models that contain running averages of the trained model's weights and buffers, of the same class."""
    averages = [callback._average_model for callback in callbacks_of(trainer, WeightAveraging)]
    return [average.module for average in averages if average is not None]


def has_averaged(callback: WeightAveraging) -> bool:
    """Whether a WeightAveraging has updated its averages at least once."""
    return callback._average_model is not None and bool(callback._average_model.n_averaged)


@torch.no_grad()
def keep_unbegun_averages(trainer: pl.Trainer, model: pl.LightningModule) -> None:
    """Copy the model's weights and buffers to averages that were not updated yet. Lightning copies them before the
    model is set up, and validates, saves and tests that copy until the first update."""
    for callback in callbacks_of(trainer, WeightAveraging):
        if callback._average_model is not None and not has_averaged(callback):
            average = callback._average_model.module
            for theirs, ours in zip(_tensors_of(average), _tensors_of(model), strict=True):
                theirs.copy_(ours)


def _tensors_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def watched_figure(states: Mapping[str, Any], kind: str) -> tuple[str, bool]:
    """The figure that a ModelCheckpoint monitors, and whether the lowest is the best.

    Args:
        states: The states of callbacks in a checkpoint.
        kind: The name of the class of the ModelCheckpoint.
    """
    (key,) = (key for key in states if key.startswith(f"{kind}{{"))
    settings = ast.literal_eval(key.removeprefix(kind))
    return settings["monitor"], settings["mode"] == "min"


class _ExactFitLoop(_FitLoop):
    @property
    def done(self) -> bool:
        """Whether the last validation is over too. Lightning runs none in a resumed training whose max_steps is
        reached, but ``put_before_validation`` places checkpoints there."""
        validated: Any = self.epoch_loop.val_loop.batch_progress.total
        is_to_be_validated = self.epoch_loop.restarting and validated.processed == validated.started - 1
        return super().done and not is_to_be_validated

    def _iteration_based_training(self) -> bool:
        """Never: with max_steps Lightning takes every epoch for an unfinished one. From a checkpoint of an epoch's end
        it counts this epoch twice, and trains a batch more than the epoch has if no validation followed."""
        return False


def resume_exactly(trainer: pl.Trainer) -> None:
    """Make a resumed training go on exactly where its checkpoint was saved, which Lightning does not always do."""
    trainer.fit_loop.__class__ = _ExactFitLoop


def count_from_what_is_validated(trainer: pl.Trainer) -> None:
    """Make a resumed validation count the batch in which it was stopped once. Lightning counts it as started twice; a
    checkpoint from the end of this validation would then seem to be from its middle."""
    batches: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
    batches.ready = batches.started = batches.processed


def put_before_validation(fit_loop: dict[str, Any]) -> None:
    """Set a checkpoint's counters so that a resumed training first runs a whole validation.

    Otherwise Lightning would skip the validation after the finished batch, and would resume an interrupted validation
    in its middle.
    """
    for part in ("total", "current"):
        train = fit_loop["epoch_loop.batch_progress"][part]
        train["completed"] = train["processed"]
        val = fit_loop["epoch_loop.val_loop.batch_progress"][part]
        val.update(ready=1, started=1, processed=0, completed=0)
