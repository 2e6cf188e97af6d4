"""Predictions of files and of parts of files, and the events in recordings."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from os import PathLike
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.encoders.patches import stride_of
from longseq.tasks.task import Answer
from longseq.training.checkpoint import data_of, read_checkpoint
from longseq.training.classifier import Classifier
from longseq.training.data import Part
from longseq.training.description import allow_classes, build, naming
from longseq.training.events import Event, EventFinder, Settings, Stitching, row_probabilities, thresholds_of


class Prediction(NamedTuple):
    """What a model says of a file, or of a part of it.

    Attributes:
        path: The file; empty for an array.
        start, end: The part, in seconds; None for the whole file.
        answers: The classes that the task names, or the most probable ones if some number of them was asked for.
        probabilities: Of all classes, (classes,).
    """

    path: str
    start: float | None
    end: float | None
    answers: list[Answer]
    probabilities: Tensor


class Gathering:
    """Puts together the probabilities of a file's parts, as batches bring them.

    Args:
        model: The classifier.
        parts: The inputs in their order, those of a file one after the other.
        has_times: Whether every part has a prediction of its own.
        top: How many classes to name, the most probable first; None for those that the task names.
    """

    def __init__(self, model: Classifier, parts: Sequence[Part], has_times: bool, top: int | None = None) -> None:
        if top is not None and not 1 <= top <= model.num_classes:
            raise ArgumentError("top", f"must be in 1..{model.num_classes} (the classes), got {top}; leave it out")
        self.model, self.has_times, self.top = model, has_times, top
        self._files = [(path, list(of_file)) for path, of_file in groupby(parts, key=lambda part: part[0])]
        self._files.reverse()  # the next file is the last
        self._rows: list[Tensor] = []

    def add(self, rows: Sequence[Tensor] | Tensor) -> Iterator[Prediction]:
        """The predictions of all files that are complete with the probabilities of the next parts."""
        self._rows += list(rows)
        while self._files and len(self._rows) >= len(self._files[-1][1]):
            yield from self._next_file()

    def finish(self) -> Iterator[Prediction]:
        """The predictions of a file of which some parts are missing, because the number of batches was limited."""
        if self._rows:
            yield from self._next_file()

    def _next_file(self) -> Iterator[Prediction]:
        path, parts = self._files.pop()
        rows, self._rows = self._rows[: len(parts)], self._rows[len(parts) :]
        heard = [(part, row) for part, row in zip(parts, rows, strict=False) if not is_unheard(part, row)]
        if not self.has_times:
            together = self.model.task.together(torch.stack([row for _, row in heard]))
            yield Prediction(path, None, None, self._answers(together), together)
            return
        for (_, start, end), row in heard:
            yield Prediction(path, start, end, self._answers(row), row)

    def _answers(self, probabilities: Float[Tensor, " classes"]) -> list[Answer]:
        names = self.model.class_names
        if self.top is None:
            return self.model.task.answer(self.model.head, probabilities, names)
        highest = probabilities.topk(self.top)
        return [Answer(names[label], value) for value, label in zip(*map(Tensor.tolist, highest), strict=True)]


def is_unheard(part: Part, scores: Tensor) -> bool:
    """Whether a part could not be read: where a file breaks off, the later parts are not numbers."""
    return part[1] > 0 and bool(scores.isnan().any())


def features_of_files(parts: Iterable[Part], rows: Iterable[Tensor]) -> Iterator[tuple[str, Float[Tensor, " dim"]]]:
    """Path and features of each file: the mean of those of its parts, except for parts that could not be read.

    Args:
        parts: The inputs in their order, those of a file one after the other.
        rows: The features of each; if these are fewer, the later parts are left out.
    """
    for path, of_file in groupby(zip(parts, rows, strict=False), key=lambda pair: pair[0][0]):
        yield path, torch.stack([row for part, row in of_file if not is_unheard(part, row)]).mean(0)


class Heard(NamedTuple):
    """A recording that was heard to its end.

    Attributes:
        path: The recording.
        seconds: How much of it was heard.
        rows: The probabilities of its rows of tokens, (rows, classes), if they were kept.
        events: What is heard in it, and when.
    """

    path: str
    seconds: float
    rows: Tensor | None
    events: list[Event]


class Hearing:
    """Finds the events of recordings while their parts are predicted. Used as a context, in which the model hands over
    the scores of the frames.

    Args:
        model: The classifier.
        parts: The inputs in their order, those of a file one after the other.
        settings: How probabilities of frames become events.
        keeps_rows: Whether to keep the probabilities of a recording's rows, which take memory by its length.

    Raises:
        ValueError: If the inputs are images, or a setting is out of its range.
    """

    def __init__(self, model: Classifier, parts: Sequence[Part], settings: Settings, keeps_rows: bool = False) -> None:
        if model.encoder.row_seconds is None:
            raise ArgumentError("events", "must be of sounds, but this model sees images; leave it out")
        self.model, self.settings, self.keeps_rows = model, settings.check(), keeps_rows
        self.row_seconds: float = model.encoder.row_seconds
        embed: Any = model.encoder.trunk.patch_embed
        self._overlap = -(-embed.patch_size[0] // stride_of(embed)[0])  # rows that a patch spans
        self._parts = list(reversed(parts))  # the next part is the last
        self._stitching: Stitching | None = None  # of the recording that is being heard
        self._heard: list[Heard] = []

    def __enter__(self) -> "Hearing":
        self.model.on_scores = self._add
        return self

    def __exit__(self, *error: Any) -> None:
        self.model.on_scores = None

    def heard(self) -> list[Heard]:
        """Each recording that was heard to its end since the last call."""
        heard, self._heard = self._heard, []
        return heard

    def _add(self, scores: Float[Tensor, "b n classes"], present: Bool[Tensor, "b n"] | None) -> None:
        for number, of_part in enumerate(scores):
            path, start, end = part = self._parts.pop()
            there = of_part if present is None else of_part[present[number]]
            if self._stitching is None:
                self._stitching = Stitching(self.row_seconds)
                names, thresholds = self.model.class_names, thresholds_of(self.model)
                self._finder = EventFinder(self.row_seconds, names, thresholds, self.settings)
                self._rows: list[Tensor] = []
            self._path, self._end = path, math.inf if end is None else end
            if not is_unheard(part, there):
                rows = row_probabilities(self.model, there)
                if end is not None:  # an encoder may fill its input with silence
                    rows = rows[: int((end - start) / self.row_seconds + 1e-6) + 1]
                    missing = round((end - start) / self.row_seconds) - len(rows)
                    if 0 < missing <= self._overlap:  # overlapping patches end before the last rows
                        rows = torch.cat([rows, rows[-1:].expand(missing, -1)])
                self._take(self._stitching.add(start, rows))
            if not self._parts or self._parts[-1][0] != path:
                self.finish()

    def finish(self) -> None:
        """Hear no more of the recording that is being heard, if there is one."""
        if self._stitching is None:
            return
        self._take(self._stitching.finish())
        # the last frame reaches beyond the last sample, at which the last part ends
        found = [event for event in self._finder.finish() if event.start < self._end]
        events = [event._replace(end=min(event.end, self._end)) for event in found]
        seconds = min(self._finder.num_rows * self.row_seconds, self._end)
        self._heard.append(Heard(self._path, seconds, torch.cat(self._rows) if self.keeps_rows else None, events))
        self._stitching = None

    def _take(self, rows: Float[Tensor, "rows classes"]) -> None:
        self._finder.add(rows)
        if self.keeps_rows:
            self._rows.append(rows)


def model_and_data(
    ckpt_path: str | PathLike, allow_class: Sequence[str] = (), root: str | None = None
) -> tuple[Classifier, Any]:
    """The model of a checkpoint, in evaluation, and the data module that it was trained with.

    Args:
        ckpt_path: A checkpoint of fit.
        allow_class: Packages whose classes the checkpoint may name, besides ours.
        root: Folder of the data, if it has moved.

    Raises:
        CheckpointError: If it is no checkpoint, or does not describe its model and its data.
    """
    allow_classes(list(allow_class))
    checkpoint = read_checkpoint(ckpt_path)
    description = data_of(checkpoint, ckpt_path)
    model = Classifier.from_checkpoint(checkpoint).eval()
    if root is not None:
        description = {**description, "init_args": {**description["init_args"], "root": root}}
    with naming(ckpt_path):
        return model, build(description, pl.LightningDataModule)
