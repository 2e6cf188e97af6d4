"""Checks of the trainer's flags (numbers, devices, precision), and which flag an error of Lightning is about."""

import math
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from jsonargparse import Namespace
from pytorch_lightning.accelerators import AcceleratorRegistry
from pytorch_lightning.plugins.environments import SLURMEnvironment
from pytorch_lightning.utilities import rank_zero_warn

from longseq.cli.config_keys import items_of
from longseq.cli.errors import UserError
from longseq.cli.errors.building import blamed, first_line
from longseq.compat.torch import has_bfloat16


class _Bound(NamedTuple):
    """The allowed values of a number."""

    holds: Callable[[Any], bool]
    rule: str
    remedy: str


def _count(least: int, remedy: str) -> _Bound:
    return _Bound(lambda value: value >= least, f"{least} or more", remedy)


def _count_or_all(least: int, remedy: str) -> _Bound:
    return _Bound(lambda value: value >= least or value == -1, f"{least} or more, or -1 for all", remedy)


def _batches(remedy: str, some: bool = False) -> _Bound:
    rule = "a share in 0.0..1.0" + (", more than 0," if some else "") + " or a number of batches"
    return _Bound(lambda value: (value > 0 or not some) and (0 <= value <= 1 or value % 1 == 0), rule, remedy)


# Lightning accepts other numbers too, and then waits forever, divides by zero or does nothing.
_BOUNDS: dict[str, _Bound] = {
    "minutes": _Bound(lambda value: 0 < value <= 1e6, "positive and at most a million", "10 is a start"),
    "folds": _Bound(lambda value: 2 <= value <= 1000, "in 2..1000", "5 is usual"),
    "skip_bad_steps": _count(0, "0 leaves none out"),
    "trainer.num_nodes": _count(1, "1 is this machine alone"),
    "trainer.max_epochs": _count_or_all(1, "30 is a start, and the command test evaluates a checkpoint"),
    "trainer.min_epochs": _count(0, "leave it out"),
    "trainer.max_steps": _count_or_all(1, "leave it out and give trainer.max_epochs"),
    "trainer.min_steps": _count(0, "leave it out"),
    "trainer.limit_train_batches": _batches("1.0 is all of them", some=True),
    "trainer.limit_val_batches": _batches("1.0 is all of them"),
    "trainer.limit_test_batches": _batches("1.0 is all of them"),
    "trainer.limit_predict_batches": _batches("1.0 is all of them"),
    "trainer.overfit_batches": _batches("0 is an ordinary training"),
    "trainer.val_check_interval": _batches("--trainer.limit_val_batches 0 leaves validation out", some=True),
    "trainer.check_val_every_n_epoch": _count(1, "1 validates after each"),
    "trainer.num_sanity_val_steps": _count_or_all(0, "0 leaves them out"),
    "trainer.log_every_n_steps": _count(0, "10 is a start"),
    "trainer.accumulate_grad_batches": _count(1, "1 accumulates nothing"),
    "trainer.gradient_clip_val": _count(0, "1 is usual, and without it nothing is clipped"),
    "trainer.reload_dataloaders_every_n_epochs": _count(0, "0 keeps them"),
    "trainer.fast_dev_run": _count(0, "1 runs one batch of each split"),
}


def refuse_wrong_numbers(settings: Namespace) -> None:
    """Check every number of a configuration before anything is built from it.

    Raises:
        UserError: If one is out of its bounds, not finite, or needs more than 64 bits.
    """
    for key, value in items_of(settings.as_dict()):
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            raise UserError(f"{key}: got {value}; give a finite number")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise UserError(f"{key}: {value} is beyond what 64 bits hold; give a smaller number")
        if key in _BOUNDS and not _BOUNDS[key].holds(value):
            raise UserError(f"{key}: must be {_BOUNDS[key].rule}, got {value}; {_BOUNDS[key].remedy}")


def warn_of_slow_precision(trainer: pl.Trainer) -> None:
    """Warn if a training in bfloat16 runs on a processor that is faster in float32."""
    name = str(trainer.precision)
    if trainer.strategy.root_device.type == "cpu" and name.startswith("bf16") and not has_bfloat16():
        without = "this processor has no instructions for bfloat16, and takes about ten times as long as with 32-true"
        rank_zero_warn(f"trainer.precision: {name}: {without}")


def use_tensor_cores(trainer: pl.Trainer) -> None:
    """Let a GPU multiply float32 matrices in TF32, which keeps 10 bits of each factor. NVIDIA_TF32_OVERRIDE=0 in the
    environment turns it off."""
    if trainer.strategy.root_device.type == "cuda":
        torch.set_float32_matmul_precision("high")


def refuse_missing_devices(settings: Namespace) -> None:
    """Check that the devices exist: Lightning checks GPUs, but starts any number of processes on a CPU.

    Raises:
        UserError: If there are too few devices, or if longseq cannot use the strategy.
    """
    if re.search("spawn|fork|notebook", str(settings.strategy)):
        raise UserError(f"trainer.strategy: {settings.strategy} is for notebooks, and waits here for ever; give ddp")
    if re.search("ModelParallelStrategy|fsdp|FSDP", str(settings.strategy)):
        name = str(getattr(settings.strategy, "class_path", settings.strategy)).rpartition(".")[2]
        raise UserError(f"trainer.strategy: {name} cannot shard weights that layers share; give FullySharded")
    accelerator, devices, cores = settings.accelerator, str(settings.devices), os.cpu_count() or 1
    known = sorted(AcceleratorRegistry.available_accelerators())
    present = [name for name in known if AcceleratorRegistry[name]["accelerator"].is_available()]
    asked = {"gpu": {"cuda", "mps"}, "auto": set(present)}.get(accelerator, {accelerator}) & {*known, "gpu", "auto"}
    if asked and not asked & set(present):
        raise UserError(f"trainer.accelerator: no {accelerator} on this machine; give auto, or one of {present}")
    if asked == {"cpu"} and devices.isdecimal() and int(devices) > cores:
        raise UserError(f"trainer.devices: {devices} processes on {cores} CPU cores; ask for {cores} or fewer")


def refuse_other_number_of_tasks(trainer: pl.Trainer) -> None:
    """Check that each task of SLURM is a rank: otherwise each task would train or wait alone, in the same folder.

    Raises:
        UserError: If the number of ranks is not the number of tasks.
    """
    if not SLURMEnvironment.detect():
        return
    tasks, ranks = int(os.environ["SLURM_NTASKS"]), trainer.world_size
    if tasks != ranks:
        remedy = f"give --trainer.devices and --trainer.num_nodes that make {tasks}, or srun --ntasks={ranks}"
        raise UserError(f"trainer.devices: the trainer has {ranks}, and SLURM_NTASKS is {tasks}; {remedy}")


def wrong_flag(error: Exception, settings: Namespace) -> UserError:
    """The UserError for a wrong flag of the trainer, with Lightning's message."""
    what = first_line(error)
    return UserError(f"{blamed(what, settings.as_dict(), 'trainer')}: {what}; see --help")
