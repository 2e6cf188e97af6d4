"""The commands that train and use a model: LightningCLI with longseq's defaults."""

import os
import shlex
import sys
import time
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import Enum
from numbers import Number
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
from longseq.cli.errors.building import refused_in_building, user_error_in
from longseq.cli.errors.parsing import OneLineParser
from longseq.cli.flags import FLAGS, FLAGS_OF_PREDICT, add_flags
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
    from_here,
    new_run,
    refuse_full_disk,
    sole_use_of,
    write_metrics,
)
from longseq.cli.runs.folds import Fold, folds_left, folds_of, write_report
from longseq.cli.runs.growing import Stage, refuse_wrong_stages, stages_left, stages_of
from longseq.cli.runs.resuming import (
    refuse_damaged_content,
    refuse_fewer_epochs,
    refuse_other_classes,
    refuse_other_data,
    refuse_other_optimizer,
    take_findings,
)
from longseq.cli.runs.seen_samples import say_if_trained_on
from longseq.cli.runs.train_and_test import (
    baseline_of,
    evaluate_best,
    fit_baseline_before,
    say_if_near_chance,
    train,
    where_to_look_next,
)
from longseq.cli.settings import (
    LINKS,
    asked_for,
    refuse_incomplete_data,
    refuse_nulls,
    refuse_other_inputs,
    refuse_unexpected_classes,
    refuse_wrong_settings,
    without_resume,
)
from longseq.cli.trainer_flags import (
    refuse_other_number_of_tasks,
    refuse_wrong_numbers,
    use_tensor_cores,
    warn_of_slow_precision,
    wrong_flag,
)
from longseq.compat.lightning import CommandLine, callbacks_of, restore_within
from longseq.deploy.card import interval_of, num_tested_of, write_card
from longseq.files.checkpoint import WholeCheckpoints, changed_settings, refuse_other_shapes
from longseq.files.description import describe
from longseq.training import Classifier
from longseq.training.board.by_class import ByClass
from longseq.training.board.event_figures import EventFigures
from longseq.training.board.tensorboard import Confusions
from longseq.training.energy import EnergyMeter
from longseq.training.timed import Timed

# Lightning's callbacks have devices and enums as defaults, and torchvision's transforms accept any kind of number.
# Without these lines config.yaml could not hold them, and the run could not be resumed.
register_type(torch.device)
register_type(Number, float, float, type_check=isinstance)
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, value: dumper.represent_data(value.value))


# Arguments of Lightning's methods that the command line sets itself; weights_only is always true.
_NO_FLAGS = {
    "model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders", "weights_only", "verbose",
    "return_predictions",
}  # fmt: skip


class Series(NamedTuple):
    """The runs of a command that trains several models, with --grow or --folds.

    Attributes:
        base: The arguments that all runs share.
        left: The runs that are still to be trained, in order.
        tested: The checkpoint that the previous run tested, or from which the first run starts.
    """

    base: list[str]
    left: Sequence[Stage | Fold]
    tested: str | None

    def flags(self) -> list[str]:
        """The flags of the next run."""
        return self.left[0].flags(self.tested)


def run(args: list[str], began: float) -> None:
    """Run a command: once, or with --grow or --folds several runs in turn.

    Args:
        args: The command and its arguments.
        began: The start of the process, on the clock of time.monotonic.
    """
    series = _run_once(args, None, began)
    while series is not None and series.left:
        series = _run_once(without_resume(args), series, time.monotonic())


def _run_once(args: list[str], series: Series | None, began: float) -> Series | None:
    with ExitStack() as held:
        command = Commands(args, held, series, began)
        command.run()
    return command.series


class Commands(CommandLine):
    """Parses a command and builds its data, model and trainer; `run` runs it.

    Args:
        args: The command and its arguments.
        held: A stack that keeps the run's folder locked until it is closed. If an error closes it before the first
            step, what the run has written is undone.
        series: The runs that are left of a command that trains several; None for the first run.
        began: The start of this run, on the clock of time.monotonic.
    """

    data_commands = tuple(name for name, command in COMMANDS.items() if not command.needs_model)

    def __init__(
        self, args: list[str], held: ExitStack, series: Series | None = None, began: float | None = None
    ) -> None:
        self.args, self.held, self.series, self.is_first = args, held, series, series is None
        self.began = time.monotonic() if began is None else began
        super().__init__(
            Classifier,
            pl.LightningDataModule,
            trainer_class=Trainer,
            subclass_mode_data=True,
            parser_class=OneLineParser,
            seed_everything_default=0,
            save_config_callback=SavedConfig,
            trainer_defaults={"enable_model_summary": False, "log_every_n_steps": 10, "devices": 1},
            auto_configure_optimizers=False,  # the classifier decides which weights must not decay
            load_from_checkpoint_support=False,  # the classifier stores its own description, also when used from Python
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {name: _NO_FLAGS for name, command in COMMANDS.items() if not command.package}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add_flags(parser, FLAGS)
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
            add_flags(parser, FLAGS_OF_PREDICT)

    @property
    def settings(self) -> Namespace:
        """The configuration of the command."""
        return self.config[self.config.subcommand]

    # Parsing

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the flags. They override the configuration of the checkpoint or of the resumed run."""
        given = self.args if self.series is None else [*self.series.base, *self.series.flags()]
        self.asked = asked_for(parser, given, self.held)
        self.config = parser.parse_args(self.asked.args)
        is_training, is_of_data = (self.config.subcommand in names for names in (("fit",), self.data_commands))
        if is_training and self.is_first and (self.settings.grow is not None or self.settings.folds is not None):
            self.series = self._series(self.settings)
            self.config = parser.parse_args([*self.asked.args, *self.series.flags()])
        refuse_unexpected_classes(self.settings, is_of_data)
        config = self.settings.as_dict()
        if is_of_data:  # the rest was not read: its classes have the names that the user gave
            refuse_nulls({"data": config["data"]})
            return
        refuse_nulls(config)
        refuse_wrong_settings(self.settings, self.asked)
        if is_training:
            if str(self.settings.trainer.precision) == "16-true":
                what = "16-true has weights of float16, in which AdamW divides by 0"
                raise UserError(f"trainer.precision: {what}; give 16-mixed or bf16-true")
            experiment_of(self.settings)  # called to refuse a wrong name before anything is built

    def _series(self, settings: Namespace) -> Series:
        """The runs that --grow or --folds still has to train."""
        if settings.grow is not None and settings.folds is not None:
            raise UserError("folds: not together with --grow; give one of the two")
        refuse_wrong_numbers(settings)
        resumed, base = self.asked.resumed, self.asked.args
        if resumed is None:
            experiment = Path(settings.trainer.default_root_dir or ".").expanduser() / "runs" / experiment_of(settings)
        else:  # the command may name only the run
            experiment = resumed.absolute().parent
            root = str(experiment.parent.parent)
            without_checkpoint = base[:-2]  # --ckpt_path and its value
            base = [*without_checkpoint, "--experiment", experiment.name, "--trainer.default_root_dir", root]
        if settings.grow is not None:
            stages = stages_of(settings.grow, settings.data)
            tested, left = stages_left(experiment, settings.grow, stages, resumed, self.asked.has_resume)
            return Series(base, left, tested)
        assert settings.folds is not None
        folds = folds_of(settings.folds, settings.data)
        if self.asked.has_resume:
            plain = yaml.safe_load(self._parser("fit").dump(settings, skip_unset=False))
            folds = folds_left(experiment, folds, resumed, plain)
        if not folds:
            rank_zero_only(write_report)(experiment, settings.folds, self.args)
            sys.exit(0)
        return Series(base, folds, None)

    # Building

    def instantiate_classes(self) -> None:
        """Build data, model and trainer. A value that one of them refuses is reported as the user's mistake."""
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
        if self.subcommand == "predict" and is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1:
            what = f"predict uses one process, got {os.environ['WORLD_SIZE']}"
            raise UserError(f"trainer.devices: {what}; start it without torchrun")
        kwargs["plugins"] = [WholeCheckpoints(self.asked.checkpoint)]
        if is_torchelastic_launched():  # torchrun started the processes, so only it knows their number
            devices = int(os.environ["LOCAL_WORLD_SIZE"])
            kwargs |= {"devices": devices, "num_nodes": int(os.environ["WORLD_SIZE"]) // devices}
        if self.subcommand == "fit":
            return self._trainer_of_fit(**kwargs)
        self.save_config_callback = None  # only fit has a run folder for it
        kwargs["logger"] = False
        if self.subcommand == "predict":
            bars = [] if self.settings.trainer.enable_progress_bar is False else progress_bars()
            kwargs["enable_progress_bar"] = bool(bars)
            self.trainer_defaults["callbacks"] = bars
            kwargs |= {"devices": 1, "num_nodes": 1, "strategy": "auto"}  # otherwise each process gets only some files
        else:
            self.trainer_defaults["callbacks"] = [EventFigures()]
        return self._trainer(lambda: None, **kwargs)

    def _trainer_of_fit(self, **kwargs: Any) -> pl.Trainer:
        """Make and lock the run's folder, and build the trainer that logs and saves in it."""
        config, checkpoint, resumed = self.settings, self.asked.checkpoint, self.asked.resumed
        refuse_incomplete_data(self.datamodule)
        refuse_other_inputs(self.model.encoder, self.datamodule)
        try:
            describe(self.datamodule)
        except TypeError as error:
            raise UserError(f"data: {error}; a checkpoint names the data by its arguments") from error
        if self.series is not None and self.is_first:
            stages = [later for later in self.series.left[1:] if isinstance(later, Stage)]
            base = self.series.base
            refuse_wrong_stages(
                stages, lambda flags: self.parser.parse_args([*base, *flags]).fit, self.model, self.datamodule, config
            )
        root = Path(config.trainer.default_root_dir or ".").expanduser()  # as in Lightning
        # only rank zero makes the folder, and Lightning broadcasts its path to the other ranks
        rank_zero, experiment = rank_zero_only.rank == 0, experiment_of(config)
        run = resumed or (new_run(root, experiment) if rank_zero else root / "runs" / experiment)
        record = RunRecord(run, None if resumed is None else self.asked.started_with)
        self.held.push(lambda kind, *_: kind and record.undo())
        if rank_zero:
            if resumed is None:
                self.held.enter_context(sole_use_of(run))
            refuse_full_disk(run, self.model)
        if config.trainer.logger is not False:
            # a resumed run logs the points after its checkpoint again: without this its curves would hold them twice
            again = {"purge_step": checkpoint["global_step"]} if resumed and checkpoint else {}
            shown_as = curves_name(self.model, config.seed_everything)
            board = TensorBoardLogger(
                run.parent.parent, run.parent.name, run.name, default_hp_metric=False, sub_dir=shown_as, **again
            )
            named = self._get(self.config_init, "trainer")["logger"]  # the user's loggers, in addition to TensorBoard
            others = named if isinstance(named, list | tuple) else [] if named in (None, True) else [named]
            kwargs["logger"] = [board, *others]
        self.model.bad_steps.allowed = config.skip_bad_steps
        self.trainer_defaults["callbacks"] = callbacks_of_training(
            BestCheckpoint(run, self.model.task), record, config, resumed is not None, self.command_line, self.began
        )
        if config.minutes is not None:
            kwargs |= {"max_epochs": -1, "max_steps": -1}
        trainer = self._trainer(record.undo, **kwargs)
        make_no_folders(trainer)
        warn_of_slow_precision(trainer)
        if checkpoint is not None:
            take_off(trainer, *FINDERS)
        return trainer

    def _trainer(self, clean_up: Callable[[], None], **kwargs: Any) -> pl.Trainer:
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except Exception as error:  # only Lightning's code runs here, so a flag of the trainer is wrong
            raise wrong_flag(error, self.settings.trainer) from error
        refuse_other_number_of_tasks(trainer)
        use_tensor_cores(trainer)
        name_awaited_ranks(trainer, clean_up)
        if self.asked.checkpoint is not None:
            restore_within(trainer, refuse_damaged_content)
        return trainer

    @property
    def command_line(self) -> str:
        """The command, quoted for a shell."""
        return f"longseq {shlex.join(self.args)}"

    # Running

    def fit(self, model: Classifier, datamodule: Any, ckpt_path: str | None = None) -> None:
        """Train, test the best checkpoint, and print where the results are."""
        if self.settings.folds is not None:
            rank_zero_only(print)(f"fold {datamodule.fold} of {datamodule.folds}")
        if self.asked.checkpoint is not None and rank_zero_only.rank == 0:
            datamodule.prepare_data()
            datamodule.setup("fit")  # check the data before the run writes anything
            refuse_other_data(self.asked.checkpoint, self.settings.ckpt_path, datamodule.identity)
        if self.settings.minutes is not None and self.settings.baseline:
            fit_baseline_before(self.trainer, model, datamodule)
        train(self.trainer, model, datamodule, ckpt_path, self.settings)
        (best_checkpoint,) = callbacks_of(self.trainer, BestCheckpoint)
        tested, figures = evaluate_best(self.trainer, model, datamodule, best_checkpoint)
        if self.series is not None:
            self.series = Series(self.series.base, self.series.left[1:], tested)
        if not self.trainer.is_global_zero:
            return
        is_last = self.series is None or not self.series.left
        (record,) = callbacks_of(self.trainer, RunRecord)
        (by_class,) = callbacks_of(self.trainer, ByClass)
        (confusions,) = callbacks_of(self.trainer, Confusions)
        (of_events,) = callbacks_of(self.trainer, EventFigures)
        best = model.task.best
        if f"test/{best}" in figures:
            print(f"test {best + ':':<9} {figures[f'test/{best}']:.4f}")
        num_tested = num_tested_of(self.trainer, len(datamodule.splits()["test"]), confusions.of_test)
        interval = interval_of(model, figures, num_tested)
        if interval is not None:
            print(f"               95 % interval {interval[0]:.3f} to {interval[1]:.3f} ({num_tested:,} samples)")
        say_if_near_chance(self.trainer, model, datamodule, figures.get("test/accuracy"), self.settings)
        for name in ("event_recall", "event_precision"):
            if f"test/{name}" in figures:
                print(f"test {name}: {figures[f'test/{name}']:.4f}")
        baseline = None
        if self.settings.baseline and (is_last or self.settings.grow is None):
            baseline = baseline_of(self.trainer, model, datamodule, figures.get("test/accuracy"))
            figures |= {} if baseline is None else baseline.figures
        (energy,) = callbacks_of(self.trainer, EnergyMeter)
        figures |= energy.figures
        tables = figures, {**by_class.figures, **of_events.by_class}, confusions.of_test
        steps = [item.summary(self.trainer) for item in callbacks_of(self.trainer, Timed)]
        course = " ".join([*steps, energy.summary()])
        write_card(record.run, model, datamodule, *tables, tested, self.command_line, baseline, course)
        write_metrics(record.run, figures)  # written last, because a run with this file counts as finished
        print(shown(f"checkpoint:    {from_here(tested)}"))
        print(shown(f"logs:          {record.run}"))
        if is_last:
            print(shown(f"next:          {where_to_look_next(self.trainer, model, tested, record.run)}"))
        if self.settings.folds is not None and is_last:
            write_report(record.run.parent, self.settings.folds, self.args)

    def validate(self, model: Classifier, datamodule: pl.LightningDataModule, ckpt_path: str) -> None:
        """Print the figures of the validation split."""
        self._print_figures(
            "val", self.trainer.validate(model, datamodule=datamodule, ckpt_path=ckpt_path, verbose=False)
        )

    def test(self, model: Classifier, datamodule: pl.LightningDataModule, ckpt_path: str) -> None:
        """Print the figures of the test split."""
        results = self.trainer.test(model, datamodule=datamodule, ckpt_path=ckpt_path, verbose=False)
        self._print_figures("test", results)

    def predict(self, model: Classifier, datamodule: Any, ckpt_path: str) -> None:
        """Print or write path, class and probability of each input; with --window also times, with --events events."""
        assert self.asked.checkpoint is not None
        predict(self.trainer, model, datamodule, self.asked.checkpoint, self.config.predict)

    def _print_figures(self, split: Literal["val", "test"], results: Any) -> None:
        if not results:
            raise UserError("trainer: no batch of the split was evaluated; remove the limit on its batches")
        if self.trainer.is_global_zero:
            for name, value in sorted(results[0].items()):
                print(f"{name.replace('/', ' ') + ':':<15} {value:.4f}")
            say_if_trained_on(self.settings.ckpt_path, split, self.datamodule)
