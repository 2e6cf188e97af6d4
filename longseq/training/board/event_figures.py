"""How many of the events that a table names are found in held-out recordings: recall and precision."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytorch_lightning as pl

from longseq.encoders.encode import shard_of
from longseq.training.answers.events import Event, Settings
from longseq.training.answers.predictions import Dividing, Hearing, batches_of
from longseq.training.classifier import Classifier
from longseq.training.data import data_of

Span = tuple[float, float]  # start and end, in seconds


class EventFigures(pl.Callback):
    """Find the events of the test's recordings, or of the validation's in the command validate, and log event_recall
    and event_precision: the shares of the true and of the found events, of all classes together, that make a pair.

    A recording is heard in windows of the model's usual length, with the default settings of events. A figure without
    an event to count is not logged. Nothing is logged where the data says of no recording what is heard when, the model
    has no frames, only some batches are evaluated, or a process has only some of the tokens.

    Attributes:
        by_class: Event recall and event precision of the last test for each class; NaN where a class has no event.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_class: dict[str, list[float]] = {}

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        if trainer.validating:  # the validations of a training would all take twice as long
            self._log(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        self.by_class = self._log(trainer, pl_module, "test")

    def _log(self, trainer: pl.Trainer, model: Classifier, split: str) -> dict[str, list[float]]:
        limit = trainer.limit_test_batches if split == "test" else trainer.limit_val_batches
        is_whole = isinstance(limit, float) and limit == 1  # 1.0 are all, and 1 is a batch
        encoder: Any = model.encoder
        has_frames = encoder.row_seconds is not None and shard_of(encoder.trunk) is None
        data = data_of(trainer)
        true = data.true_events(split) if data is not None and is_whole and has_frames else {}
        if not true:
            return {}
        counts = {name: [0, 0, 0] for name in model.class_names}  # pairs, true events and found ones
        for path, found in self._found(trainer, model, data, list(true)):
            for name, of_class in counts.items():
                spans = [event[:2] for event in found if event.class_name == name]
                heard = joined([event[:2] for event in true[path] if event[2] == name])
                for index, count in enumerate((pairs(spans, heard), len(heard), len(spans))):
                    of_class[index] += count
        both, of_truth, of_found = map(sum, zip(*counts.values(), strict=True))
        for name, value in (("recall", _share(both, of_truth)), ("precision", _share(both, of_found))):
            if not math.isnan(value):
                model.log(f"{split}/event_{name}", value, sync_dist=True)  # it is the same on all ranks
        return {
            "event recall": [_share(both, heard) for both, heard, _ in counts.values()],
            "event precision": [_share(both, found) for both, _, found in counts.values()],
        }

    def _found(
        self, trainer: pl.Trainer, model: Classifier, data: Any, paths: Sequence[str]
    ) -> Iterator[tuple[str, list[Event]]]:
        """The events of each recording. Every rank hears all, because weights that are sharded need all ranks."""
        encoder: Any = model.encoder
        window = encoder.seconds if encoder.any_length else None  # others have windows of that length anyway
        parts = [part for path in paths for part in data.parts(path, window, None, encoder.any_length)]
        hearing, divide, strategy = Hearing(model, Settings()), Dividing(parts), trainer.strategy
        for number, batch in enumerate(batches_of(data, parts)):
            for answered in divide(strategy.predict_step(strategy.batch_to_device(batch), number, scores=True)):
                hearing.add(answered)
            for heard in hearing.heard():
                yield heard.path, heard.events


def joined(spans: Sequence[Span]) -> list[Span]:
    """The stretches that are in any of these, each as long as it can be."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def pairs(found: Sequence[Span], true: Sequence[Span]) -> int:
    """How many pairs of a found event and a true one can be made of those that overlap in time, each in one pair at
    most. Both are in order, and none overlaps another of its kind; so the first two that overlap are always a pair."""
    count = first = second = 0
    while first < len(found) and second < len(true):
        (start, end), (begin, stop) = found[first], true[second]
        is_pair = start < stop and begin < end
        count += is_pair
        first, second = first + (is_pair or end <= begin), second + (is_pair or stop <= start)
    return count


def _share(part: int, of: int) -> float:
    return part / of if of else math.nan
