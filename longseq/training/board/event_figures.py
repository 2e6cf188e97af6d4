"""Recall and precision of events: how many of those in a table the model finds in held-out recordings."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytorch_lightning as pl

from longseq.encoders.forward_pass import shard_of
from longseq.training.answers.events import Event, Settings
from longseq.training.answers.predictions import ByPart, EventDetector, batches_of
from longseq.training.classifier import Classifier
from longseq.training.data import data_of

_Span = tuple[float, float]  # start and end, in seconds


class EventFigures(pl.Callback):
    """Find the events in the recordings of the test, and in the command validate in those of the validation. Log
    event_recall and event_precision: the shares of true events and of predicted events that make a pair, over all
    classes.

    A recording is read in windows of the model's usual length, with the default settings of events. A figure without an
    event to count is not logged. Nothing is logged if the data has no time-stamped labels, the model has no frames,
    only some batches are evaluated, or a process has only some of the tokens.

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
        counts = {name: [0, 0, 0] for name in model.class_names}  # pairs, true events, predicted events
        for path, events in self._events_of(trainer, model, data, list(true)):
            for name, of_class in counts.items():
                predicted = [event[:2] for event in events if event.class_name == name]
                actual = joined([event[:2] for event in true[path] if event[2] == name])
                for index, count in enumerate((pairs(predicted, actual), len(actual), len(predicted))):
                    of_class[index] += count
        both, actual, predicted = map(sum, zip(*counts.values(), strict=True))
        for name, value in (("recall", _share(both, actual)), ("precision", _share(both, predicted))):
            if not math.isnan(value):
                model.log(f"{split}/event_{name}", value, sync_dist=True)  # it is the same on all ranks
        return {
            "event recall": [_share(both, actual) for both, actual, _ in counts.values()],
            "event precision": [_share(both, predicted) for both, _, predicted in counts.values()],
        }

    def _events_of(
        self, trainer: pl.Trainer, model: Classifier, data: Any, paths: Sequence[str]
    ) -> Iterator[tuple[str, list[Event]]]:
        """The events of each recording. Every rank reads all recordings, because sharded weights need all ranks."""
        encoder: Any = model.encoder
        window = encoder.seconds if encoder.any_length else None  # others have windows of that length anyway
        parts = [part for path in paths for part in data.parts(path, window, None, encoder.any_length)]
        hearing, divide, strategy = EventDetector(model, Settings()), ByPart(parts), trainer.strategy
        for number, batch in enumerate(batches_of(data, parts)):
            for answered in divide(strategy.predict_step(strategy.batch_to_device(batch), number, scores=True)):
                hearing.add(answered)
            for heard in hearing.heard():
                yield heard.path, heard.events


def joined(spans: Sequence[_Span]) -> list[_Span]:
    """The union of spans, as spans that do not touch."""
    union: list[_Span] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((start, end))
    return union


def pairs(predicted: Sequence[_Span], true: Sequence[_Span]) -> int:
    """The most pairs of a predicted and a true event that overlap in time, with each event in one pair at most. Both
    lists are in order, and no two events of a list overlap. So the first two that overlap are always a pair."""
    count = first = second = 0
    while first < len(predicted) and second < len(true):
        (start, end), (begin, stop) = predicted[first], true[second]
        is_pair = start < stop and begin < end
        count += is_pair
        first, second = first + (is_pair or end <= begin), second + (is_pair or stop <= start)
    return count


def _share(part: int, of: int) -> float:
    return part / of if of else math.nan
