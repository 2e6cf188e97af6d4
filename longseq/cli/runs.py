"""Run folders, runs/<experiment>/<number>/, and the files in them that are not Lightning's."""

import json
import re
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from jsonargparse import Namespace
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor, nn

from longseq.cli.errors import UserError, keys_of
from longseq.training.storage import CheckpointError, StorageError, good_checkpoints

METRICS = "metrics.json"  # written when a run has come to its end
_ROOT = "--trainer.default_root_dir"


def experiment_of(config: Namespace) -> str:
    """The name that was given, or of the first configuration file, or else of the data module's class."""
    if config.experiment:
        return config.experiment
    files = [Path(str(path)) for path in config.config or [] if str(path).endswith((".yaml", ".yml", ".json"))]
    return files[0].stem if files else config.data.class_path.rpartition(".")[2].lower()


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


def find_resumed(folder: str, args: list[str]) -> Path | None:
    """The checkpoint to go on from, or None if there is nothing to go on with.

    Args:
        folder: A run's, or "true" for that of the newest unfinished run of the experiment that args name.
        args: Of the command line.

    Raises:
        UserError: If there is no such folder, or args name no experiment.
        CheckpointError: If the run has no good checkpoint.
    """
    finder = ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--experiment")
    finder.add_argument("-c", "--config", action="append", default=[])
    finder.add_argument("--trainer.default_root_dir", dest="root", default=".")
    known = finder.parse_known_args(args)[0]
    run: Path | None = Path(folder)
    if folder == "true":
        experiment = known.experiment or next((Path(path).stem for path in known.config), None)
        if experiment is None:
            raise UserError("resume: of which run; give its folder, or --config or --experiment as it was started")
        run = unfinished_run(Path(known.root), experiment)
        if run is None:
            rank_zero_only(print)(f"resume: no unfinished run of {experiment} in {known.root}: starting a new one")
            return None
    if run is None or not run.is_dir():
        raise UserError(f"resume: {run} is no run folder; give one such as runs/digits/0")
    good, bad = good_checkpoints(run)
    for said in bad:
        rank_zero_only(print)(f"resume: {said}", file=sys.stderr)
    if not good:
        raise CheckpointError(f"{run}: no good checkpoint to go on from; start anew without --resume")
    rank_zero_only(print)(f"resume: going on from {good[0]}")
    return good[0]


def config_of(run: Path) -> dict[str, Any]:
    """The configuration that a run was started with.

    Raises:
        UserError: If it is not there.
    """
    path = run / "config.yaml"
    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read, so the run cannot go on; start anew without --resume") from error
    return config


def without_appended(args: list[str]) -> list[str]:
    """The arguments of a run that goes on, less those that append to a list (``--data.augment+=X``): the run's own
    configuration holds what they appended, unless a configuration among them sets the list anew."""
    finder = ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("-c", "--config", action="append", default=[])
    files = [Path(path) for path in finder.parse_known_args(args)[0].config]
    set_anew = {key for file in files if file.is_file() for key in keys_of(yaml.safe_load(file.read_text()) or {})}
    kept, tokens = [], iter(args)
    for token in tokens:
        appending = re.fullmatch(r"--([\w.]+)\+(=.*)?", token, re.DOTALL)
        if appending is None or appending[1] in set_anew:
            kept.append(token)
        elif appending[2] is None:
            next(tokens, None)  # its value
    return kept


class BestCheckpoint(ModelCheckpoint):
    """Lightning's, which goes on with the best score so far where the run's folder has been moved or copied too."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        folder = Path(self.dirpath or "")

        def here(path: str) -> str:
            return str(folder / Path(path).name) if path else path

        best = here(state_dict["best_model_path"])
        if best and Path(best).is_file():  # or it is a new run that begins with another one's checkpoint
            state_dict = state_dict | {
                "dirpath": self.dirpath,
                "best_model_path": best,
                "kth_best_model_path": here(state_dict["kth_best_model_path"]),
                "best_k_models": {here(path): score for path, score in state_dict["best_k_models"].items()},
            }
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

    def on_train_batch_end(self, *_: Any) -> None:
        self.has_begun = True

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        datamodule: Any = getattr(trainer, "datamodule", None)
        if not trainer.is_global_zero or not hasattr(datamodule, "save_splits"):
            return
        datamodule.save_splits(self.run / "splits.csv")
        skipped = [f"{path}: {what}" for path, what in datamodule.bad_files().items()]
        if skipped:
            (self.run / "skipped.txt").write_text("\n".join(skipped) + "\n")


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
