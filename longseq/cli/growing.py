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

    def flags(self, init_from: str | None) -> list[str]:
        """The flags of this stage.

        Args:
            init_from: The checkpoint of the stage before; None in the first stage.
        """
        flags = ["--data.size", str(self.size), "--trainer.max_epochs", str(self.epochs)]
        return flags if init_from is None else [*flags, "--model.init_from", init_from]


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


def stage_of(run: Path, stages: list[Stage]) -> Stage | None:
    """The stage that a run has trained or is training; None if it is of another training."""
    size = config_of(run).get("data", {}).get("init_args", {}).get("size")
    return next((stage for stage in stages if stage.size == size), None)


def begun(experiment: Path, grow: str, stages: list[Stage]) -> tuple[Stage, str] | None:
    """The stage that comes next after the newest run of an experiment, and the checkpoint that it starts from; None if
    that run is of another training, or of the last stage."""
    runs = numbered(experiment)
    if not runs or not (runs[-1] / METRICS).exists() or config_of(runs[-1]).get("grow") != grow:
        return None
    stage = stage_of(runs[-1], stages)
    if stage is None or stage is stages[-1]:
        return None
    averaged = runs[-1] / "averaged.ckpt"  # fit has tested it, if there is one
    return stages[stage.number + 1], str((averaged if averaged.exists() else runs[-1] / "best.ckpt").absolute())
