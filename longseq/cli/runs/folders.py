"""Run folders, runs/<experiment>/<number>/, and the files in them that are not Lightning's."""

import fcntl
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import yaml
from jsonargparse import Namespace
from torch import Tensor, nn

from longseq.cli.errors import UserError
from longseq.files.storage import StorageError, write_text
from longseq.training import Classifier

CONFIG = "config.yaml"  # Lightning's name
SERIES = "series.json"  # the value of --folds or --grow, if the run is one of several
SPLITS = "splits.csv"
LOCK = ".lock"  # names the process that trains the run
METRICS = "metrics.json"  # written when a run finishes
_ROOT = "--trainer.default_root_dir"


def experiment_of(config: Namespace) -> str:
    """The name of the folder of an experiment's runs: --experiment if it is given. Otherwise the name of the user's own
    data folder, because one configuration file serves many such folders. Otherwise the name of the first configuration
    file, or of the data module's class.

    Raises:
        UserError: If the name is not the name of one folder.
    """
    name = config.experiment
    if name is None:
        files = [Path(str(path)) for path in config.config or [] if str(path).endswith((".yaml", ".yml", ".json"))]
        name = _name_of_own_data(config.data) or (files[0].stem if files else _class_of(config.data).__name__.lower())
    # a path could lead out of default_root_dir, and characters that cannot be printed would reach terminals
    if name in ("", ".", "..") or "/" in name or not name.isprintable() or len(os.fsencode(name)) > 255:
        raise UserError(f"experiment: got {name!r}; give the name of one folder, without a slash")
    return name


def curves_name(model: Classifier, seed: int) -> str:
    """The folder of a run's TensorBoard events, which names its curves: mechanism, k and seed."""
    if not model.encoder.depth:
        return f"depth-0-seed{seed}"
    mechanism = model.encoder.attention
    k = re.sub(r"[^\d]+", "-", str(getattr(mechanism, "k", None) or "")).strip("-")
    return "-".join([type(mechanism).__name__, *([f"k{k}"] if k else []), f"seed{seed}"])


def _name_of_own_data(data: Namespace) -> str:
    """The experiment's name from the data folder, if the data module's `named_by` says so; otherwise empty."""
    argument = getattr(_class_of(data), "named_by", None)
    if argument is None:
        return ""
    folder = os.path.abspath(Path(data.init_args[argument]).expanduser())  # absolute, because "." and ".." are no names
    return re.sub(r"[^\w.=+-]+", "_", os.path.basename(folder)).lstrip(".")


def _class_of(data: Namespace) -> type:
    module, _, name = data.class_path.rpartition(".")
    return getattr(sys.modules[module], name)  # the parser has imported the module


def new_run(root: Path, experiment: str) -> Path:
    """Make the next free folder root/runs/experiment/0, 1, 2, ... Two runs that start together get two folders.

    Raises:
        StorageError: If the folder cannot be written.
    """
    parent = root / "runs" / experiment
    try:
        parent.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(folder.name) for folder in numbered(parent)), default=-1)
        while True:
            run = parent / str(number)
            try:
                run.mkdir()
            except FileExistsError:
                number += 1
            else:
                return run
    except OSError as error:
        raise StorageError(f"{parent}: cannot be written ({error.strerror}); choose another {_ROOT}") from error


def from_here(path: str) -> str:
    """The path relative to the working folder, if it lies there."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path


def is_run(folder: Path) -> bool:
    """Whether a folder is the folder of a run. datamodules/own/scan.py, which leaves runs out, has the same rule."""
    lock = folder / LOCK
    is_locked = lock.is_file() and lock.read_bytes().startswith(b"process ")
    is_copy = (folder / CONFIG).is_file() and (folder / SPLITS).is_file()  # a copy may lack the hidden file
    return is_locked or is_copy


def forget(run: Path) -> None:
    """Delete the folder of a run without a training step, for example if data was missing. A folder with a checkpoint
    stays."""
    if run.name.isdecimal() and not list(run.glob("*.ckpt")):
        shutil.rmtree(run, ignore_errors=True)
        with suppress(OSError):  # the experiment has other runs
            run.parent.rmdir()


def config_of(run: Path) -> dict[str, Any]:
    """The configuration that a run was started with, including --folds or --grow if it is one of several runs.

    Raises:
        UserError: If it is missing or cannot be read.
    """
    path = run / CONFIG
    try:
        config = yaml.safe_load(path.read_text())
        series = json.loads((run / SERIES).read_text()) if (run / SERIES).exists() else {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"{path}: cannot be read, so the run cannot be resumed; start a new run without --resume"
        ) from error
    if not isinstance(config, dict):
        raise UserError(
            f"{path}: holds no configuration, so the run cannot be resumed; start a new run without --resume"
        )
    return {**config, **series}


def lock(file: IO[Any], what: Path) -> bool:
    """Lock a file that is open for writing, until it is closed. Returns False if another process has locked it.

    A record lock belongs to one process: the system removes it when the process ends, in whatever way. Forked loaders
    do not keep it, unlike a lock of flock. The process loses it when it closes any other descriptor of the file.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:  # a file system without locks
        print(f"{what}: cannot be locked ({error.strerror}); go on with it in one process only", file=sys.stderr)
    return True


@contextmanager
def sole_use_of(run: Path) -> Iterator[None]:
    """Keep other processes from resuming this run while this process uses it.

    Raises:
        UserError: If another process has the run; the message names it.
        StorageError: If the folder cannot be written.
    """
    path = run / LOCK
    try:
        # the folder may belong to another user: a link in it could lead to one of this user's own files
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        file = os.fdopen(opened, "a+")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}); choose another {_ROOT}") from error
    with file:
        if not lock(file, run):
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(f"resume: {run} is being trained by {holder}; wait for its end, or end it")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def refuse_full_disk(run: Path, model: nn.Module) -> None:
    """Check that three checkpoints fit on the disk: two that are kept, and one that is being written.

    Raises:
        StorageError: If they do not.
    """
    size = 3 * 3 * sum(p.numel() * p.element_size() for p in model.parameters())  # each: weights, AdamW's two moments
    free = shutil.disk_usage(run).free
    if free < size:
        raise StorageError(
            f"{run}: {free / 2**20:.0f} MiB are free and three checkpoints take {size / 2**20:.0f} MiB; make room or "
            f"choose another {_ROOT}"
        )


def numbered(parent: Path) -> list[Path]:
    """The run folders of an experiment, oldest first; empty if the experiment has no folder."""
    folders = parent.iterdir() if parent.is_dir() else []
    return sorted((folder for folder in folders if folder.name.isdecimal()), key=lambda folder: int(folder.name))


def write_metrics(run: Path, metrics: Mapping[str, Tensor | float]) -> None:
    """Write metrics.json: the figures of the best validation and of the test split."""
    plain = {name: float(value) for name, value in sorted(metrics.items())}
    write_text(run / METRICS, json.dumps(plain, indent=2) + "\n")
