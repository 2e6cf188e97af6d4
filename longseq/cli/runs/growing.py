"""Progressive resizing: small images first, then larger ones. Each stage is a run that starts from the previous one."""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from jsonargparse import Namespace
from pytorch_lightning.utilities.seed import isolate_rng

from longseq.cli.errors import UserError
from longseq.cli.errors.building import refused_in_building
from longseq.cli.runs.folders import METRICS, config_of, numbered
from longseq.cli.trainer_flags import refuse_wrong_numbers
from longseq.encoders import resize
from longseq.files.description import build, build_from, describe
from longseq.training import Classifier
from longseq.training.distillation import Teacher, is_network

# height, width if it differs, epochs, learning rate if given: 16x16:40, 32:8@1e-3
_FORM = re.compile(r"([1-9]\d*)(?:x([1-9]\d*))?:([1-9]\d*)(?:@(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?))?")


@dataclass(frozen=True)
class Stage:
    """One stage of a training.

    Attributes:
        size: The value of data.size: height and width in pixels, or one number for both.
        epochs: The number of epochs.
        learning_rate: The peak learning rate; None for the one of the command.
        number: The index of the stage, from 0.
        text: The stage as the user wrote it, such as 16x16:40.
    """

    size: int | list[int]
    epochs: int
    learning_rate: float | None
    number: int
    text: str = field(compare=False)

    def flags(self, tested: str | None) -> list[str]:
        """The flags of this stage.

        Args:
            tested: The checkpoint of the previous stage, to start from; None in the first stage.
        """
        flags = ["--data.size", str(self.size), "--trainer.max_epochs", str(self.epochs)]
        flags += [] if self.learning_rate is None else ["--model.learning_rate", str(self.learning_rate)]
        return flags if tested is None else [*flags, "--model.init_from", tested]


def stages_of(text: str, data: Any) -> list[Stage]:
    """The stages that --grow asks for.

    Args:
        text: Sizes and epochs, such as 16x16:40,32x32:8, or 16:40,32:8. A learning rate may follow after an @, and is
            used from this stage on.
        data: The configuration of the data, whose size changes with the stage.

    Raises:
        UserError: If the text has another form or a size twice, or if the data has no size.
    """
    stages = _parsed(text)
    if "size" not in data.init_args:
        raise UserError(f"grow: {data.class_path} has no size; give data of images that can be scaled")
    return stages


def _parsed(text: str) -> list[Stage]:
    stages: list[Stage] = []
    for number, part in enumerate(text.split(",")):
        match = _FORM.fullmatch(part.strip())
        if match is None:
            what = "give sizes and epochs such as 16x16:40,32x32:8, and learning rates such as 32x32:8@1e-3"
            raise UserError(f"grow: got {text!r}; {what}")
        height, width = int(match[1]), int(match[2] or match[1])
        # a stage without one has the rate of the previous stage: a run resumed by its folder knows no other rate
        rate = float(match[4]) if match[4] else stages[-1].learning_rate if stages else None
        stages.append(Stage(height if height == width else [height, width], int(match[3]), rate, number, match[0]))
    if any(stage.size == earlier.size for stage in stages for earlier in stages[: stage.number]):
        raise UserError(f"grow: got {text!r}, where a size comes twice; give each size once, with all of its epochs")
    return stages


def refuse_wrong_stages(
    stages: list[Stage], settings_with: Callable[[list[str]], Namespace], model: Classifier, data: Any, first: Namespace
) -> None:
    """Check that data and model of each later stage can be built, before the first stage is trained.

    Args:
        stages: The later stages.
        settings_with: Returns the configuration of the command with additional flags.
        model: The model of the first stage.
        data: The data of the first stage.
        first: The configuration of the first stage.

    Raises:
        UserError: If they cannot be built; the message names the stage.
    """
    for stage in stages:
        refused: Any = None
        try:
            _build(settings_with(stage.flags(None)), model, data)
        except Exception as error:
            refused = refused_in_building(error, first.as_dict())
            if refused is None:
                raise
        if refused is not None:  # outside `except`: a cause would make the command name the argument without the stage
            raise UserError(f"grow: {stage.text}: {refused}", refused.exit_code)


def _build(settings: Namespace, model: Classifier, data: Any) -> None:
    """Build data and model of a stage that starts from this model, and discard them."""
    refuse_wrong_numbers(settings)
    description = describe(data)
    description["init_args"]["size"] = settings.data.init_args.size
    with isolate_rng(include_cuda=False):  # otherwise the first stage would draw other random numbers
        encoder, shape = model.encoder, build(description, pl.LightningDataModule).shape
        if hasattr(encoder, "shape"):  # a user's encoder without it accepts images of any size
            encoder = resize(encoder, shape)
        rate = settings.model.learning_rate
        later = build_from(Classifier, model.hparams, encoder=encoder, learning_rate=rate)
        if later.teacher is not None and not is_network(later.teacher):
            Teacher(later.teacher, later)


def stages_left(
    experiment: Path, grow: str, stages: list[Stage], resumed: Path | None, has_resume: bool
) -> tuple[str | None, list[Stage]]:
    """The checkpoint to start from, if there is one, and the stages that are still to be trained.

    Args:
        experiment: The folder of the runs.
        grow: The value of --grow.
        stages: All stages.
        resumed: The folder of the resumed run, if there is one.
        has_resume: Whether to continue after the finished stages of the newest training, if `stages` begin with the
            same ones. Later stages may differ.

    Raises:
        UserError: If the resumed run belongs to none of the stages, or began after other stages.
    """
    if resumed is not None:
        number, own = _place(_size_of(resumed), stages), _stages_to(resumed)
        if number is None:
            raise UserError(f"grow: {grow} has no stage of this run's size; give the stages of its start")
        if own and own[:-1] != stages[:number]:
            before, now = (",".join(stage.text for stage in part) for part in (own[:-1], stages[:number]))
            what = f"this run began after {before or 'no stage'}, and not after {now or 'none'}"
            raise UserError(f"grow: {what}; give the stages of its start, or leave out --resume")
        return None, stages[number:]
    for run in reversed(numbered(experiment) if has_resume else []):
        with suppress(UserError):  # a run that was killed before it wrote its configuration
            own = _stages_to(run)
            is_done = own == stages[: len(own)] and (run / METRICS).exists()
            if not own or (is_done and own == stages):
                break  # the newest run belongs to another training, or is the last stage of this one
            if is_done:
                # fit has tested the first of these that exists; without a validation there is no best.ckpt
                tested = next(path for name in ("averaged", "best", "last") if (path := run / f"{name}.ckpt").exists())
                return str(tested.absolute()), stages[len(own) :]
            if len(own) == 1:
                break  # the newest training began with this run
    return None, stages


def is_given_up(run: Path, grow: str) -> bool:
    """Whether a stopped run belongs to a stage that --grow no longer has, or has after other stages. False for a run of
    the first stage, or if --grow has only one stage or another first stage."""
    own, stages = _stages_to(run), _parsed(grow)
    if min(len(own), len(stages)) < 2 or own[0] != stages[0]:
        return False
    number = _place(own[-1].size, stages)
    return number is None or own[:-1] != stages[:number]


def _stages_to(run: Path) -> list[Stage]:
    """The stages of a run's training, up to the run's own stage; empty if the run is not a stage."""
    grow = config_of(run).get("grow")
    stages = [] if grow is None else _parsed(grow)
    number = _place(_size_of(run), stages)
    return [] if number is None else stages[: number + 1]


def _place(size: Any, stages: list[Stage]) -> int | None:
    """The index of the stage with this size; None if there is none. A size occurs once in a training."""
    return next((stage.number for stage in stages if stage.size == size), None)


def _size_of(run: Path) -> Any:
    """The value of data.size in a run."""
    return config_of(run).get("data", {}).get("init_args", {}).get("size")
