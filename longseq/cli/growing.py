"""A training that grows: small images first, then larger ones. Each stage is a run that starts from the one before."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longseq.cli.errors import UserError
from longseq.cli.resuming import config_of
from longseq.cli.runs import METRICS, numbered


@dataclass(frozen=True)
class Stage:
    """A part of a training.

    Attributes:
        size: What data.size is: height and width in pixels, or one number for both.
        epochs: For how many epochs it trains.
        number: Its place among the stages, from 0 on.
    """

    size: int | list[int]
    epochs: int
    number: int

    def flags(self, tested: str | None) -> list[str]:
        """The flags of this stage.

        Args:
            tested: The checkpoint of the stage before, to start from; None in the first stage.
        """
        flags = ["--data.size", str(self.size), "--trainer.max_epochs", str(self.epochs)]
        return flags if tested is None else [*flags, "--model.init_from", tested]


def stages_of(text: str, data: Any) -> list[Stage]:
    """The stages that --grow asks for.

    Args:
        text: Sizes and epochs, such as 16x16:40,32x32:8, or 16:40,32:8.
        data: The configuration of the data, whose size changes from stage to stage.

    Raises:
        UserError: If it is not of that form, if a size comes twice, or if the data has no size.
    """
    matches = [re.fullmatch(r"\s*([1-9]\d*)(?:x([1-9]\d*))?:([1-9]\d*)\s*", part) for part in text.split(",")]
    if not all(matches):
        raise UserError(f"grow: got {text!r}; give sizes and epochs such as 16x16:40,32x32:8")
    parsed = [(int(m[1]), int(m[2] or m[1]), int(m[3])) for m in matches if m]
    if len({size[:2] for size in parsed}) < len(parsed):
        raise UserError(f"grow: got {text!r}, where a size comes twice; give each size once, with all of its epochs")
    if "size" not in data.init_args:
        raise UserError(f"grow: {data.class_path} has no size; give data of images that can be scaled")
    return [
        Stage(height if height == width else [height, width], epochs, number)
        for number, (height, width, epochs) in enumerate(parsed)
    ]


def stages_left(
    experiment: Path, grow: str, stages: list[Stage], resumed: Path | None, has_resume: bool
) -> tuple[str | None, list[Stage]]:
    """The checkpoint to start from, if there is one, and the stages that are still to be trained.

    Args:
        experiment: The folder of the runs.
        grow: The value of the flag.
        stages: All stages.
        resumed: The folder of the resumed run, if there is one.
        has_resume: Whether to go on after the newest run, if it has ended.

    Raises:
        UserError: If the resumed run is of none of the stages.
    """
    if resumed is not None:
        stage = _stage_of(resumed, stages)
        if stage is None:
            raise UserError(f"grow: {grow} has no stage of this run's size; give the stages of its start")
        return None, stages[stage.number :]
    runs = numbered(experiment) if has_resume else []
    if not runs or not (runs[-1] / METRICS).exists() or config_of(runs[-1]).get("grow") != grow:
        return None, stages
    stage = _stage_of(runs[-1], stages)
    if stage is None or stage is stages[-1]:
        return None, stages
    averaged = runs[-1] / "averaged.ckpt"  # fit has tested it, if there is one
    tested = averaged if averaged.exists() else runs[-1] / "best.ckpt"
    return str(tested.absolute()), stages[stage.number + 1 :]


def _stage_of(run: Path, stages: list[Stage]) -> Stage | None:
    """The stage that a run has trained or is training; None if it is of another training."""
    size = config_of(run).get("data", {}).get("init_args", {}).get("size")
    return next((stage for stage in stages if stage.size == size), None)
