"""Lightning: its command line, loops, launcher and handler of signals, and the layout of its checkpoints."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytorch_lightning as pl
from lightning_fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from pytorch_lightning.callbacks import StochasticWeightAveraging
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.trainer.connectors.signal_connector import _SignalConnector
from pytorch_lightning.tuner.lr_finder import _LRCallback


class CommandLine(LightningCLI):
    """LightningCLI with commands of the data alone, further flags for each command, and checkpoints left to us.

    Only the command that is asked for gets its flags: adding those of all seven takes a second.
    """

    args: list[str]  # the command and what follows it
    data_commands: ClassVar[tuple[str, ...]] = ()

    def add_arguments_to_data_command(self, parser: LightningArgumentParser) -> None:
        """Add the flags of a command that needs data alone; it has no others."""

    def add_arguments_to_command(self, command: str, parser: LightningArgumentParser) -> None:
        """Add flags of one command to its parser, which has those that all commands have."""

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        if subcommand != self.args[0]:
            return self.init_parser(**kwargs)
        if subcommand in self.data_commands:
            parser = self.init_parser(**kwargs)
            self._subcommand_method_arguments[subcommand] = []
            self.add_arguments_to_data_command(parser)
            return parser
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        self.add_arguments_to_command(subcommand, parser)
        return parser

    def _parse_ckpt_path(self) -> None:
        """Nothing: Lightning would let the checkpoint's hyperparameters silently beat the flags."""

    def instantiate_data(self) -> Any:
        """The data module alone."""
        self.config_init = self.parser.instantiate(self.config)
        return self._get(self.config_init, "data")


def leave_sigterm_to_us() -> None:
    """Keep Lightning's handler of SIGTERM from doing anything of its own: it would end with 0, and wait for ranks that
    are busy otherwise. It calls the handler that was there before it."""
    _SignalConnector._sigterm_notifier_fn = lambda *_: None  # type: ignore[method-assign]


def end_with_dead_rank(is_ending: Callable[[], bool], exit_code: int) -> None:
    """Let Lightning, which ends all ranks when one has died, say which one it was, and end with a code of its own.

    Args:
        is_ending: Whether this process ends already, with all others.
        exit_code: Of the process that has started the ranks.
    """

    def end_all(self: Any) -> None:
        if is_ending():
            return
        for rank, process in enumerate(self._child_processes, start=1):
            if process.returncode:
                how = f"signal {signal.Signals(-process.returncode).name}" if process.returncode < 0 else "an error"
                print(
                    f"error: rank {rank}: process {process.pid} was ended by {how}, and all others with it; "
                    "mend the cause, then --resume",
                    file=sys.stderr,
                    flush=True,
                )
        for process in self._child_processes:
            process.kill()
        os._exit(exit_code)

    _ChildProcessObserver._terminate_all = end_all  # type: ignore[method-assign]


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Whether the gradients of the batch that is over wait for those of the next one."""
    return trainer.fit_loop._should_accumulate()


def is_followed_by_validation(trainer: pl.Trainer) -> bool:
    """Whether the batch that is over is an epoch's last one, and a validation comes before the next."""
    loop = trainer.fit_loop.epoch_loop
    return loop.batch_progress.is_last_batch and trainer.enable_validation and loop._should_check_val_epoch()


def is_finding_learning_rate(trainer: pl.Trainer) -> bool:
    """Whether a LearningRateFinder is at work."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return any(isinstance(callback, _LRCallback) for callback in callbacks)


def is_resumed_averaging(callback: pl.Callback) -> bool:
    """Whether it is a StochasticWeightAveraging that goes on in the midst of its course of the learning rate."""
    return isinstance(callback, StochasticWeightAveraging) and callback._scheduler_state is not None


def take_average(callback: StochasticWeightAveraging, model: pl.LightningModule) -> None:
    """Give the model the weights that were averaged, which the callback leaves out where a training ends early."""
    assert callback._average_model is not None
    callback.transfer_weights(callback._average_model, model)


def put_before_validation(fit_loop: dict[str, Any]) -> None:
    """Set a checkpoint's counters to those that Lightning goes on from with a whole validation.

    It would leave the validation out after an epoch's last batch, and begin one in the middle in the middle.
    """
    for part in ("total", "current"):
        train = fit_loop["epoch_loop.batch_progress"][part]
        train["completed"] = train["processed"]
        val = fit_loop["epoch_loop.val_loop.batch_progress"][part]
        val.update(ready=1, started=1, processed=0, completed=0)
