"""The settings of a command: from flags and configurations, a checkpoint and the resumed run."""

import copy
import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from inspect import Parameter
from pathlib import Path
from typing import Any, TypeVar, get_args

import pytorch_lightning as pl
from jsonargparse import Namespace
from pytorch_lightning.cli import LightningArgumentParser
from pytorch_lightning.utilities import rank_zero_only

from longseq.arguments import ArgumentError, argument_hints, constructors
from longseq.cli.before_torch import add_working_folder
from longseq.cli.config_keys import parts_of
from longseq.cli.errors import UserError
from longseq.cli.errors.parsing import Finder, imported
from longseq.cli.runs.folders import config_of, sole_use_of
from longseq.cli.runs.resuming import find_resumed, newest_checkpoint, without_appended
from longseq.cli.trainer_flags import refuse_missing_devices, refuse_wrong_numbers
from longseq.encoders.stem import NOT_OF_ALL_PROCESSES
from longseq.files.checkpoint import Checkpoint, CheckpointError, data_of, read_checkpoint
from longseq.files.description import allow_classes, naming, planned, planned_arguments
from longseq.training import Classifier
from longseq.training.data import lacking

# What a data module of features says of them.
OF_FEATURES = ("num_features", "num_coordinates", "most_tokens", "token_seconds")
# Values that the data module passes to the model. An encoder gets only those that are arguments of its class.
LINKS = {
    "data.num_classes": "model.num_classes",
    "data.class_names": "model.class_names",
    "data.shape": "model.encoder.init_args.shape",
    "data.sample_rate_hz": "model.encoder.init_args.sample_rate_hz",
    "data.seconds": "model.encoder.init_args.seconds",
    **{f"data.{name}": f"model.encoder.init_args.{name}" for name in OF_FEATURES},
    "data.num_channels": "model.encoder.init_args.channels",
    "data.has_gaps": "model.encoder.init_args.gaps",
}


@dataclass
class Asked:
    """What a command line asks for, found before the parser reads it.

    Attributes:
        args: The arguments, after the configuration of the checkpoint or of the resumed run, which they override.
        has_resume: Whether --resume is among the flags.
        resumed: The folder of the resumed run.
        started_with: The configuration that the resumed run was started with.
        checkpoint: The checkpoint of the resumed run or of --ckpt_path.
    """

    args: list[str]
    has_resume: bool
    resumed: Path | None = None
    started_with: dict[str, Any] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None


def asked_for(parser: LightningArgumentParser, args: list[str], held: ExitStack) -> Asked:
    """Find the checkpoint or the run that a command line names, and insert its configuration before all flags.

    Args:
        parser: The parser of all commands.
        args: The command and its arguments.
        held: A stack that will hold the lock of a resumed run.

    Raises:
        UserError: If the flags contradict each other, or name something that does not exist.
    """
    args = _with_network_of_teacher(args)
    command, is_help = args[0], bool({"-h", "--help"} & set(args))
    finder = Finder()
    finder.add_argument("--ckpt_path")
    finder.add_argument("--allow_class", action="append", default=[])
    finder.add_argument("--resume", nargs="?", const="true", default="false")
    known, others = finder.parse_known_args(args)
    if known.allow_class:
        add_working_folder()
    try:
        allow_classes(known.allow_class)
    except ArgumentError as error:
        raise UserError(f"{error.argument}: {error.what}") from error
    has_resume = known.resume != "false"
    if has_resume and known.ckpt_path is not None:
        raise UserError("ckpt_path: --resume chooses the checkpoint itself; give one of the two flags")
    if command == "fit" and has_resume:
        args = others + [word for package in known.allow_class for word in ("--allow_class", package)]
        run = find_resumed(parser, known.resume, args)
        return Asked(args, has_resume) if run is None else _going_on(run, args, held)
    path = known.ckpt_path
    if path is None:
        if command in ("validate", "test", "predict") and not is_help:
            raise UserError("ckpt_path: missing; give a checkpoint of fit, such as runs/digits/0/best.ckpt")
        return Asked(args, has_resume)
    checkpoint = read_checkpoint(path, to_go_on=command == "fit")
    under = json.dumps(_configuration_of(checkpoint, path))
    return Asked([command, "--config", under, *args[1:]], has_resume, checkpoint=checkpoint)


def _with_network_of_teacher(args: list[str]) -> list[str]:
    """Rewrite a teacher with arguments, ``--model.teacher m.onnx --model.teacher.rate_hz 48000``: the network becomes
    one of them, ``--model.teacher.network m.onnx``."""
    if not any(arg.startswith("--model.teacher.") for arg in args):
        return args
    return [re.sub(r"^--model\.teacher(?==|$)", "--model.teacher.network", arg) for arg in args]


def without_resume(args: list[str]) -> list[str]:
    """The arguments without --resume and its value."""
    finder = Finder()
    finder.add_argument("--resume", nargs="?")
    return finder.parse_known_args(args)[1]


def _going_on(run: Path, args: list[str], held: ExitStack) -> Asked:
    if rank_zero_only.rank == 0:
        held.enter_context(sole_use_of(run))  # lock the run before reading its checkpoints
    checkpoint = read_checkpoint(newest_checkpoint(run), to_go_on=True)
    flags = without_appended(args[1:])
    config = config_of(run)
    args = ["fit", "--config", json.dumps(config), *flags, "--ckpt_path", str(checkpoint.path)]
    return Asked(args, True, run, config, checkpoint)


def refuse_wrong_settings(settings: Namespace, asked: Asked) -> None:
    """Check what the parser cannot: flags that a configuration must not hold, that exclude each other, and numbers.

    Raises:
        UserError: If something is wrong.
    """
    for several in ("grow", "folds"):
        if settings.get(several) is not None and asked.checkpoint is not None and asked.resumed is None:
            raise UserError(f"{several}: starts from nothing or from --model.init_from; leave out --ckpt_path")
    if asked.checkpoint is None and settings.get("ckpt_path") is not None:
        raise UserError("ckpt_path: is in a configuration, where nothing checks it; give it as a flag")
    if settings.get("resume") and not asked.has_resume:
        raise UserError("resume: is in a configuration, where it has no effect; give it as a flag")
    refuse_wrong_numbers(settings)
    if settings.get("minutes") is not None:
        if settings.get("grow") is not None:
            raise UserError("minutes: not together with --grow, whose stages have epochs; give one of the two")
        for name in ("min_epochs", "min_steps"):
            if settings.trainer.get(name) is not None:
                raise UserError(f"trainer.{name}: not together with --minutes, which end the training; leave it out")
    refuse_missing_devices(settings.trainer)
    if settings.trainer.get("sync_batchnorm") and settings.get("model.encoder.init_args.stem"):
        raise UserError(NOT_OF_ALL_PROCESSES)
    seed = settings.seed_everything
    if not isinstance(seed, bool) and not 0 <= seed < 2**32:
        raise UserError(f"seed_everything: got {seed}; give 0 to {2**32 - 1}")
    encoder = settings.get("model.encoder")
    defaults = {} if encoder is None else _defaults_of(imported(encoder.class_path))
    for source, target in LINKS.items():
        value = settings.get(target)
        if value is not None and value != defaults.get(target.rpartition(".")[2]):
            key = target.replace("init_args.", "")
            raise UserError(f"{key}: follows from {source}; leave it out and set the data's arguments instead")


def refuse_unexpected_classes(settings: Namespace, is_of_data: bool) -> None:
    """Check every class that a configuration names. jsonargparse checks a class against the expected type. But it also
    accepts a function that returns such an object, and any function or class where a callable is expected.

    Raises:
        UserError: If a class is not allowed where it is named.
    """
    config = _as_description(settings)
    try:
        planned(config["data"], pl.LightningDataModule, "data")
        if not is_of_data:
            planned_arguments(Classifier, config["model"], Classifier, "model")
            planned_arguments(pl.Trainer, config["trainer"], pl.Trainer, "trainer")
    except CheckpointError as error:
        raise UserError(str(error)) from error


def refuse_nulls(config: Mapping[str, Any]) -> None:
    """Check that no class of a configuration gets null for an argument that needs a value: jsonargparse allows it.

    Raises:
        UserError: If an argument with a default is null and its type does not allow null. An argument without a default
            may be null, because the data may fill it in later.
    """
    for key, part in parts_of(config):
        nulls = [name for name, value in (part.get("init_args") or {}).items() if value is None]
        if nulls:
            kind = imported(part["class_path"])
            hints, defaults = argument_hints(kind), _defaults_of(kind)
            for name in nulls:
                has_default = all(defaults.get(name) is not absent for absent in (None, Parameter.empty))
                if has_default and name in hints and not _takes_null(hints[name]):
                    raise UserError(f"{key}.{name}: got null; give a value, or leave it out")


def _defaults_of(kind: type) -> dict[str, Any]:
    return {parameter.name: parameter.default for parameters, _ in constructors(kind) for parameter in parameters}


def _takes_null(hint: Any) -> bool:
    return hint in (Any, object, type(None)) or isinstance(hint, TypeVar) or any(map(_takes_null, get_args(hint)))


def _configuration_of(checkpoint: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The configuration that a checkpoint was trained with, without the values that the data passes to the model."""
    config = copy.deepcopy({"model": checkpoint["hyper_parameters"], "data": data_of(checkpoint, path)})
    with naming(path):
        planned_arguments(Classifier, config["model"], Classifier)
        planned(config["data"], pl.LightningDataModule, "data")
    for target in LINKS.values():
        *parents, name = target.split(".")
        group = config
        for parent in parents:
            group = group[parent]
        group.pop(name, None)
    return config


def _as_description(value: Any) -> Any:
    """A parsed configuration in the form of `describe`: each object has a class path and all of its arguments."""
    if isinstance(value, list | tuple):
        return [_as_description(item) for item in value]
    if not isinstance(value, Namespace | dict):
        return value
    plain = (
        {name: _as_description(item) for name, item in vars(value).items()} if isinstance(value, Namespace) else value
    )
    if "class_path" not in plain:
        return plain
    arguments = {**(plain.get("init_args") or {}), **(plain.get("dict_kwargs") or {})}
    return {"class_path": plain["class_path"], "init_args": arguments}


def refuse_other_inputs(encoder: Any, datamodule: Any) -> None:
    """Check that an encoder of features gets features, and that no other encoder does.

    Raises:
        UserError: If not.
    """
    kind, given = type(encoder).__name__, datamodule.inputs.kind
    if (encoder.kind == "features") != (given == "features"):
        choice = "FeatureEncoder" if given == "features" else f"another encoder, or a frozen network for {given}"
        raise UserError(f"model.encoder: {kind} takes {encoder.kind}, and the data has {given}; choose {choice}")


def refuse_incomplete_data(datamodule: Any) -> None:
    """Check that a data module has all the parts that longseq needs.

    Raises:
        UserError: If parts are missing; the message names them.
    """
    if missing := lacking(datamodule):
        kind = type(datamodule).__name__
        raise UserError(
            f"data: {kind} lacks {', '.join(missing)}; derive it from datamodules.DataModule (docs/design.md)"
        )
