"""What a command is told: by flags and configurations, by a checkpoint, and by the run that goes on."""

import copy
import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from jsonargparse import Namespace
from pytorch_lightning.cli import LightningArgumentParser

from longseq.cli.runs import experiment_of, resumed_run
from longseq.cli.start import UserError
from longseq.training import Classifier
from longseq.training.checkpoint import CheckpointError, data_of
from longseq.training.description import naming, planned, planned_arguments

# What the data module knows and the model is told; the encoder takes those that its class has.
LINKS = {
    "data.num_classes": "model.num_classes",
    "data.class_names": "model.class_names",
    "data.shape": "model.encoder.init_args.shape",
    "data.sample_rate_hz": "model.encoder.init_args.sample_rate_hz",
    "data.seconds": "model.encoder.init_args.seconds",
}


def parse(parser: LightningArgumentParser, args: list[str]) -> Namespace:
    try:
        return parser.parse_args(args)
    except UnicodeDecodeError as error:
        raise UserError("config: not a text file; give one of YAML") from error


def find_resumed(parser: LightningArgumentParser, folder: str, args: list[str]) -> Path | None:
    """The run to go on with; its experiment is that of the command line without --resume, as the parser has it."""
    finder = ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--experiment")
    finder.add_argument("--trainer.default_root_dir", dest="root")
    known, others = finder.parse_known_args(args)
    experiment, root = known.experiment, known.root
    if folder == "true" and any(re.match(r"(-c|--config|--data)(=|$)", flag) for flag in others):
        settings = parse(parser, args).fit
        experiment, root = experiment_of(settings), settings.trainer.default_root_dir
    elif experiment is not None:
        experiment = experiment_of(Namespace(experiment=experiment))
    return resumed_run(folder, Path(root or "."), experiment)


def refuse_unexpected_classes(settings: Namespace, is_of_data: bool) -> None:
    """jsonargparse checks a class against the type of its place, but takes a function that returns one, and any
    function or class where something callable is expected."""
    config = _as_description(settings)
    try:
        planned(config["data"], pl.LightningDataModule, "data")
        if not is_of_data:
            planned_arguments(Classifier, config["model"], Classifier, "model")
            planned_arguments(pl.Trainer, config["trainer"], pl.Trainer, "trainer")
    except CheckpointError as error:
        raise UserError(str(error)) from error


def configuration_of(checkpoint: dict[str, Any], path: str) -> dict[str, Any]:
    """The configuration that a checkpoint was trained with, less what the data module tells the model."""
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
    """A parsed configuration as describe has it: every object with its class path and all of its arguments."""
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
