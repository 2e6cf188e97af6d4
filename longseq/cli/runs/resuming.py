"""Resuming a run: which run, from which checkpoint, and which settings must be the same as before."""

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from jsonargparse import Namespace
from pytorch_lightning.cli import LightningArgumentParser
from pytorch_lightning.utilities import rank_zero_only, rank_zero_warn

from longseq.cli.config_keys import items_of, keys_of
from longseq.cli.errors import UserError
from longseq.cli.errors.parsing import Finder
from longseq.cli.names import shown
from longseq.cli.runs.folders import CONFIG, METRICS, config_of, experiment_of, numbered
from longseq.cli.runs.growing import is_given_up
from longseq.compat.torch import is_out_of_memory
from longseq.files.checkpoint import Checkpoint, good_checkpoints, has_checkpoint
from longseq.files.storage import CheckpointError, write_text
from longseq.training import Classifier

# A resumed training restores these settings with the optimizer's state, whatever the flags say.
_RESTORED = ("learning_rate", "weight_decay", "betas")


def find_resumed(parser: LightningArgumentParser, folder: str, args: list[str]) -> Path | None:
    """The run to resume. Its experiment is the one that the same command line would train without --resume."""
    finder = Finder()
    finder.add_argument("--experiment")
    finder.add_argument("--trainer.default_root_dir", dest="root")
    finder.add_argument("--grow")
    known, others = finder.parse_known_args(args)
    experiment, root, folds, grow = known.experiment, known.root, None, known.grow
    if folder == "true" and any(re.match(r"(-c|--config|--data)(=|$)", flag) for flag in others):
        settings = parser.parse_args(args).fit
        experiment, root = experiment_of(settings), settings.trainer.default_root_dir
        folds, grow = settings.folds, settings.grow
    elif experiment is not None:
        experiment = experiment_of(Namespace(experiment=experiment))
    return _resumed_run(folder, Path(root or ".").expanduser(), experiment, folds, grow)


def _resumed_run(folder: str, root: Path, experiment: str | None, folds: int | None, grow: str | None) -> Path | None:
    """The run to resume, or None if there is none.

    Args:
        folder: A run folder, or "true" for the newest unfinished run of the experiment.
        root: The folder that holds runs/.
        experiment: The name of the experiment, if the command line has one.
        folds: The value of --folds, if it is given.
        grow: The value of --grow, if it is given.

    Raises:
        UserError: If the folder does not exist, or no experiment is named.
    """
    if folder != "true":
        if not Path(folder).is_dir():
            raise UserError(f"resume: {folder} is not a run folder; give one such as runs/digits/0")
        return Path(folder)
    if experiment is None:
        raise UserError("resume: no run is named; give its folder, or the --config or --experiment of its start")
    parent = root / "runs" / experiment
    runs = numbered(parent) if folds is None else sorted(folds_begun(parent, folds).values(), key=_number)
    run = _unfinished(runs)
    if run is not None and grow is not None and is_given_up(run, grow):
        rank_zero_only(print)(shown(f"resume: {run} belongs to no stage of {grow}: starting a new run"))
        return None
    if run is None and folds is None:
        rank_zero_only(print)(shown(f"resume: no unfinished run of {experiment} in {root}: starting a new one"))
    return run


def _number(run: Path) -> int:
    return int(run.name)


def folds_begun(experiment: Path, folds: int) -> dict[int, Path]:
    """The newest run of each fold of an experiment's newest cross-validation, by the fold's number."""
    runs: dict[int, Path] = {}
    for run in reversed(numbered(experiment)):
        with suppress(UserError):  # a run that was killed before it wrote its configuration
            config = config_of(run)
            fold = config.get("data", {}).get("init_args", {}).get("fold")
            if config.get("folds") == folds and fold is not None:
                runs.setdefault(fold, run)
        if 1 in runs:
            break
    return runs


def _unfinished(runs: list[Path]) -> Path | None:
    """The newest of these runs that has a checkpoint and is not finished."""
    return next((run for run in reversed(runs) if has_checkpoint(run) and not (run / METRICS).exists()), None)


def newest_checkpoint(run: Path) -> Checkpoint:
    """The undamaged checkpoint of a run with the most steps.

    Raises:
        CheckpointError: If the run has none.
    """
    good, bad = good_checkpoints(run)
    for message in bad:
        rank_zero_only(print)(shown(f"resume: {message}"), file=sys.stderr)
    if not good:
        raise CheckpointError(f"{run}: no good checkpoint to resume from; start a new run without --resume")
    rank_zero_only(print)(shown(f"resume: continuing from {good[0].path}"))
    return good[0]


def restore_config(run: Path, config: Mapping[str, Any]) -> None:
    """Write the configuration that a run was started with back to its folder, if the file has changed."""
    if config_of(run) != config:
        write_text(run / CONFIG, yaml.safe_dump({**config, "folds": None, "grow": None}, sort_keys=False))


@contextmanager
def refuse_damaged_content() -> Iterator[None]:
    """Wraps the code that restores a checkpoint's content: an unexpected error there means that the content is damaged.

    Raises:
        CheckpointError: If there is such an error.
    """
    try:
        yield
    except Exception as error:
        if hasattr(error, "exit_code") or is_out_of_memory(error):
            raise
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise CheckpointError(f"ckpt_path: the checkpoint cannot be restored ({what}); give another") from error


def without_appended(args: list[str]) -> list[str]:
    """Remove the arguments that append to a list (``--data.augment+=X``), because the configuration of a resumed run
    already holds the appended values. They stay if a --config among the arguments sets the list."""
    finder = Finder()
    finder.add_argument("-c", "--config", action="append", default=[])
    files = [Path(path) for path in finder.parse_known_args(args)[0].config]
    set_anew = {key for file in files if file.is_file() for key in _keys_in(file)}
    remaining, tokens = [], iter(args)
    for token in tokens:
        appending = re.fullmatch(r"--([\w.]+)\+(=.*)?", token, re.DOTALL)
        if appending is None or appending[1] in set_anew:
            remaining.append(token)
        elif appending[2] is None:
            next(tokens, None)  # its value
    return remaining


def _keys_in(file: Path) -> Iterator[str]:
    """The keys of a configuration file; empty if it cannot be read, because the parser will report that."""
    with suppress(ValueError, yaml.YAMLError):
        config = yaml.safe_load(file.read_text())
        yield from keys_of(config if isinstance(config, dict) else {})


def refuse_other_classes(
    checkpoint: Mapping[str, Any], settings: Namespace, class_names: list[str], is_training: bool
) -> None:
    """Check that the data has the classes that a checkpoint was trained on, in their order.

    Raises:
        UserError: If the classes differ; the message names the first difference.
    """
    trained = checkpoint["hyper_parameters"].get("class_names")
    if not isinstance(trained, list) or trained == class_names:
        return
    names = enumerate(zip_longest(trained, class_names))
    label, before, now = next((label, before, now) for label, (before, now) in names if before != now)
    before, now = ("absent" if name is None else repr(name) for name in (before, now))
    counts = f" ({len(trained)} classes before, {len(class_names)} now)" if len(trained) != len(class_names) else ""
    difference = f"class {label} was {before} and is {now}{counts}"
    if is_training:
        raise _other_data(settings.ckpt_path, difference)
    remedy = "give data of its classes"
    if "class_names" in settings.data.init_args:
        remedy += f", in its order: --data.class_names {shlex.quote(json.dumps(trained, ensure_ascii=False))}"
    raise UserError(f"data: not of the classes of {settings.ckpt_path}: {difference}; {remedy}")


def refuse_other_data(checkpoint: Mapping[str, Any], path: str, identity: Mapping[str, int | str]) -> None:
    """Check that a training resumes with the samples that its checkpoint was trained on.

    Args:
        checkpoint: The checkpoint; an old one without identity is accepted.
        path: The path of the checkpoint.
        identity: Counts and digests of the present data, by name.

    Raises:
        UserError: If the samples differ; the message names the first difference.
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


def refuse_other_optimizer(checkpoint: Mapping[str, Any], model: Classifier) -> None:
    """Check that a training resumes with the same optimizer and scheduler, and warn of flags that have no effect.

    Raises:
        UserError: If the optimizer or its groups of weights differ, or if a scheduler of torch differs: its state holds
            its arguments too.
    """
    trained = checkpoint["hyper_parameters"]
    for name in ("optimizer", "freeze", "layer_decay", "schedule"):
        now, before = model.hparams[name], trained.get(name, model.hparams[name])
        if now != before and (name != "schedule" or isinstance(now, Mapping) or isinstance(before, Mapping)):
            raise UserError(
                f"model.{name}: {now} cannot use the state of the checkpoint's {before}; leave it out, or start "
                "a new training from it with --model.init_from"
            )
    ways = [_way_of_teaching(settings) for settings in (model.hparams, trained)]
    if ways[0] != ways[1]:
        what = f"{ways[0]} cannot use the state of the checkpoint's {ways[1]}"
        raise UserError(
            f"model.distillation: {what}; give the same teacher, or start a new training with --model.init_from"
        )
    for name in _RESTORED:
        now, before = getattr(model, name), trained.get(name, getattr(model, name))
        if now != before:
            rank_zero_warn(f"model.{name}: {now} has no effect, the checkpoint's optimizer has {before}")


def _way_of_teaching(settings: Mapping[str, Any]) -> str:
    is_of_features = settings.get("teacher") is not None and settings.get("distillation") == "features"
    return "features" if is_of_features else "logits"


def refuse_fewer_epochs(checkpoint: Mapping[str, Any], trainer: pl.Trainer) -> None:
    """Check that a training does not end before the epoch of its checkpoint.

    Raises:
        UserError: If trainer.max_epochs is smaller than the number of epochs done.
    """
    try:
        done = int(checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"])
    except (KeyError, TypeError, ValueError):
        return  # damaged, which restoring will report
    if trainer.max_epochs is not None and 0 <= trainer.max_epochs < done:
        what = f"must be {done} or more to resume after {done} epochs, got {trainer.max_epochs}"
        raise UserError(f"trainer.max_epochs: {what}; test the run as it is, or give more")


def take_findings(
    checkpoint: Mapping[str, Any], started_with: Mapping[str, Any], settings: Namespace, model: Classifier, data: Any
) -> None:
    """Use the learning rate and the batch size that callbacks found earlier in the run, unless a flag differs from the
    value at the run's start. The run's configuration keeps the value of the start, however often it is resumed."""
    trained = dict(items_of({"model": checkpoint["hyper_parameters"], "data": checkpoint["data"]}))
    planned, asked = dict(items_of(started_with)), dict(items_of(settings.as_dict()))
    for part, key in ((model, "model.learning_rate"), (data, "data.batch_size")):
        if key in trained and asked.get(key) == planned.get(key):
            setattr(part, key.rpartition(".")[2], trained[key])
    model.hparams["learning_rate"] = model.learning_rate
