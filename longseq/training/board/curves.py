"""The curves of a run, read back from what it has logged for TensorBoard."""

import logging
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read_curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What a run has logged for TensorBoard: the values of each tag, in the order of steps; none without events."""
    folders = {events.parent for events in run.glob("*/events.out.tfevents.*")}
    if len(folders) != 1:
        return {}
    (folder,) = folders
    # it says that a run which went on takes the place of what is behind its checkpoint, which is as it should be
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    one = {"images": 1, "audio": 1, "tensors": 1, "histograms": 1}
    events = EventAccumulator(str(folder), {**one, "scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in tags}
