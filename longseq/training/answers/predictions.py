"""Predictions for files and parts of files, and the events in recordings."""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from lightning_fabric.utilities.apply_func import move_data_to_device
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.attention.mixer import length_with_gaps
from longseq.encoders.patches import stride_of
from longseq.tasks.task import Answer
from longseq.training.answers.events import Event, EventFinder, Settings, Stitching, row_probabilities, thresholds_of
from longseq.training.classifier import Answers, Classifier
from longseq.training.data import Part


class Prediction(NamedTuple):
    """A model's answer for a file, or for a part of it.

    Attributes:
        path: The file; empty for an array.
        start, end: The part, in seconds; None for the whole file.
        answers: The classes that the task names, or the ``top`` most probable ones.
        probabilities: Of all classes, (classes,).
    """

    path: str
    start: float | None
    end: float | None
    answers: list[Answer]
    probabilities: Tensor


def answers(model: Classifier, batches: Iterable[Any], parts: Sequence[Part], **wanted: bool) -> Iterator[Answers]:
    """Yield the model's answers for parts of files. Any number of threads may use the same model.

    Args:
        model: The classifier, in evaluation.
        batches: The inputs, as ``batches_of`` gives them.
        parts: What they are, in their order, those of a file one after the other.
        wanted: What to return, as keywords of ``Classifier.answers``.
    """
    divide, wanted = ByPart(parts), {"probabilities": True} | wanted
    for number, batch in enumerate(batches):
        with torch.inference_mode():
            answered = model.predict_step(move_data_to_device(batch, model.device), number, **wanted)
        yield from divide(answered)


def batches_of(data: Any, parts: list[Part]) -> Iterable[Any]:
    """The batches of some parts of files. The data module is copied, because other threads may use it too."""
    data = copy.copy(data)
    data.predict_parts = parts
    return data.predict_dataloader()


class ByPart:
    """Divide the answers for batches into those for the parts in them. Probabilities and features leave the device.
    Scores of tokens stay there until they have become far fewer numbers.

    Args:
        parts: The parts in their order, those of a file one after the other.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        following = [part[0] for part in parts[1:]]
        self._parts = iter([(part, part[0] != path) for part, path in zip_longest(parts, following)])

    def __call__(self, answered: Answers) -> list[Answers]:
        values = *move_data_to_device(answered[:2], torch.device("cpu")), *answered[2:4]
        count = next(len(value) for value in values if value is not None)
        rows = zip(*([None] * count if value is None else value for value in values), strict=True)
        parts = zip(rows, self._parts, strict=False)
        return [Answers(*row, part=part, is_last=is_last) for row, (part, is_last) in parts]


class FilePredictions:
    """Combine the answers for the parts of each file into predictions.

    Args:
        model: The classifier.
        has_times: Whether every part has a prediction of its own.
        top: How many classes to name, the most probable first; None for those that the task names.
    """

    def __init__(self, model: Classifier, has_times: bool, top: int | None = None) -> None:
        if top is not None:
            model.task.require("classes")
        if top is not None and not 1 <= top <= model.num_classes:
            raise ArgumentError("top", f"must be in 1..{model.num_classes} (the classes), got {top}; leave it out")
        self.model, self.has_times, self.top = model, has_times, top
        self._rows: list[tuple[Part, Tensor]] = []  # parts and probabilities of the file whose parts come

    def add(self, answered: Answers) -> list[Prediction]:
        """The predictions of the file, if this is its last part."""
        self._rows.append((answered.part, answered.probabilities))
        return self.finish() if answered.is_last else []

    def finish(self) -> list[Prediction]:
        """The predictions of a file of which some parts are missing, because the number of batches was limited."""
        rows, self._rows = _heard(self._rows), []
        if self.has_times or not rows:
            return [Prediction(*part, self._answers(row), row) for part, row in rows]
        together = self.model.task.together(torch.stack([row for _, row in rows]))
        return [Prediction(rows[0][0][0], None, None, self._answers(together), together)]

    def _answers(self, probabilities: Float[Tensor, " classes"]) -> list[Answer]:
        names = self.model.class_names
        if self.top is None or not is_heard(probabilities):
            return answers_of(self.model, probabilities)
        highest = probabilities.topk(self.top)
        return [Answer(names[label], value) for value, label in zip(*map(Tensor.tolist, highest), strict=True)]


def is_heard(probabilities: Tensor) -> bool:
    """Whether a part of a file holds something. The probabilities of a gap are NaN, as after the place where the file
    breaks off."""
    return not bool(probabilities.isnan().any())


def answers_of(model: Classifier, probabilities: Float[Tensor, " classes"]) -> list[Answer]:
    """The classes that the task names; none if nothing is heard."""
    return model.task.answer(model.head, probabilities, model.class_names) if is_heard(probabilities) else []


def _heard(rows: Sequence[tuple[Part, Tensor]]) -> Sequence[tuple[Part, Tensor]]:
    """The parts of a file that hold something. If none does, the first one stays."""
    return [(part, row) for part, row in rows if is_heard(row)] or rows[:1]


def features_of_files(features: Iterable[tuple[Part, Tensor]]) -> Iterator[tuple[str, Float[Tensor, " dim"]]]:
    """Path and features of each file, in float32: the mean of those of its parts, except for parts that could not be
    read or lie in a gap.

    Args:
        features: Parts in their order, those of a file one after the other, and the features (dim,) of each.
    """
    for path, of_file in groupby(features, key=lambda pair: pair[0][0]):
        yield path, torch.stack([row.float() for _, row in _heard([*of_file])]).mean(0)


class Recording(NamedTuple):
    """The events in a recording.

    Attributes:
        path: The recording.
        seconds: The length that was read.
        rows: The probabilities of its rows of tokens, (rows, classes), if they were asked for.
        events: The events.
        windows: Its parts, and the probabilities of each.
    """

    path: str
    seconds: float
    rows: Tensor | None
    events: list[Event]
    windows: Sequence[tuple[Part, Tensor]] = ()


class EventDetector:
    """Find the events in recordings from the scores of their frames.

    Args:
        model: The classifier.
        settings: How probabilities of frames become events.
        keeps_rows: Whether to return the probabilities of a recording's rows; memory grows with its length.

    Raises:
        ValueError: If the inputs are images, or a setting is out of its range.
    """

    def __init__(self, model: Classifier, settings: Settings, keeps_rows: bool = False) -> None:
        model.task.require("classes")
        if model.encoder.row_seconds is None:
            raise ArgumentError("events", "must be of sounds, but this model sees images; leave it out")
        self.model, self.settings, self.keeps_rows = model, settings.check(), keeps_rows
        self.row_seconds: float = model.encoder.row_seconds
        embed: Any = model.encoder.trunk.patch_embed
        self._overlap = -(-embed.patch_size[0] // stride_of(embed)[0])  # rows that a patch spans
        self._stitching: Stitching | None = None  # of the recording whose parts come
        self._finished: list[Recording] = []

    def heard(self) -> list[Recording]:
        """The recordings that were finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def add(self, answered: Answers) -> None:
        """Take the next part."""
        path, start, end = answered.part
        scores, gone = self._present_scores(answered)
        if self._stitching is None:
            self._stitching = Stitching(self.row_seconds)
            names, thresholds = self.model.class_names, thresholds_of(self.model)
            self._finder = EventFinder(self.row_seconds, names, thresholds, self.settings)
            self._rows: list[Tensor] = []
            self._windows: list[tuple[Part, Tensor]] = []
        self._windows.append((answered.part, answered.probabilities))
        self._path, self._end = path, math.inf if end is None else end
        if start == 0 or not scores.isnan().any():  # where a file has broken off, all are NaN
            rows = row_probabilities(self.model, scores)
            if gone is not None:
                rows = rows.masked_fill(gone.view(len(rows), -1).all(1, keepdim=True).cpu(), 0)
            if end is not None:  # an encoder may fill its input with silence
                rows = rows[: int((end - start) / self.row_seconds + 1e-6) + 1]
                missing = round((end - start) / self.row_seconds) - len(rows)
                if 0 < missing <= self._overlap:  # overlapping patches end before the last rows
                    rows = torch.cat([rows, rows[-1:].expand(missing, -1)])
            self._take(self._stitching.add(start, rows))
        if answered.is_last:
            self.finish()

    def _present_scores(self, answered: Answers) -> tuple[Tensor, Tensor | None]:
        """The scores of the tokens before the padding; and with gaps which of them are in one, where there is no
        event."""
        if answered.present is None:
            return answered.scores, None
        if not self.model.encoder.gaps:
            return answered.scores[answered.present], None
        _, start, end = answered.part
        columns = self.model.encoder.trunk.patch_embed.grid_size[1]  # type: ignore[union-attr]
        last = int(length_with_gaps(answered.present))
        if end is not None:
            last = max(last, columns * round((end - start) / self.row_seconds))
        gone = ~answered.present[:last]
        return answered.scores[:last].masked_fill(gone[:, None], 0), gone

    def finish(self) -> None:
        """End the recording whose parts come, if there is one."""
        if self._stitching is None:
            return
        self._take(self._stitching.finish())
        # the last frame reaches beyond the last sample, at which the last part ends
        events = self._finder.finish()
        events = [event._replace(end=min(event.end, self._end)) for event in events if event.start < self._end]
        seconds = min(self._finder.num_rows * self.row_seconds, self._end)
        rows = torch.cat(self._rows) if self.keeps_rows else None
        self._finished.append(Recording(self._path, seconds, rows, events, self._windows))
        self._stitching = None

    def _take(self, rows: Float[Tensor, "rows classes"]) -> None:
        self._finder.add(rows)
        if self.keeps_rows:
            self._rows.append(rows)
