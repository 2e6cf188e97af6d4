"""A user's mistake becomes one line: ``error: <path or key>: <what>; <remedy>``.

jsonargparse answers a typo with a hundred lines of usage and a nested report. This file finds three things in the
report: the wrong key, what is wrong with it, and the name that the user may have meant.
"""

import importlib
import inspect
import re
import traceback
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import pytorch_lightning as pl
from pytorch_lightning.cli import LightningArgumentParser

from longseq.arguments import argument_names, constructors
from longseq.attention import Mechanism, Projection
from longseq.cli.before_torch import CONFIGURATIONS, nearest
from longseq.cli.errors import UserError
from longseq.cli.errors.machine import what_was_asked
from longseq.compat.jsonargparse import fault_of, options_of, with_nulls
from longseq.compat.torch import is_out_of_memory
from longseq.encoders import Encoder, LocalMixing, Stem
from longseq.tasks import Task
from longseq.training.fitting import OutOfMemory

# Names of flags in other trainers, and the flag here.
_ELSEWHERE = {
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs", "num_train_epochs", "max_epochs"), "trainer.max_epochs"),
    **dict.fromkeys(("steps", "num_steps", "max_steps"), "trainer.max_steps"),
    **dict.fromkeys(("gpus", "num_gpus", "devices", "nproc"), "trainer.devices"),
    **dict.fromkeys(("device", "accelerator", "cpu", "cuda"), "trainer.accelerator"),
    **dict.fromkeys(("amp", "fp16", "bf16", "precision"), "trainer.precision"),
    **dict.fromkeys(("clip_grad", "grad_clip", "max_grad_norm"), "trainer.gradient_clip_val"),
    **dict.fromkeys(("grad_accum_steps", "gradient_accumulation_steps"), "trainer.accumulate_grad_batches"),
    **dict.fromkeys(("output", "out_dir", "output_dir", "log_dir", "save_dir"), "trainer.default_root_dir"),
    **dict.fromkeys(("lr", "learning_rate", "base_lr"), "model.learning_rate"),
    **dict.fromkeys(("wd", "weight_decay"), "model.weight_decay"),
    **dict.fromkeys(("opt", "optim", "optimizer"), "model.optimizer"),
    **dict.fromkeys(("sched", "scheduler", "lr_scheduler"), "model.schedule"),
    **dict.fromkeys(("smoothing", "label_smoothing"), "model.label_smoothing"),
    **dict.fromkeys(("mixup", "cutmix"), "model.mix"),
    **dict.fromkeys(("initial_checkpoint", "init_checkpoint"), "model.init_from"),
    **{name: f"model.encoder.{name}" for name in ("dim", "depth", "heads", "patch_size", "attention")},
    **dict.fromkeys(("bs", "batch_size", "train_batch_size", "per_device_train_batch_size"), "data.batch_size"),
    **dict.fromkeys(("size", "img_size", "image_size", "input_size"), "data.size"),
    **dict.fromkeys(("workers", "num_workers", "dataloader_num_workers"), "data.num_workers"),
    **dict.fromkeys(("root", "path", "data_dir", "data_root", "data_path", "dataset", "train_dir"), "data.root"),
    **dict.fromkeys(("val_split", "val_fraction", "validation_split"), "data.val_fraction"),
    "seed": "seed_everything",
    **dict.fromkeys(("name", "run_name", "exp_name"), "experiment"),
    **dict.fromkeys(("checkpoint", "ckpt", "weights", "resume_from_checkpoint"), "ckpt_path"),
}


class OneLineParser(LightningArgumentParser):
    """A parser that raises every error as a UserError and accepts no abbreviated flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_args(self, args: Any = None, *others: Any, **kwargs: Any) -> Any:
        try:
            return super().parse_args(args if self.exit_on_error else with_nulls(args), *others, **kwargs)
        except UnicodeDecodeError as error:
            raise UserError("config: not a text file; give a YAML file") from error

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # a nested parser: the outer parser adds its key and reports the error
            super().error(message, ex)
        raise UserError(one_line(message, options_of(self))) from ex


class Finder(ArgumentParser):
    """A parser that finds a few flags among all arguments, before the parser of all flags reads them."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(one_line(message, ()))


def one_line(message: str, options: Iterable[str]) -> str:
    """Rewrite an error report of jsonargparse as ``<key>: <what>; <remedy>``.

    Args:
        message: The report, many lines.
        options: Names of the flags that the parser knows.
    """
    kind, key, what, expected = fault_of(message)
    key = key or "arguments"
    match kind:
        case "no such option":
            return f"{what}: no such option; {_known_elsewhere(what, options) or nearest(what, options)}"
        case "no flag":
            return f"{what}: no flag; give each flag one value, and of several files their folder"
        case "no such argument":
            remedy = _known_elsewhere(f"{key}.{what}", options) or nearest(what, argument_names(_imported(expected[0])))
            return f"{key}.{what}: no such option; {remedy}"
        case "not allowed" if what == "pytorch_lightning.LightningDataModule":  # an argument of data without its class
            return "data: missing; give --config, one of configs/, or --data, such as ImageFolder or AudioFolder"
        case "not allowed":
            return f"{key}: {what} may not be named; --allow_class {what.partition('.')[0]} if you trust it"
        case "no such class":
            return f"{key}: no class {what}; {nearest(what, _class_names())}"
        case "missing":
            if what == "predict.input":
                return "input: missing; give a file, or a folder of files"
            what = what.replace("fit.", "") if key == "arguments" else f"{key}.{what}"
            return f"{what}: missing; give --config, one of configs/, or these flags"
        case "no value":
            return f"{what}: has no value; give one behind --{what}"
        case "wrong value" if match := re.match(r"NestedArg\(key='(\w+)'", what):
            return f"{key}.{match[1]}: stands before --{key}; give --{key} first"
        case "wrong value" if any(kind.startswith("collections.abc.Sequence") for kind in expected):
            return f"{key}: got {what}; give a list, or --{key}+={what}"
        case "wrong value" if what in ("True", "False") and "str" in expected:
            return f"{key}: got {what}, as YAML reads yes, no, on, off, true and false; quote it, as in 'no'"
        case "wrong value" if expected == ["str"] and re.fullmatch(r"[-+\d.e]+", what):
            return f"{key}: got the number {what}; quote it: '{what}'"
        case "wrong value" if (
            (match := re.fullmatch(r"(\d+)x(\d+)", what))
            and "int" in expected
            and (match[1] == match[2] or "list" in expected)
        ):
            return f"{key}: got {what}; give {match[1] if match[1] == match[2] else f'[{match[1]}, {match[2]}]'}"
        case "wrong value":
            return f"{key}: got {what}; give {' or '.join(expected)}"
        case "no such file":
            return f"{what}: no such file; {CONFIGURATIONS}"
        case "not YAML":
            return f"config: not YAML: {what}; mend the file"
    return f"{key}: {what}; see --help"


def _known_elsewhere(name: str, options: Iterable[str]) -> str:
    """The remedy for a flag that other trainers have, under its name here; empty if this command has none like it."""
    group, _, last = name.rpartition(".")
    flag = _ELSEWHERE.get(last.replace("-", "_"))
    known = {*options}
    groups = {"data", "model", "trainer"} if "flags" in known else known & {"data", "model", "model.encoder", "trainer"}
    if flag is None or group not in ("", "data", "model", "trainer"):
        return ""
    return f"did you mean {flag}?" if flag in known or flag.rpartition(".")[0] in groups else ""


def user_error_in(error: BaseException) -> Any:
    """The error with an exit code of its own, such as a DataError, that jsonargparse has wrapped; None if there is
    none."""
    return next((cause for cause in _chain(error) if hasattr(cause, "exit_code")), None)


def refused_in_building(error: BaseException, config: Mapping[str, Any]) -> BaseException | None:
    """The error to raise when data, model or trainer refuses a value and cannot be built. None for a defect of
    longseq."""
    if is_out_of_memory(error):
        what = f"{what_was_asked(error)}; lower model.encoder.dim, model.encoder.depth or k"
        return UserError(what, OutOfMemory.exit_code)
    wrong = argument_error_in(error)
    if wrong is not None:
        return UserError(f"{locate(config, wrong.argument)}: {wrong.what}")
    return user_error_in(error) or refused_null(error, config) or refused_part(error, config)


def argument_error_in(error: BaseException) -> Any:
    """The ArgumentError (longseq's, or a data module's) behind an error; None if there is none."""
    causes = (cause for cause in _chain(error) if isinstance(cause, ValueError))
    return next((cause for cause in causes if hasattr(cause, "argument") and hasattr(cause, "what")), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and then its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def locate(config: Mapping[str, Any], name: str) -> str:
    """The full key of an argument in a configuration, ``k`` -> ``model.encoder.attention.k``; else its bare name."""
    keys = list(keys_of(config))
    groups = [f"{key.partition(f'.{name}.')[0]}.{name}" for key in keys if f".{name}." in key]
    return next((key for key in keys if key.rpartition(".")[2] == name), groups[0] if groups else name)


def blamed(message: str, config: Mapping[str, Any], group: str) -> str:
    """The full key of the argument that a library's message means. The message may hold the argument's name or its
    value; if it holds neither, the answer is the group's key.

    Args:
        message: Names in back quotes count first.
        config: The arguments of a group, or of a class.
        group: The key of that group or class.
    """
    arguments = dict(items_of(config, group))
    names = {key.rpartition(".")[2]: key for key in reversed(arguments)}
    words = re.findall(r"`(?:Trainer\()?(\w+)", message) + re.findall(r"\w+", message)
    by_name = [names[word] for word in words if word in names]
    by_value = [key for key, value in arguments.items() if isinstance(value, str) and repr(value) in message]
    return [*by_name, *by_value, group][0]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if the message is empty."""
    return (str(error).strip().split("\n")[0] or type(error).__name__).rstrip(".!")


def refused_null(error: BaseException, config: Mapping[str, Any]) -> UserError | None:
    """The error to raise when a class of a configuration got null for an argument that must have a value, which
    jsonargparse lets pass. None if none did."""
    if not any("NoneType" in str(cause) for cause in _chain(error)):
        return None
    for key, part in parts_of(config):
        parameters: list[inspect.Parameter] = []
        with suppress(ValueError):  # of a class that is not written in Python
            parameters = [each for found, _ in constructors(_imported(part["class_path"])) for each in found]
        for parameter in parameters:
            name = parameter.name
            is_null = (part.get("init_args") or {}).get(name, parameter) is None
            # without a default, the data may give it later
            has_default = all(parameter.default is not absent for absent in (None, inspect.Parameter.empty))
            if is_null and has_default and "None" not in str(parameter.annotation):
                return UserError(f"{key}.{name}: got null; give a value, or leave it out")
    return None


def refused_part(error: BaseException, config: Mapping[str, Any]) -> UserError | None:
    """The error to raise when a configuration names a class of another package and that class cannot be built, for
    example because of its arguments. Its message is the key and the class's own message. None if a class of longseq
    failed, which is a defect.

    Args:
        error: The error of jsonargparse; the error of the class is among its causes.
        config: The whole configuration.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    kinds = [values["class_type"] for values in frames if "class_type" in values]  # in functions that build an object
    if not kinds or kinds[-1].__module__.partition(".")[0] in ("longseq", "datamodules"):
        return None
    return _refusal(kinds[-1].__name__, error, config)


def refused_in_training(error: BaseException, config: Mapping[str, Any]) -> UserError | None:
    """The error to raise when a callback that a configuration names fails because its arguments do not fit the
    training. None if no such callback was at work, or if it called code of longseq that failed, which is a defect."""
    name = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(callback := frame.f_locals.get("self"), pl.Callback):
            name = type(callback).__name__
        elif frame.f_globals["__name__"].partition(".")[0] in ("longseq", "datamodules"):
            name = None
    named = [part["class_path"].rpartition(".")[2] for _, part in parts_of(config)]
    return _refusal(name, error, config) if name is not None and name in named else None


def _refusal(name: str, error: BaseException, config: Mapping[str, Any]) -> UserError:
    parts = {key: part for key, part in parts_of(config) if part["class_path"].rpartition(".")[2] == name}
    key, part = next(iter(parts.items()), (name, {}))
    what = first_line(error)
    return UserError(f"{blamed(what, part.get('init_args') or {}, key)}: {name}: {what}; --debug shows where")


def parts_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each part of a configuration that names a class, with its key as a user types it; in a list, the list's key."""
    if isinstance(config, Mapping):
        if "class_path" in config:
            yield prefix, config
        for name, value in config.items():
            yield from parts_of(value, prefix if name == "init_args" else f"{prefix}.{name}".lstrip("."))
    elif isinstance(config, list):
        for value in config:
            yield from parts_of(value, prefix)


def items_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each plain value of a configuration, with its key as a user types it; in a list, the list's key."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            yield from items_of(value, prefix if name == "init_args" else f"{prefix}.{name}".lstrip("."))
    elif isinstance(config, list | tuple):
        for value in config:
            yield from items_of(value, prefix)
    else:
        yield prefix, config


def keys_of(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """All keys of a nested configuration as a user types them, without the ``init_args`` in between."""
    for name, value in config.items():
        key = prefix if name == "init_args" else f"{prefix}.{name}".lstrip(".")
        if isinstance(value, Mapping):
            yield from keys_of(value, key)
        else:
            yield key


def _class_names() -> set[str]:
    names: set[str] = set()
    pending: list[type] = [Mechanism, Projection, Encoder, LocalMixing, Stem, Task, pl.LightningDataModule]
    while pending:
        kind = pending.pop()
        pending.extend(kind.__subclasses__())
        if not inspect.isabstract(kind) and not kind.__module__.startswith("pytorch_lightning"):
            names.add(kind.__name__)
    return names


def _imported(class_path: str) -> type:
    module, _, name = class_path.rpartition(".")
    return getattr(importlib.import_module(module), name)
