"""Read the curves of a run from its TensorBoard logs."""

import logging
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read_curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    """The steps and values of each tag that a run has logged; empty without logs."""
    folders = {events.parent for events in run.glob("*/events.out.tfevents.*")}
    if len(folders) != 1:
        return {}
    (folder,) = folders
    # it warns that the events of a resumed run replace those after its checkpoint, which is intended
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    one = {"images": 1, "audio": 1, "tensors": 1, "histograms": 1}
    events = EventAccumulator(str(folder), {**one, "scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in tags}
