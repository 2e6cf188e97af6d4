"""The commands that train and use a model: LightningCLI with longseq's defaults and manners."""

import json
from argparse import SUPPRESS, ArgumentParser
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import yaml
from jsonargparse import Namespace
from jsonargparse.typing import register_type
from lightning_fabric.utilities.apply_func import move_data_to_device
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    LearningRateMonitor,
    StochasticWeightAveraging,
    WeightAveraging,
)
from pytorch_lightning.cli import ArgsType, LightningArgumentParser
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only, rank_zero_warn

from longseq.arguments import ArgumentError
from longseq.cli.errors import (
    OneLineParser,
    UserError,
    argument_error_in,
    items_of,
    locate,
    refused_in_training,
    refused_part,
    user_error_in,
)
from longseq.cli.faults import what_was_asked
from longseq.cli.inputs import files_of, readable
from longseq.cli.names import escaped, shown
from longseq.cli.runs import (
    BestCheckpoint,
    RunRecord,
    SavedConfig,
    config_of,
    experiment_of,
    forget,
    new_run,
    newest_checkpoint,
    refuse_full_disk,
    refuse_incomplete_data,
    refuse_other_classes,
    refuse_other_data,
    restore_config,
    sole_use_of,
    without_appended,
    write_metrics,
)
from longseq.cli.settings import LINKS, configuration_of, find_resumed, parse, refuse_unexpected_classes
from longseq.cli.start import add_working_folder
from longseq.cli.trainer import (
    Trainer,
    is_lightnings,
    is_of_restoring,
    refuse_missing_devices,
    refuse_useless_precision,
    refuse_wrong_numbers,
    wrong_flag,
)
from longseq.compat.lightning import CommandLine, take_average
from longseq.compat.torch import is_out_of_memory
from longseq.tasks import Task
from longseq.training import Classifier
from longseq.training.checkpoint import CheckpointError, changed_settings, read_checkpoint, refuse_other_shapes
from longseq.training.description import allow_classes, describe
from longseq.training.fitting import OutOfMemory, let_go_of, what_fits
from longseq.training.generators import GeneratorStates
from longseq.training.recovery import Sentinel
from longseq.training.storage import WholeCheckpoints
from longseq.training.summary import SequenceSummary
from longseq.training.tensorboard import BestFigure, ConfusionMatrixImage, InputSamples
from longseq.training.throughput import ThroughputLogger

# What the optimizer's state in a checkpoint decides when a training goes on.
RESTORED = ("learning_rate", "weight_decay")
# Defaults of Lightning's callbacks that config.yaml would not take, and without which the run cannot go on.
register_type(torch.device)
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, value: dumper.represent_data(value.value))
# Callbacks that look for a setting before a training; one that goes on has found it.
FINDERS = (LearningRateFinder, BatchSizeFinder)


class Commands(CommandLine):
    """Parses, builds data, model and trainer, and runs one command."""

    data_commands = ("stats", "check")  # what a configuration says of the rest is left aside

    def __init__(self, args: list[str]) -> None:
        self.args = args
        self.checkpoint: dict[str, Any] | None = None
        self.run: Path | None = None
        self.resumed: Path | None = None
        self.held = ExitStack()  # the run, until the command ends
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
                    save_config_kwargs={"overwrite": True},
                    trainer_defaults={"enable_model_summary": False, "log_every_n_steps": 10, "devices": 1},
                    auto_configure_optimizers=False,  # the classifier's own, which knows what not to decay
                    load_from_checkpoint_support=False,  # the classifier describes itself, from Python too
                )
        except BaseException as error:
            if self.run is not None and not self.record.has_begun:
                if self.resumed is None:
                    rank_zero_only(forget)(self.run)
                else:  # or what was refused now would be refused for ever
                    rank_zero_only(restore_config)(self.run, self.started_with)
            if self.checkpoint is not None and is_of_restoring(error):
                what = f"{type(error).__name__}: {' '.join(str(error).split())}"
                raise CheckpointError(f"ckpt_path: the checkpoint cannot be restored ({what}); give another") from error
            raise

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        # a checkpoint is always read with weights_only=True
        fixed = {"model", "datamodule", "weights_only"}
        return {
            "fit": fixed | {"train_dataloaders", "val_dataloaders"},
            "validate": fixed | {"dataloaders", "verbose"},
            "test": fixed | {"dataloaders", "verbose"},
            "predict": fixed | {"dataloaders", "return_predictions"},
            "preview": fixed,
            "stats": fixed,
            "check": fixed,
        }

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--experiment", type=str | None, help="Name of the runs' folder; else the config file's.")
        parser.add_argument(
            "--peak_flops", type=float | None, help="The device's dense peak in FLOP/s, for MFU where it is not known."
        )
        parser.add_argument(
            "--resume", type=bool | str, default=False,
            help="Go on with the newest unfinished run of the experiment, or with this run folder.",
        )  # fmt: skip
        parser.add_argument(
            "--checkpoint_minutes", type=float, default=10.0, help="Longest time between two checkpoints of a training."
        )
        parser.add_argument(
            "--skip_bad_steps", type=int, default=0, help="Steps in a row to leave out whose loss is not finite."
        )
        parser.add_argument(
            "--allow_class",
            type=str | list[str],
            default=[],
            help="A package whose classes may be named, besides ours.",
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

    @property
    def settings(self) -> Namespace:
        """The configuration of the command that was asked for."""
        return self.config[self.config.subcommand]

    # Parsing

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, with the configuration of a checkpoint or of the resumed run under all flags."""
        finder = ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--ckpt_path")
        finder.add_argument("--allow_class", action="append", default=[])
        finder.add_argument("--resume", nargs="?", const="true", default="false")
        known, without = finder.parse_known_args(self.args)
        if known.allow_class:
            add_working_folder()
        try:
            allow_classes(known.allow_class)
        except ArgumentError as error:
            raise UserError(f"{error.argument}: {error.what}") from error
        if known.resume != "false" and known.ckpt_path is not None:
            raise UserError("ckpt_path: --resume chooses the checkpoint itself; give one of the two flags")
        args, path = self.args, known.ckpt_path
        if args[:1] == ["fit"] and known.resume != "false":
            allowed = [flag for package in known.allow_class for flag in ("--allow_class", package)]
            args = without + allowed
            self.resumed = find_resumed(parser, known.resume, args)
        if self.resumed is not None:
            if rank_zero_only.rank == 0:
                self.held.enter_context(sole_use_of(self.resumed))  # before its checkpoints are looked at
            path = newest_checkpoint(self.resumed)
            rest = without_appended(args[1:])
            self.checkpoint = read_checkpoint(str(path), to_go_on=True)
            self.started_with = config_of(self.resumed)
            args = ["fit", "--config", json.dumps(self.started_with), *rest, "--ckpt_path", str(path)]
        elif path is None and args[:1] in (["validate"], ["test"], ["predict"]) and not {"-h", "--help"} & set(args):
            raise UserError("ckpt_path: missing; give a checkpoint of fit, such as runs/digits/0/best.ckpt")
        elif path is not None:
            self.checkpoint = read_checkpoint(path, to_go_on=args[:1] == ["fit"])
            args = [*args[:1], "--config", json.dumps(configuration_of(self.checkpoint, str(path))), *args[1:]]
        self.config = parse(parser, args)
        refuse_unexpected_classes(self.settings, self.config.subcommand in self.data_commands)
        if self.config.subcommand in self.data_commands:
            return
        if self.checkpoint is None and self.settings.get("ckpt_path") is not None:
            raise UserError("ckpt_path: stands in a configuration, where nothing checks it; give it as a flag")
        if self.settings.get("resume") and known.resume == "false":
            raise UserError("resume: stands in a configuration, where it has no effect; give it as a flag")
        refuse_wrong_numbers(self.settings)
        refuse_missing_devices(self.settings.trainer)
        if self.config.subcommand == "fit":
            refuse_useless_precision(self.settings.trainer)
        seed = self.settings.seed_everything
        if not isinstance(seed, bool) and not 0 <= seed < 2**32:
            raise UserError(f"seed_everything: got {seed}; give 0 to {2**32 - 1}")
        for source, target in LINKS.items():
            if self.settings.get(target) is not None:
                key = target.replace("init_args.", "")
                raise UserError(f"{key}: follows from {source}; leave it out and set the data's arguments instead")
        if self.config.subcommand == "fit":
            self.experiment = experiment_of(self.settings)

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
            if is_out_of_memory(error):
                what = f"{what_was_asked(error)}; lower model.encoder.dim, model.encoder.depth or k"
                raise UserError(what, OutOfMemory.exit_code) from error
            wrong = argument_error_in(error)
            if wrong is not None:
                raise UserError(f"{locate(self.settings.as_dict(), wrong.argument)}: {wrong.what}") from error
            behind = user_error_in(error)
            if behind is not None:
                raise behind from None
            refused = refused_part(error, self.settings.as_dict())
            if refused is None:
                raise
            raise refused from error
        if self.checkpoint is None:
            return
        if self.subcommand == "fit":
            refuse_other_classes(self.checkpoint, self.settings.ckpt_path, self.model.class_names)
        refuse_other_shapes(self.checkpoint, self.model)
        for said in changed_settings(self.checkpoint, self.model):
            rank_zero_warn(f"{said}: its weights were not trained so")
        if self.resumed is not None:
            self._take_findings(self.checkpoint)
        if self.subcommand == "fit":
            settings = self.checkpoint["hyper_parameters"]
            ours, restored = self.model.optimizer, settings.get("optimizer", self.model.optimizer)
            if ours != restored:
                raise UserError(
                    f"model.optimizer: {ours} cannot go on with the state of the checkpoint's {restored}; leave it "
                    "out, or start a new training from it with --model.init_from"
                )
            for name in RESTORED:
                ours, restored = getattr(self.model, name), settings.get(name, getattr(self.model, name))
                if ours != restored:
                    rank_zero_warn(f"model.{name}: {ours} has no effect, the checkpoint's optimizer has {restored}")

    def _take_findings(self, checkpoint: dict[str, Any]) -> None:
        """Go on with the learning rate and the batch size that callbacks have found in the run, unless a flag changes
        what was asked for at its start. The run's configuration keeps that, however often the run goes on."""
        found = dict(items_of({"model": checkpoint["hyper_parameters"], "data": checkpoint["data"]}))
        planned, asked = dict(items_of(self.started_with)), dict(items_of(self.settings.as_dict()))
        for part, key in ((self.model, "model.learning_rate"), (self.datamodule, "data.batch_size")):
            if key in found and asked.get(key) == planned.get(key):
                setattr(part, key.rpartition(".")[2], found[key])
        self.model.hparams["learning_rate"] = self.model.learning_rate

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        config = self.settings
        if self.subcommand != "fit":
            self.save_config_callback = None  # it belongs to a run, and this is none
            kwargs["logger"] = False
            if self.subcommand == "predict":
                kwargs["enable_progress_bar"] = False  # standard output is for the predictions alone
                kwargs |= {"devices": 1, "num_nodes": 1, "strategy": "auto"}  # and each process has a share of them
            return self._trainer(**kwargs)
        refuse_incomplete_data(self.datamodule)
        try:
            describe(self.datamodule)
        except TypeError as error:
            raise UserError(f"data: {error}; a checkpoint names the data by its arguments") from error
        root = Path(config.trainer.default_root_dir or ".")
        # the other ranks are told the folder by Lightning, which broadcasts rank zero's
        rank_zero = rank_zero_only.rank == 0
        self.run = self.resumed or (new_run(root, self.experiment) if rank_zero else root / "runs" / self.experiment)
        self.record = RunRecord(self.run)
        if rank_zero:
            if self.resumed is None:
                self.held.enter_context(sole_use_of(self.run))
            refuse_full_disk(self.run, self.model)
        task: Task = self.model.task
        self.checkpoints = BestCheckpoint(
            self.run, "best", monitor=f"val/{task.best}", mode=task.mode, enable_version_counter=False
        )
        callbacks: list[pl.Callback] = [
            self.checkpoints,
            SequenceSummary(),
            ThroughputLogger(config.peak_flops),
            GeneratorStates(),
            self.record,
            Sentinel(self.run / "last.ckpt", config.checkpoint_minutes),
        ]
        if config.trainer.logger in (None, True):
            # points that the resumed run will draw again are taken out of its curves
            again = {"purge_step": self.checkpoint["global_step"]} if self.resumed and self.checkpoint else {}
            kwargs["logger"] = TensorBoardLogger(
                self.run.parent.parent, self.run.parent.name, self.run.name, default_hp_metric=False, **again
            )
        self.model.bad_steps.allowed = config.skip_bad_steps
        kwargs["plugins"] = [WholeCheckpoints()]
        if config.trainer.logger is not False:
            callbacks += [
                LearningRateMonitor("step"),
                ConfusionMatrixImage(),
                InputSamples(),
                BestFigure(is_resumed=self.resumed is not None),
            ]
        self.trainer_defaults["callbacks"] = callbacks
        trainer = self._trainer(**kwargs)
        if self.checkpoint is not None:
            _take_off(trainer, *FINDERS)
        return trainer

    def _trainer(self, **kwargs: Any) -> pl.Trainer:
        try:
            return super().instantiate_trainer(**kwargs)
        except Exception as error:  # it runs Lightning's code alone, on what the flags say
            raise wrong_flag(error, self.settings.trainer) from error

    # Running

    def fit(self, model: Classifier, datamodule: Any, ckpt_path: str | None = None) -> None:
        """Train, test the best checkpoint, and say where everything is."""
        if self.checkpoint is not None and rank_zero_only.rank == 0:
            datamodule.prepare_data()
            datamodule.setup("fit")  # before anything of the run is written
            refuse_other_data(self.checkpoint, self.settings.ckpt_path, datamodule.identity)
        try:
            self.trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=True)
        except BaseException as error:
            if is_out_of_memory(error) and self.trainer.world_size == 1:
                raise self._out_of_memory(error) from None
            if isinstance(error, Exception) and not hasattr(error, "exit_code") and not is_of_restoring(error):
                refused = refused_in_training(error, self.settings.as_dict())
                if refused is not None:
                    raise refused from error
            if isinstance(error, ValueError | RuntimeError) and is_lightnings(error) and not is_of_restoring(error):
                raise wrong_flag(error, self.settings.trainer) from error
            raise
        best, figure = self.checkpoints.best_model_path, self.checkpoints.best_model_score
        folder = Path(self.checkpoints.dirpath)  # type: ignore[arg-type]  # rank zero's
        if not best:  # the training was shorter than the first validation
            best = str(folder / "last.ckpt")
            self.trainer.save_checkpoint(best)
        # one that averages weights would bring back those that it averaged, which it keeps in a checkpoint too
        _take_off(self.trainer, WeightAveraging, *FINDERS)
        for averaging in _take_off(self.trainer, StochasticWeightAveraging):
            # its average is no weights of any step, so that nothing has validated or saved it yet
            if not averaging.n_averaged:
                rank_zero_warn("StochasticWeightAveraging has averaged nothing: the training ended before its epoch")
                continue
            take_average(averaging, model)
            validated = self.trainer.validate(model, datamodule=datamodule, verbose=False)
            figure = validated[0][f"val/{model.task.best}"] if validated else None
            best = str(folder / "averaged.ckpt")
            self.trainer.save_checkpoint(best)
        results = self.trainer.test(model, datamodule=datamodule, ckpt_path=best, weights_only=True, verbose=False)
        if not self.trainer.is_global_zero:
            return
        metrics = dict(results[0]) if results else {}  # nothing with --trainer.limit_test_batches 0
        if figure is not None:
            metrics |= {f"val/{model.task.best}": figure}
        assert self.run is not None
        write_metrics(self.run, metrics)
        if results:
            print(f"test {model.task.best + ':':<9} {metrics[f'test/{model.task.best}']:.4f}")
        print(shown(f"checkpoint:    {best}"))
        print(shown(f"logs:          {self.run}"))

    def _out_of_memory(self, error: BaseException) -> OutOfMemory:
        """The error to raise instead, which says what fits: found by trying."""
        let_go_of(error)
        device = self.trainer.strategy.root_device
        batch = move_data_to_device(self.datamodule.longest_batch(), device)
        context = self.trainer.precision_plugin.forward_context
        # after an error Lightning takes everything off a GPU, the optimizer's state too
        has_moments = device.type == "cpu" and any(optimizer.state for optimizer in self.trainer.optimizers)
        fitting = what_fits(self.model.to(device), batch, context, has_moments)
        fitting = fitting or ["nothing smaller of what was tried"]
        return OutOfMemory(f"{what_was_asked(error)}; what fits: {', or '.join(fitting)}")

    def validate(self, model: Classifier, datamodule: pl.LightningDataModule, ckpt_path: str) -> None:
        """Print the figures of the validation split."""
        self._report(self.trainer.validate(model, datamodule=datamodule, ckpt_path=ckpt_path, verbose=False))

    def test(self, model: Classifier, datamodule: pl.LightningDataModule, ckpt_path: str) -> None:
        """Print the figures of the test split."""
        self._report(self.trainer.test(model, datamodule=datamodule, ckpt_path=ckpt_path, verbose=False))

    def predict(self, model: Classifier, datamodule: Any, ckpt_path: str) -> None:
        """Print path, class and probability of each input, names escaped (names.py)."""
        paths = files_of(self.config.predict.input, datamodule.predict_suffixes)
        datamodule.predict_paths = readable(datamodule, paths)
        loader = datamodule.predict_dataloader()
        batches = self.trainer.predict(model, loader, ckpt_path=ckpt_path, weights_only=True)
        rows = [row for batch in batches or [] for row in batch]
        for path, row in zip(datamodule.predict_paths, rows, strict=False):  # there may be a limit of batches
            for name, probability in model.task.answer(row, model.class_names):
                print(f"{escaped(path)}\t{escaped(name)}\t{probability:.4f}")

    def _report(self, results: Any) -> None:
        if not results:
            raise UserError(f"trainer: no batch of the split was looked at; leave out the limit of {self.subcommand}")
        if self.trainer.is_global_zero:
            for name, value in sorted(results[0].items()):
                print(f"{name.replace('/', ' ') + ':':<15} {value:.4f}")


def _take_off(trainer: pl.Trainer, *kinds: type) -> list[Any]:
    """Take the callbacks of these kinds off a trainer, and return them."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    trainer.callbacks = [callback for callback in callbacks if not isinstance(callback, kinds)]  # type: ignore
    return [callback for callback in callbacks if isinstance(callback, kinds)]
