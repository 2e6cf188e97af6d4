"""The commands that train and use a model: LightningCLI with longseq's defaults and behaviour."""

import os
import shlex
import sys
import time
from argparse import SUPPRESS
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from numbers import Number
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
import yaml
from jsonargparse import Namespace
from jsonargparse.typing import register_type
from pytorch_lightning.cli import ArgsType, LightningArgumentParser
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only, rank_zero_warn
from torch.distributed import is_torchelastic_launched

from longseq.cli.command_list import COMMANDS
from longseq.cli.data_commands import Trainer
from longseq.cli.errors import UserError
from longseq.cli.errors.parsing import OneLineParser, refused_in_building, user_error_in
from longseq.cli.names import shown
from longseq.cli.predict.command import predict, progress_bars
from longseq.cli.process.ranks import name_awaited_ranks
from longseq.cli.runs.callbacks import (
    FINDERS,
    BestCheckpoint,
    RunRecord,
    SavedConfig,
    callbacks_of_training,
    make_no_folders,
    take_off,
)
from longseq.cli.runs.folders import (
    curves_name,
    experiment_of,
    forget,
    from_here,
    new_run,
    refuse_full_disk,
    sole_use_of,
    write_metrics,
)
from longseq.cli.runs.folds import Fold, folds_left, folds_of, write_report
from longseq.cli.runs.growing import Stage, refuse_wrong_stages, stages_left, stages_of
from longseq.cli.runs.resuming import (
    refuse_fewer_epochs,
    refuse_other_classes,
    refuse_other_data,
    refuse_other_optimizer,
    restore_config,
    take_findings,
)
from longseq.cli.runs.seen_samples import say_if_trained_on
from longseq.cli.runs.train_and_test import baseline_of, evaluate_best, fit_baseline_before, train
from longseq.cli.settings import (
    LINKS,
    Asked,
    asked_for,
    refuse_incomplete_data,
    refuse_unexpected_classes,
    refuse_wrong_settings,
    without_resume,
)
from longseq.cli.trainer_flags import (
    is_of_restoring,
    refuse_other_number_of_tasks,
    refuse_useless_precision,
    refuse_wrong_numbers,
    warn_of_slow_precision,
    wrong_flag,
)
from longseq.compat.lightning import CommandLine, callbacks_of
from longseq.deploy.card import write_card
from longseq.files.checkpoint import CheckpointError, WholeCheckpoints, changed_settings, refuse_other_shapes
from longseq.files.description import describe
from longseq.training import Classifier
from longseq.training.answers.events import Settings
from longseq.training.board.by_class import ByClass
from longseq.training.board.event_figures import EventFigures
from longseq.training.board.tensorboard import Confusions
from longseq.training.timed import Timed

# Lightning's callbacks have devices and enums as defaults, and torchvision's transforms take any kind of number.
# Without these lines config.yaml could not hold them, and the run could not be resumed.
register_type(torch.device)
register_type(Number, float, float, type_check=isinstance)
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, value: dumper.represent_data(value.value))


# Arguments of Lightning's methods that the command line fills in itself; a checkpoint is always read with weights_only.
_NO_FLAGS = {
    "model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders", "weights_only", "verbose",
    "return_predictions",
}  # fmt: skip


@dataclass(frozen=True)
class Following:
    """The next run of a command that trains several, with --grow or --folds.

    Attributes:
        base: The arguments that all of its runs share.
        flags: Those of the next run.
        later: What is trained after it.
    """

    base: list[str]
    flags: list[str]
    later: Sequence[Stage | Fold]


class Commands(CommandLine):
    """Parses, builds data, model and trainer, and runs one command.

    Args:
        args: The command and its arguments.
        begin: What to train, if a run of the same command has just ended.
        began: When it was started, on time.monotonic's clock; if absent, now.

    Attributes:
        tested: The path of the checkpoint that fit has tested.
    """

    data_commands = tuple(name for name, command in COMMANDS.items() if not command.needs_model)

    def __init__(self, args: list[str], begin: Following | None = None, began: float | None = None) -> None:
        self.args = args if begin is None else without_resume(args)
        self.begin, self.tested = begin, ""
        self.began = time.monotonic() if began is None else began
        self._base: list[str] = []
        self._later: Sequence[Stage | Fold] = []
        self.asked = Asked(args, has_resume=False)
        self.record: RunRecord | None = None
        self.held = ExitStack()  # keeps the lock of the run until the command ends
        try:
            with self.held:
                super().__init__(
                    Classifier,
                    pl.LightningDataModule,
                    trainer_class=Trainer,
                    subclass_mode_data=True,
                    parser_class=OneLineParser,
                    seed_everything_default=0,
                    save_config_callback=SavedConfig,
                    trainer_defaults={"enable_model_summary": False, "log_every_n_steps": 10, "devices": 1},
                    auto_configure_optimizers=False,  # the classifier knows which weights must not decay
                    load_from_checkpoint_support=False,  # the classifier stores its own description, also from Python
                )
        except BaseException as error:
            self._forget_what_has_not_begun()
            if self.asked.checkpoint is not None and is_of_restoring(error):
                what = f"{type(error).__name__}: {' '.join(str(error).split())}"
                raise CheckpointError(f"ckpt_path: the checkpoint cannot be restored ({what}); give another") from error
            raise

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {name: _NO_FLAGS for name, command in COMMANDS.items() if not command.function}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--experiment",
            type=str | None,
            help="Name of the runs' folder; by default that of your data or config file.",
        )
        parser.add_argument(
            "--peak_flops",
            type=float | None,
            help="The device's dense peak in FLOP/s, to log MFU if longseq does not know it.",
        )
        parser.add_argument(
            "--resume", type=bool | str, default=False,
            help="Resume the newest unfinished run of the experiment, or the run in this folder.",
        )  # fmt: skip
        parser.add_argument(
            "--grow",
            type=str | None,
            help="Train on small images first: sizes, epochs and learning rates, such as 16x16:40,32x32:8@1e-3.",
        )
        parser.add_argument(
            "--folds",
            type=int | None,
            help="Cross-validation: a run for each of so many folds of the data, and a table with mean and spread.",
        )
        parser.add_argument(
            "--minutes",
            type=float | None,
            help="Train so long, and not so many epochs: the command ends then, its test included.",
        )
        parser.add_argument(
            "--baseline", type=bool, default=True, help="Compare the trained model with a simple one, in seconds."
        )
        parser.add_argument(
            "--checkpoint_minutes", type=float, default=10.0, help="Most minutes between two checkpoints of a training."
        )
        parser.add_argument(
            "--skip_bad_steps", type=int, default=0, help="Most steps in a row to leave out if the loss is not finite."
        )
        parser.add_argument(
            "--allow_class",
            type=str | list[str],
            default=[],
            help="A package whose classes may be named, besides those of longseq.",
        )
        parser.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
        for source, target in LINKS.items():
            parser.link_arguments(source, target, apply_on="instantiate")

    def add_arguments_to_data_command(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(pl.LightningDataModule, "data", subclass_mode=True)
        for name in ("model", "trainer", "seed_everything", "experiment", "allow_class"):
            parser.add_argument(f"--{name}", type=Any, default=False, help=SUPPRESS)
        parser.add_argument("--debug", action="store_true", help="Show the traceback of an error.")

    def add_arguments_to_command(self, command: str, parser: LightningArgumentParser) -> None:
        if command == "predict":
            parser.add_argument("--input", type=str, required=True, help="A file, or a folder of files, to classify.")
            parser.add_argument("--window", type=float | None, help="Hear sounds in windows of so many seconds.")
            parser.add_argument("--hop", type=float | None, help="Seconds from one window to the next.")
            parser.add_argument("--top", type=int | None, help="Name so many classes, the most probable first.")
            parser.add_argument(
                "--out", type=str | None, help="Write a .csv, .jsonl or .json file; a stopped run goes on with it."
            )
            parser.add_argument(
                "--events", type=str | None, help="Write what is heard when: .csv, .txt for Audacity, .tsv for Raven."
            )
            parser.add_argument("--picture", type=str | None, help="Draw a recording with its events.")
            parser.add_argument("--embeddings", type=str | None, help="Write the features of every file: .npz.")
            usual = Settings()
            parser.add_argument("--threshold", type=float | None, help="The probability that an event reaches.")
            parser.add_argument(
                "--smooth", type=float, default=usual.smooth, help="Seconds over which probabilities are averaged."
            )
            parser.add_argument("--gap", type=float, default=usual.gap, help="Seconds of silence that end no event.")
            parser.add_argument("--shortest", type=float, default=usual.shortest, help="Seconds of the shortest event.")

    @property
    def settings(self) -> Namespace:
        """The configuration of the command that was asked for."""
        return self.config[self.config.subcommand]

    # Parsing

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the flags. They override the configuration of the checkpoint or of the resumed run."""
        args = self.args if self.begin is None else [*self.begin.base, *self.begin.flags]
        self.asked = asked_for(parser, args, self.held)
        self.config = parser.parse_args(self.asked.args)
        if self.config.subcommand == "fit":
            flags = self._flags_of_run(self.settings)
            if flags:
                self.config = parser.parse_args([*self.asked.args, *flags])
        is_of_data = self.config.subcommand in self.data_commands
        refuse_unexpected_classes(self.settings, is_of_data)
        if is_of_data:
            return
        refuse_wrong_settings(self.settings, self.asked)
        if self.config.subcommand == "fit":
            refuse_useless_precision(self.settings.trainer)
            self.experiment = experiment_of(self.settings)

    def _flags_of_run(self, settings: Namespace) -> list[str]:
        """With --grow or --folds, find what is to be trained now, and return its flags."""
        if settings.grow is None and settings.folds is None:
            return []
        if settings.grow is not None and settings.folds is not None:
            raise UserError("folds: not together with --grow; give one of the two")
        refuse_wrong_numbers(settings)
        if self.begin is not None:
            self._base, self._later = self.begin.base, self.begin.later
            return self.begin.flags
        resumed = self.asked.resumed
        if resumed is None:
            self._base = self.asked.args
            experiment = Path(settings.trainer.default_root_dir or ".").expanduser() / "runs" / experiment_of(settings)
        else:  # the command may name nothing but the run
            experiment = resumed.absolute().parent
            root = str(experiment.parent.parent)
            without_checkpoint = self.asked.args[:-2]  # --ckpt_path and its value
            self._base = [*without_checkpoint, "--experiment", experiment.name, "--trainer.default_root_dir", root]
        if settings.grow is not None:
            stages = stages_of(settings.grow, settings.data)
            tested, left = stages_left(experiment, settings.grow, stages, resumed, self.asked.has_resume)
        else:
            assert settings.folds is not None
            tested, left = None, folds_of(settings.folds, settings.data)
            if self.asked.has_resume:
                plain = yaml.safe_load(self._parser("fit").dump(settings, skip_unset=False))
                left = folds_left(experiment, left, resumed, plain)
            if not left:
                rank_zero_only(write_report)(experiment, settings.folds, self.args)
                sys.exit(0)
        now, *self._later = left
        return now.flags(tested)

    @property
    def following(self) -> Following | None:
        """With --grow or --folds, what is trained after this run; None after the last one."""
        if not self._later:
            return None
        now, *later = self._later
        return Following(self._base, now.flags(self.tested), later)

    def _settings_with(self, flags: list[str]) -> Namespace:
        """The configuration that another run of this command has with its flags."""
        return self.parser.parse_args([*self._base, *flags]).fit

    def _forget_what_has_not_begun(self) -> None:
        if self.record is None or self.record.has_begun:
            return
        if self.asked.resumed is None:
            rank_zero_only(forget)(self.record.run)
        else:  # otherwise the next --resume would read the settings that failed now
            with suppress(UserError):  # a file that is damaged by now must not hide the error
                rank_zero_only(restore_config)(self.record.run, self.asked.started_with)

    # Building

    def instantiate_classes(self) -> None:
        """Build data, model and trainer; a value that one of them refuses is the user's mistake."""
        try:
            if self.subcommand in self.data_commands:
                parts: Any = (self.instantiate_data(), None, Trainer)
                self.datamodule, self.model, self.trainer = parts
                refuse_incomplete_data(self.datamodule)
                return
            super().instantiate_classes()
        except Exception as error:
            refused = refused_in_building(error, self.settings.as_dict())
            if refused is None:
                raise
            raise refused from (None if refused is user_error_in(error) else error)
        checkpoint = self.asked.checkpoint
        if checkpoint is None:
            return
        is_training = self.subcommand == "fit"
        if is_training or self.model.task.predicts:
            refuse_other_classes(checkpoint, self.settings, self.model.class_names, is_training)
        refuse_other_shapes(checkpoint, self.model)
        for change in changed_settings(checkpoint, self.model):
            rank_zero_warn(f"{change}: the weights were trained with the checkpoint's value")
        if self.asked.resumed is not None:
            take_findings(checkpoint, self.asked.started_with, self.settings, self.model, self.datamodule)
        if is_training:
            refuse_other_optimizer(checkpoint, self.model)
            refuse_fewer_epochs(checkpoint, self.trainer)

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        config = self.settings
        if self.subcommand == "predict" and is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1:
            what = f"predict uses one process, got {os.environ['WORLD_SIZE']}"
            raise UserError(f"trainer.devices: {what}; start it without torchrun")
        kwargs["plugins"] = [WholeCheckpoints(self.asked.checkpoint)]
        if is_torchelastic_launched():  # torchrun has started the processes, so it alone knows how many there are
            devices = int(os.environ["LOCAL_WORLD_SIZE"])
            kwargs |= {"devices": devices, "num_nodes": int(os.environ["WORLD_SIZE"]) // devices}
        if self.subcommand != "fit":
            self.save_config_callback = None  # only fit has a run folder to save it in
            kwargs["logger"] = False
            if self.subcommand == "predict":
                bars = [] if config.trainer.enable_progress_bar is False else progress_bars()
                kwargs["enable_progress_bar"] = bool(bars)
                self.trainer_defaults["callbacks"] = bars
                kwargs |= {"devices": 1, "num_nodes": 1, "strategy": "auto"}  # else each process has only a share
            else:
                self.trainer_defaults["callbacks"] = [EventFigures()]
            return self._trainer(**kwargs)
        refuse_incomplete_data(self.datamodule)
        try:
            describe(self.datamodule)
        except TypeError as error:
            raise UserError(f"data: {error}; a checkpoint names the data by its arguments") from error
        if self.begin is None:
            stages = [later for later in self._later if isinstance(later, Stage)]
            refuse_wrong_stages(stages, self._settings_with, self.model, self.datamodule, config)
        root = Path(config.trainer.default_root_dir or ".").expanduser()  # as Lightning does
        # only rank zero makes the folder; Lightning broadcasts its path to the other ranks
        rank_zero = rank_zero_only.rank == 0
        resumed = self.asked.resumed
        run = resumed or (new_run(root, self.experiment) if rank_zero else root / "runs" / self.experiment)
        self.record, self.best = RunRecord(run), BestCheckpoint(run, self.model.task)
        if rank_zero:
            if resumed is None:
                self.held.enter_context(sole_use_of(run))
            refuse_full_disk(run, self.model)
        if config.trainer.logger is not False:
            # the resumed run logs the points after its checkpoint again: without this, its curves would hold them twice
            again = {"purge_step": self.asked.checkpoint["global_step"]} if resumed and self.asked.checkpoint else {}
            shown_as = curves_name(self.model, config.seed_everything)
            board = TensorBoardLogger(
                run.parent.parent, run.parent.name, run.name, default_hp_metric=False, sub_dir=shown_as, **again
            )
            named = self._get(self.config_init, "trainer")["logger"]  # the user's own are added to TensorBoard's
            others = named if isinstance(named, list | tuple) else [] if named in (None, True) else [named]
            kwargs["logger"] = [board, *others]
        self.model.bad_steps.allowed = config.skip_bad_steps
        self.trainer_defaults["callbacks"] = callbacks_of_training(
            self.best, self.record, config, resumed is not None, self.command_line, self.began
        )
        if config.minutes is not None:
            kwargs |= {"max_epochs": -1, "max_steps": -1}
        trainer = self._trainer(**kwargs)
        make_no_folders(trainer)
        warn_of_slow_precision(trainer)
        if self.asked.checkpoint is not None:
            take_off(trainer, *FINDERS)
        return trainer

    def _trainer(self, **kwargs: Any) -> pl.Trainer:
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except Exception as error:  # only Lightning's code runs here, so a flag of the trainer is wrong
            raise wrong_flag(error, self.settings.trainer) from error
        refuse_other_number_of_tasks(trainer)
        name_awaited_ranks(trainer, self._forget_what_has_not_begun)
        return trainer

    @property
    def command_line(self) -> str:
        """The command as a shell takes it."""
        return f"longseq {shlex.join(self.args)}"

    # Running

    def fit(self, model: Classifier, datamodule: Any, ckpt_path: str | None = None) -> None:
        """Train, test the best checkpoint, and print where everything is."""
        if self.settings.folds is not None:
            rank_zero_only(print)(f"fold {datamodule.fold} of {datamodule.folds}")
        if self.asked.checkpoint is not None and rank_zero_only.rank == 0:
            datamodule.prepare_data()
            datamodule.setup("fit")  # check the data before the run writes anything
            refuse_other_data(self.asked.checkpoint, self.settings.ckpt_path, datamodule.identity)
        if self.settings.minutes is not None and self.settings.baseline:
            fit_baseline_before(self.trainer, model, datamodule)
        train(self.trainer, model, datamodule, ckpt_path, self.settings)
        self.tested, figures = evaluate_best(self.trainer, model, datamodule, self.best)
        if not self.trainer.is_global_zero:
            return
        assert self.record is not None
        (by_class,) = callbacks_of(self.trainer, ByClass)
        (confusions,) = callbacks_of(self.trainer, Confusions)
        (of_events,) = callbacks_of(self.trainer, EventFigures)
        best = model.task.best
        if f"test/{best}" in figures:
            print(f"test {best + ':':<9} {figures[f'test/{best}']:.4f}")
        for name in ("event_recall", "event_precision"):
            if f"test/{name}" in figures:
                print(f"test {name}: {figures[f'test/{name}']:.4f}")
        is_last_size = self.settings.grow is None or not self._later
        baseline = None
        if self.settings.baseline and is_last_size:
            baseline = baseline_of(self.trainer, model, datamodule, figures.get("test/accuracy"))
            figures |= {} if baseline is None else baseline.figures
        found = figures, {**by_class.figures, **of_events.by_class}, confusions.of_test
        course = "".join(item.summary(self.trainer) for item in callbacks_of(self.trainer, Timed))
        write_card(self.record.run, model, datamodule, *found, self.tested, self.command_line, baseline, course)
        write_metrics(self.record.run, figures)  # the last, because with it the run counts as finished
        print(shown(f"checkpoint:    {from_here(self.tested)}"))
        print(shown(f"logs:          {self.record.run}"))
        if self.settings.folds is not None and not self._later:
            write_report(self.record.run.parent, self.settings.folds, self.args)

    def validate(self, model: Classifier, datamodule: pl.LightningDataModule, ckpt_path: str) -> None:
        """Print the figures of the validation split."""
        self._report(self.trainer.validate(model, datamodule=datamodule, ckpt_path=ckpt_path, verbose=False))
        self._say_if_trained_on(ckpt_path, "val", datamodule)

    def test(self, model: Classifier, datamodule: pl.LightningDataModule, ckpt_path: str) -> None:
        """Print the figures of the test split."""
        self._report(self.trainer.test(model, datamodule=datamodule, ckpt_path=ckpt_path, verbose=False))
        self._say_if_trained_on(ckpt_path, "test", datamodule)

    def predict(self, model: Classifier, datamodule: Any, ckpt_path: str) -> None:
        """Print or write path, class and probability of each input; with --window also when, with --events events."""
        assert self.asked.checkpoint is not None
        predict(self.trainer, model, datamodule, self.asked.checkpoint, self.config.predict)

    def _say_if_trained_on(self, ckpt_path: str, split: Literal["val", "test"], datamodule: Any) -> None:
        if self.trainer.is_global_zero:
            say_if_trained_on(ckpt_path, split, datamodule)

    def _report(self, results: Any) -> None:
        if not results:
            raise UserError("trainer: no batch of the split was evaluated; remove the limit on its batches")
        if self.trainer.is_global_zero:
            for name, value in sorted(results[0].items()):
                print(f"{name.replace('/', ' ') + ':':<15} {value:.4f}")
