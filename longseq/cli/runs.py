"""Run folders, runs/<experiment>/<number>/, and the files in them that are not Lightning's."""

import fcntl
import json
import os
import re
import shutil
import socket
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from jsonargparse import Namespace
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.cli import SaveConfigCallback
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor, nn

from longseq.cli.errors import UserError, keys_of
from longseq.cli.names import escaped, shown
from longseq.training.data import data_of, lacking
from longseq.training.storage import CheckpointError, StorageError, good_checkpoints

CONFIG = "config.yaml"  # Lightning's name
METRICS = "metrics.json"  # written when a run has come to its end
_ROOT = "--trainer.default_root_dir"


def experiment_of(config: Namespace) -> str:
    """The name of the folder of an experiment's runs: the one that was given; or that of the folder of one's own data,
    for which the same configuration serves whatever it is of; or of the first configuration file; or of the data
    module's class.

    Raises:
        UserError: If the name is not that of one folder.
    """
    name = config.experiment
    if name is None:
        files = [Path(str(path)) for path in config.config or [] if str(path).endswith((".yaml", ".yml", ".json"))]
        name = _name_of_own_data(config.data) or (files[0].stem if files else _class_of(config.data).__name__.lower())
    # a path would lead out of default_root_dir, and a name that cannot be printed would reach terminals
    if name in ("", ".", "..") or "/" in name or not name.isprintable() or len(os.fsencode(name)) > 255:
        raise UserError(f"experiment: got {name!r}; give the name of one folder, without a slash")
    return name


def _name_of_own_data(data: Namespace) -> str:
    """The data's folder, of which a data module says that it names the data, as the name of an experiment."""
    argument = getattr(_class_of(data), "named_by", None)
    if argument is None:
        return ""
    folder = os.path.abspath(Path(data.init_args[argument]).expanduser())  # "." and ".." have no name themselves
    return re.sub(r"[^\w.=+-]+", "_", os.path.basename(folder)).lstrip(".")


def _class_of(data: Namespace) -> type:
    module, _, name = data.class_path.rpartition(".")
    return getattr(sys.modules[module], name)  # the parser has imported it


def new_run(root: Path, experiment: str) -> Path:
    """Make the next free folder root/runs/experiment/0, 1, 2, ...; two runs started at once get two folders."""
    parent = root / "runs" / experiment
    try:
        parent.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(folder.name) for folder in _runs(parent)), default=-1)
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


def forget(run: Path) -> None:
    """Take away the folder of a run in which no training step was done, for want of data for example, unless it holds
    a checkpoint."""
    if run.name.isdecimal() and not list(run.glob("*.ckpt")):
        shutil.rmtree(run, ignore_errors=True)


def unfinished_run(root: Path, experiment: str) -> Path | None:
    """The newest run of an experiment that has a checkpoint and did not come to its end."""
    parent = root / "runs" / experiment
    runs = sorted(_runs(parent), key=lambda folder: int(folder.name), reverse=True) if parent.is_dir() else []
    return next((run for run in runs if list(run.glob("*.ckpt")) and not (run / METRICS).exists()), None)


def resumed_run(folder: str, root: Path, experiment: str | None) -> Path | None:
    """The run to go on with, or None if there is none.

    Args:
        folder: A run's, or "true" for that of the newest unfinished run of the experiment.
        root: Where runs are.
        experiment: The name of its runs' folder, if the command line has one.

    Raises:
        UserError: If there is no such folder, or no experiment.
    """
    if folder != "true":
        if not Path(folder).is_dir():
            raise UserError(f"resume: {folder} is no run folder; give one such as runs/digits/0")
        return Path(folder)
    if experiment is None:
        raise UserError("resume: of which run; give its folder, or --config or --experiment as it was started")
    run = unfinished_run(root, experiment)
    if run is None:
        rank_zero_only(print)(shown(f"resume: no unfinished run of {experiment} in {root}: starting a new one"))
    return run


def newest_checkpoint(run: Path) -> Path:
    """The good checkpoint of a run with the most steps.

    Raises:
        CheckpointError: If the run has none.
    """
    good, bad = good_checkpoints(run)
    for said in bad:
        rank_zero_only(print)(shown(f"resume: {said}"), file=sys.stderr)
    if not good:
        raise CheckpointError(f"{run}: no good checkpoint to go on from; start anew without --resume")
    rank_zero_only(print)(shown(f"resume: going on from {good[0]}"))
    return good[0]


@contextmanager
def sole_use_of(run: Path) -> Iterator[None]:
    """Keep other processes from going on with a run meanwhile.

    A record lock is the process's own: the system takes it away when the process ends, however it ends, and loaders
    that were forked from it do not hold it on, as they would one of flock's.

    Raises:
        UserError: If another process has the run; the message names it.
        StorageError: If the folder cannot be written.
    """
    path = run / ".lock"
    try:
        # a run folder may be of somebody else, and a link in it would lead to a file of the user's
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        file = os.fdopen(opened, "a+")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}); choose another {_ROOT}") from error
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(f"resume: {run} is being trained by {holder}; wait for its end, or end it") from error
        except OSError as error:  # a file system without locks
            print(f"{run}: cannot be locked ({error.strerror}); go on with it in one process only", file=sys.stderr)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def refuse_incomplete_data(datamodule: Any) -> None:
    """Check that a data module has all that longseq asks of one.

    Raises:
        UserError: If it has not; the message names what it lacks.
    """
    if missing := lacking(datamodule):
        kind = type(datamodule).__name__
        raise UserError(
            f"data: {kind} lacks {', '.join(missing)}; derive it from datamodules.DataModule (docs/data.md)"
        )


def refuse_other_classes(checkpoint: Mapping[str, Any], path: str, class_names: list[str]) -> None:
    """Check that a training goes on with the classes that its checkpoint was trained on.

    Raises:
        UserError: If it does not; the message names the first difference.
    """
    trained = checkpoint["hyper_parameters"].get("class_names")
    if not isinstance(trained, list) or trained == class_names:
        return
    names = enumerate(zip_longest(trained, class_names))
    label, before, now = next((label, before, now) for label, (before, now) in names if before != now)
    before, now = ("absent" if name is None else repr(name) for name in (before, now))
    counts = f" ({len(trained)} classes before, {len(class_names)} now)" if len(trained) != len(class_names) else ""
    raise _other_data(path, f"class {label} was {before} and is {now}{counts}")


def refuse_other_data(checkpoint: Mapping[str, Any], path: str, identity: Mapping[str, int | str]) -> None:
    """Check that a training goes on with the samples that its checkpoint was trained on.

    Args:
        checkpoint: One that holds no identity, being older than that, goes on.
        path: Its own.
        identity: Counts and digests of the data that there is now, by what they are of.

    Raises:
        UserError: If they are others; the message names the first difference.
    """
    trained = checkpoint.get("identity")
    if not isinstance(trained, Mapping):
        return
    for what, now in identity.items():
        before = trained.get(what, now)
        if before != now:
            raise _other_data(path, f"{before} {what} before, {now} now" if isinstance(now, int) else f"other {what}")


def _other_data(path: str, difference: str) -> UserError:
    return UserError(
        f"data: not what {path} was trained on: {difference}; give it the same data, or start a new training from its "
        f"weights with --model.init_from {path}"
    )


def config_of(run: Path) -> dict[str, Any]:
    """The configuration that a run was started with.

    Raises:
        UserError: If it is not there.
    """
    path = run / CONFIG
    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read, so the run cannot go on; start anew without --resume") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds no configuration, so the run cannot go on; start anew without --resume")
    return config


def restore_config(run: Path, config: Mapping[str, Any]) -> None:
    """Write the configuration that a run was started with, if it is another one now."""
    if config_of(run) != config:
        (run / CONFIG).write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")


class SavedConfig(SaveConfigCallback):
    """Lightning's, which writes down how a run was started; but not how it was gone on with, which would be done again
    by whoever starts another run from the file."""

    def __init__(self, parser: Any, config: Namespace, **options: Any) -> None:
        config = config.clone()
        config["ckpt_path"], config["resume"] = None, False
        super().__init__(parser, config, **options)


def without_appended(args: list[str]) -> list[str]:
    """The arguments of a run that goes on, less those that append to a list (``--data.augment+=X``): the run's own
    configuration holds what they appended, unless a configuration among them sets the list anew."""
    finder = ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("-c", "--config", action="append", default=[])
    files = [Path(path) for path in finder.parse_known_args(args)[0].config]
    set_anew = {key for file in files if file.is_file() for key in _keys_in(file)}
    kept, tokens = [], iter(args)
    for token in tokens:
        appending = re.fullmatch(r"--([\w.]+)\+(=.*)?", token, re.DOTALL)
        if appending is None or appending[1] in set_anew:
            kept.append(token)
        elif appending[2] is None:
            next(tokens, None)  # its value
    return kept


def _keys_in(file: Path) -> Iterator[str]:
    """The keys of a configuration; none of a file that the parser will refuse by name."""
    with suppress(ValueError, yaml.YAMLError):
        config = yaml.safe_load(file.read_text())
        yield from keys_of(config if isinstance(config, dict) else {})


class BestCheckpoint(ModelCheckpoint):
    """Lightning's, which goes on with the best score so far where the run's folder has been moved or copied too."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        folder = Path(self.dirpath or "")

        def here(path: str) -> str:
            """The file of that name in this run: a checkpoint of another program may name any file, which would be
            deleted when a better one comes."""
            return str(folder / Path(path).name) if path else path

        state_dict = state_dict | {
            "dirpath": self.dirpath,
            "best_model_path": here(state_dict["best_model_path"]),
            "kth_best_model_path": here(state_dict["kth_best_model_path"]),
            "best_k_models": {here(path): score for path, score in state_dict["best_k_models"].items()},
        }
        if not Path(state_dict["best_model_path"]).is_file():  # a new run that begins with another one's checkpoint
            state_dict["dirpath"] = None  # so that Lightning takes nothing of its scores
        super().load_state_dict(state_dict)


class RunRecord(pl.Callback):
    """Write down which sample of a run is in which split (splits.csv), and which files were left out (skipped.txt);
    and know whether it has begun.

    Attributes:
        has_begun: Whether a training step was done.
    """

    def __init__(self, run: Path) -> None:
        super().__init__()
        self.run = run
        self.has_begun = False

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self.has_begun and trainer.is_global_zero:
            (self.run / METRICS).unlink(missing_ok=True)  # of an end that the run has left behind
        self.has_begun = True

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        datamodule = data_of(trainer)
        if not trainer.is_global_zero or datamodule is None:
            return
        datamodule.save_splits(self.run / "splits.csv")
        skipped = [f"{escaped(path)}: {shown(what)}" for path, what in datamodule.bad_files().items()]
        if skipped:
            (self.run / "skipped.txt").write_text("\n".join(skipped) + "\n", encoding="utf-8")


def refuse_full_disk(run: Path, model: nn.Module) -> None:
    """Check that the checkpoints of a training fit: two, and one that is being written.

    Raises:
        StorageError: If they do not.
    """
    size = 3 * 3 * sum(p.numel() * p.element_size() for p in model.parameters())  # weights, and AdamW's two moments
    free = shutil.disk_usage(run).free
    if free < size:
        raise StorageError(
            f"{run}: {free / 2**20:.0f} MiB are free and three checkpoints take {size / 2**20:.0f} MiB; make room or "
            f"choose another {_ROOT}"
        )


def _runs(parent: Path) -> list[Path]:
    return [folder for folder in parent.iterdir() if folder.name.isdecimal()]


def write_metrics(run: Path, metrics: Mapping[str, Tensor | float]) -> None:
    """Write metrics.json: the best validation accuracy and the test split's figures."""
    plain = {name: float(value) for name, value in sorted(metrics.items())}
    (run / METRICS).write_text(json.dumps(plain, indent=2) + "\n")
