"""How many steps a training takes in a given time, so that settings can be compared at equal time."""

import statistics
from pathlib import Path

from longseq.arguments import ArgumentError
from longseq.training.board.curves import read_curves

# flags of a short training that only measures its speed
TRIAL = [
    "--trainer.max_epochs", "-1", "--trainer.max_steps", "1000000", "--trainer.max_time", "00:00:00:20",
    "--trainer.log_every_n_steps", "4", "--trainer.num_sanity_val_steps", "0",
    "--trainer.limit_val_batches", "1",  # schedulers and callbacks may watch a validation figure
    "--trainer.limit_test_batches", "0",
]  # fmt: skip


def steps_within(seconds: float, run: Path) -> int:
    """How many optimizer steps fit into so many seconds, by the step times that a run has logged.

    Validation and checkpoints are not counted. The time of a step is the median of the logged times.

    Raises:
        ValueError: If the run logged no step time, or a step takes longer.
    """
    steps = read_curves(run).get("throughput/step_ms")
    if not steps:
        raise ArgumentError(
            "seconds", f"must be left out, because {run} shows no speed after 20 s: its steps are too long"
        )
    step = statistics.median(value for _, value in steps) / 1000
    if seconds < step:
        raise ArgumentError("seconds", f"must be at least {step:.2g}, the time of one step, got {seconds:g}; give more")
    return round(seconds / step)
