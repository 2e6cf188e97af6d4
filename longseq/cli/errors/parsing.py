"""Report a user's mistake in one line: ``error: <path or key>: <what>; <remedy>``.

jsonargparse answers a typo with a hundred lines of usage and a nested report. This file extracts from the report the
wrong key and what is wrong with it, and suggests the name that the user may have meant.
"""

import importlib
import inspect
import re
from argparse import ArgumentParser
from collections.abc import Iterable
from typing import Any, NoReturn

import pytorch_lightning as pl
from pytorch_lightning.cli import LightningArgumentParser

from longseq.arguments import argument_names
from longseq.attention import Mechanism, NoAttention, Projection
from longseq.cli.before_torch import CONFIGURATIONS, nearest
from longseq.cli.errors import UserError
from longseq.compat.jsonargparse import fault_of, options_of, with_name_for_none, with_nulls
from longseq.encoders import Encoder, LocalMixing, Stem
from longseq.tasks import Task

# Names of flags in other trainers, and the flag in longseq.
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

    def parse_object(self, cfg_obj: Any, *others: Any, **kwargs: Any) -> Any:
        named = with_name_for_none(self, cfg_obj, Mechanism, NoAttention.__name__)
        return super().parse_object(named, *others, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # in a nested parser: the outer parser adds its key and reports the error
            super().error(message, ex)
        raise UserError(one_line(message, options_of(self))) from ex


class Finder(ArgumentParser):
    """A parser for a few flags, used before the parser of all flags reads the arguments."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(one_line(message, ()))


def one_line(message: str, options: Iterable[str]) -> str:
    """Rewrite an error report of jsonargparse as ``<key>: <what>; <remedy>``.

    Args:
        message: The report, of many lines.
        options: The names of the parser's flags.
    """
    kind, key, what, expected = fault_of(message)
    key = key or "arguments"
    match kind:
        case "no such option":
            return f"{what}: no such option; {_known_elsewhere(what, options) or nearest(what, options)}"
        case "no flag":
            return f"{what}: no flag; give each flag one value, and of several files their folder"
        case "no such argument":
            remedy = _known_elsewhere(f"{key}.{what}", options) or nearest(what, argument_names(imported(expected[0])))
            return f"{key}.{what}: no such option; {remedy}"
        case "not allowed" if what == "pytorch_lightning.LightningDataModule":  # --data.x without --data
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
            return f"{what}: has no value; give one after --{what}"
        case "wrong value" if match := re.match(r"NestedArg\(key='(\w+)'", what):
            return f"{key}.{match[1]}: comes before --{key}; give --{key} first"
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
            return f"config: not YAML: {what}; correct the file"
    return f"{key}: {what}; see --help"


def _known_elsewhere(name: str, options: Iterable[str]) -> str:
    """The remedy for a flag's name in other trainers: its name in longseq. Empty if this command has no such flag."""
    group, _, last = name.rpartition(".")
    flag = _ELSEWHERE.get(last.replace("-", "_"))
    known = {*options}
    groups = {"data", "model", "trainer"} if "flags" in known else known & {"data", "model", "model.encoder", "trainer"}
    if flag is None or group not in ("", "data", "model", "trainer"):
        return ""
    return f"did you mean {flag}?" if flag in known or flag.rpartition(".")[0] in groups else ""


def _class_names() -> set[str]:
    names: set[str] = set()
    network = importlib.import_module("datamodules").Network  # longseq names datamodules by its path alone
    pending: list[type] = [Mechanism, Projection, Encoder, LocalMixing, Stem, Task, pl.LightningDataModule, network]
    while pending:
        kind = pending.pop()
        pending.extend(kind.__subclasses__())
        if not inspect.isabstract(kind) and not kind.__module__.startswith("pytorch_lightning"):
            names.add(kind.__name__)
    return names


def imported(class_path: str) -> type:
    module, _, name = class_path.rpartition(".")
    return getattr(importlib.import_module(module), name)
