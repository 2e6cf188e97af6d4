"""The command fit, after everything is built: train, then test the best checkpoint."""

import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from jsonargparse import Namespace
from lightning_fabric.utilities.apply_func import move_data_to_device
from pytorch_lightning.callbacks import StochasticWeightAveraging, WeightAveraging
from pytorch_lightning.utilities import rank_zero_only, rank_zero_warn

from longseq.cli.errors.building import refused_in_training
from longseq.cli.errors.machine import what_was_asked
from longseq.cli.names import shown
from longseq.cli.runs.callbacks import FINDERS, BestCheckpoint, take_off
from longseq.cli.runs.folders import from_here
from longseq.cli.trainer_flags import wrong_flag
from longseq.compat.lightning import has_averaged, is_raised_by_lightning, take_average
from longseq.compat.torch import is_out_of_memory
from longseq.reports.baseline import Baseline, BaselineError, fit_baseline
from longseq.reports.interval import wilson
from longseq.training import Classifier
from longseq.training.fitting import OutOfMemory, let_go_of, what_fits
from longseq.training.memory import room_for_code
from longseq.training.timed import epochs_done

_ALSO = {  # what may help where a simple model is ahead, by the kind of the encoder
    "images": ", pretrained weights or more data (docs/guides/own-images.md)",
    "sounds": " or more data (docs/guides/own-recordings.md)",
    "features": " or more data",
}


def train(trainer: pl.Trainer, model: Classifier, data: Any, ckpt_path: str | None, settings: Namespace) -> None:
    """Train, starting from a checkpoint if one is given.

    Raises:
        OutOfMemory: If a step does not fit in memory; the message says which settings fit.
        UserError: If a callback or a flag of the trainer refuses its value.
    """
    room = room_for_code()
    try:
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    except BaseException as error:
        if is_out_of_memory(error) and trainer.world_size == 1:
            room.close()
            raise _out_of_memory(error, trainer, model, data) from None
        if isinstance(error, Exception) and not hasattr(error, "exit_code"):
            refused = refused_in_training(error, settings.as_dict())
            if refused is not None:
                raise refused from error
        if isinstance(error, ValueError | RuntimeError) and is_raised_by_lightning(error):
            raise wrong_flag(error, settings.trainer) from error
        raise


def evaluate_best(
    trainer: pl.Trainer, model: Classifier, data: Any, checkpoints: BestCheckpoint
) -> tuple[str, dict[str, float]]:
    """Test the best checkpoint of a training, or the averaged weights if the training ends with averaging.

    Returns:
        The path of the tested checkpoint, and its figures on the validation and test splits.
    """
    best, figures = checkpoints.best_model_path, dict(checkpoints.figures)
    if checkpoints.best_model_score is not None and checkpoints.monitor:  # a run from an older longseq has no `figures`
        figures[checkpoints.monitor] = float(checkpoints.best_model_score)
    folder = Path(checkpoints.dirpath)  # type: ignore[arg-type]  # it is the same on all ranks
    if not best:  # the training ended before its first validation
        best = str(folder / "last.ckpt")
        if not Path(best).exists():  # there was no step
            trainer.save_checkpoint(best)
        rank_zero_only(print)("fit: the training ended before its first validation, so its last weights are tested")
        figures = dict(*trainer.validate(model, datamodule=data, ckpt_path=best, weights_only=True, verbose=False))
    # WeightAveraging would overwrite the restored weights with its averages, which are in the checkpoint too
    for averaging in take_off(trainer, WeightAveraging, *FINDERS):
        if isinstance(averaging, WeightAveraging) and not has_averaged(averaging):
            name = type(averaging).__name__
            rank_zero_warn(f"{name} has averaged nothing: the training ended before its first update")
    for averaging in take_off(trainer, StochasticWeightAveraging):
        # no step used the averaged weights, so they are not validated or saved yet
        if not averaging.n_averaged:
            rank_zero_warn("StochasticWeightAveraging has averaged nothing: the training ended before its epoch")
            continue
        take_average(averaging, model)
        figures = dict(*trainer.validate(model, datamodule=data, verbose=False))
        best = str(folder / "averaged.ckpt")
        trainer.save_checkpoint(best)
    tested = trainer.test(model, datamodule=data, ckpt_path=best, weights_only=True, verbose=False)
    return best, {**figures, **dict(*tested)}  # `tested` is empty with --trainer.limit_test_batches 0


def say_if_near_chance(
    trainer: pl.Trainer, model: Classifier, data: Any, accuracy: float | None, settings: Namespace
) -> None:
    """Print a line if the test cannot tell the trained model from one that always answers the most frequent class.

    Args:
        trainer: The trainer that has tested the model.
        model: The trained model.
        data: The data module.
        accuracy: The test accuracy; None if it was not tested.
        settings: The configuration of the command. Its files say how many epochs the recipe has.
    """
    if accuracy is None or settings.grow is not None or not _uses_all_samples(trainer, model):
        return
    labels = data.splits()["test"].labels
    low, high = wilson(round(accuracy * len(labels)), len(labels))
    chance = float(model.task.counts(labels, model.num_classes).max()) / len(labels)
    if not low <= chance <= high:
        return
    done, recipe = round(epochs_done(trainer), 1), _epochs_of_recipe(settings)
    remedy = "try more --minutes" if recipe is None or recipe <= done else f"this recipe needs about {recipe}"
    print(f"               near chance after {done:g} {'epoch' if done == 1 else 'epochs'}; {remedy}")


def _epochs_of_recipe(settings: Namespace) -> int | None:
    """The epochs of the last configuration file that names them; None if there is no such file."""
    files = [Path(str(path)) for path in settings.config or []]
    for file in reversed([file for file in files if file.suffix in (".yaml", ".yml", ".json")]):
        with suppress(OSError, yaml.YAMLError):  # the file was removed or edited during the training
            content = yaml.safe_load(file.read_text())
            trainer = content.get("trainer") if isinstance(content, dict) else None
            epochs = trainer.get("max_epochs") if isinstance(trainer, dict) else None
            if isinstance(epochs, int) and epochs > 0:
                return epochs
    return None


def baseline_of(trainer: pl.Trainer, model: Classifier, data: Any, accuracy: float | None) -> Baseline | None:
    """Fit a simple model to the same splits after the test, and print its accuracy; on rank zero only.

    Args:
        trainer: The trainer that has tested the model.
        model: The trained model.
        data: The data module.
        accuracy: The test accuracy of the trained model; None if it was not tested.

    Returns:
        None if a sample may have several classes or none, if only a part of the splits was used, or if there is no
        simple model for the data; an unexpected reason is printed.
    """
    if accuracy is None or not _uses_all_samples(trainer, model):
        return None
    try:
        baseline = fit_baseline(data)
    except BaselineError as error:
        print(shown(f"baseline:      none: {error}"))
        return None
    if baseline is None:
        return None
    print(f"baseline:      {baseline.test:.4f} by {baseline.name} ({baseline.seconds:.1f} s)")
    if baseline.test > accuracy + 1e-6:  # metrics are float32
        print(f"               it is ahead of the trained model; try more --minutes{_ALSO[model.encoder.kind]}")
    return baseline


def where_to_look_next(trainer: pl.Trainer, model: Classifier, tested: str, run: Path) -> str:
    """The commands that show a finished training and use its checkpoint."""
    board = [f"longseq board {shlex.quote(from_here(str(run.parent)))}"] if trainer.loggers else []
    checkpoint = f"--ckpt_path {shlex.quote(from_here(tested))} --input FILE"
    uses = [f"longseq predict (or explain) {checkpoint}"] if model.task.predicts else []
    return ", ".join([*board, *uses]) or f"{from_here(str(run))}/README.md"


def fit_baseline_before(trainer: pl.Trainer, model: Classifier, data: Any) -> None:
    """Fit the simple model before a training of limited time. The data module keeps it until the test."""
    if trainer.is_global_zero and _uses_all_samples(trainer, model):
        data.prepare_data()
        data.setup("fit")
        with suppress(BaselineError):  # printed after the test
            fit_baseline(data)


def _uses_all_samples(trainer: pl.Trainer, model: Classifier) -> bool:
    limits = [getattr(trainer, f"limit_{split}_batches") for split in ("train", "val", "test")]
    is_whole = all(isinstance(limit, float) and limit == 1 for limit in limits)  # 1.0 is all batches, 1 is one
    return is_whole and model.task.best == "accuracy"


def _out_of_memory(error: BaseException, trainer: pl.Trainer, model: Classifier, data: Any) -> OutOfMemory:
    """The error to raise instead. Its message names smaller settings that were tried and fit."""
    let_go_of(error)
    device = trainer.strategy.root_device
    batch = move_data_to_device(data.longest_batch(), device)
    context = trainer.precision_plugin.forward_context
    # after an error Lightning moves everything off a GPU, the optimizer's state too
    has_moments = device.type == "cpu" and any(optimizer.state for optimizer in trainer.optimizers)
    has_max_tokens = getattr(data, "max_tokens", None) is not None
    fitting = what_fits(model.to(device), batch, context, has_moments, trainer.accumulate_grad_batches, has_max_tokens)
    fitting = fitting or ["none of the smaller settings that were tried"]
    return OutOfMemory(f"{what_was_asked(error)}; what fits: {', or '.join(fitting)}")
