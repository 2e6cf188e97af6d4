"""When something is heard: from the probabilities of a recording's frames to events with a start and an end."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from longseq.arguments import ArgumentError


class Event(NamedTuple):
    """A stretch of a recording in which a class is heard.

    Attributes:
        start, end: In seconds.
        class_name: What is heard.
        score: The highest probability in it, after smoothing.
    """

    start: float
    end: float
    class_name: str
    score: float


class Settings(NamedTuple):
    """How probabilities become events.

    Attributes:
        threshold: The probability from which on a class is heard; None for that of the model.
        smooth: Seconds over which probabilities are averaged.
        gap: Seconds of silence that do not end an event.
        shortest: Events that are shorter, in seconds, are left out.
    """

    threshold: float | None = None
    smooth: float = 0.1
    gap: float = 0.2
    shortest: float = 0.05

    def check(self) -> "Settings":
        """Return the same settings.

        Raises:
            ValueError: If one is out of its range.
        """
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise ArgumentError("threshold", f"must be between 0 and 1, got {self.threshold}; 0.5 is a start")
        for name in ("smooth", "gap", "shortest"):
            if not getattr(self, name) >= 0:
                raise ArgumentError(name, f"must not be negative, got {getattr(self, name)}; 0 turns it off")
        return self


class Stitching:
    """The probabilities of a recording's frames, from those of its windows: where windows overlap, their mean.

    A day has nine million frames, so they are kept once.

    Args:
        row_seconds: Seconds from one row of tokens to the next.
        seconds: Length of the recording, if it is known: room for all windows is then made with the first one.
    """

    def __init__(self, row_seconds: float, seconds: float = 0.0) -> None:
        self.row_seconds, self.seconds = row_seconds, seconds
        self._total, self._counts = torch.zeros(0), torch.zeros(0, 1, dtype=torch.int16)
        self._length = 0

    def add(self, start: float, rows: Float[Tensor, "rows classes"]) -> None:
        """Add a window that starts at a time in seconds."""
        begin = round(start / self.row_seconds)
        end = begin + len(rows)
        if end > len(self._total):
            length = max(end, math.ceil(self.seconds / self.row_seconds) + 2)
            heard, counts = self._total, self._counts
            self._total, self._counts = torch.zeros(length, rows.shape[1]), torch.zeros(length, 1, dtype=torch.int16)
            if len(heard):
                self._total[: len(heard)], self._counts[: len(heard)] = heard, counts
        self._total[begin:end] += rows
        self._counts[begin:end] += 1
        self._length = max(self._length, end)

    def whole(self) -> Float[Tensor, "rows classes"]:
        """The probabilities of all rows. A row that no window has heard is zero. Nothing can be added afterwards."""
        return self._total.div_(self._counts.clamp_(min=1))[: self._length]


def events_of(
    probabilities: Float[Tensor, "rows classes"],
    row_seconds: float,
    class_names: Sequence[str],
    thresholds: Float[Tensor, " classes"],
    settings: Settings,
) -> list[Event]:
    """The events of a recording, in the order of their starts.

    Args:
        probabilities: Of each class, at each row of tokens.
        row_seconds: Seconds from one row to the next.
        class_names: The names of the classes.
        thresholds: The model's own threshold for each class.
        settings: How probabilities become events.
    """
    if settings.threshold is not None:
        thresholds = torch.full_like(thresholds, settings.threshold)
    events = []
    width = round(settings.smooth / row_seconds)
    for name, of_class, threshold in zip(class_names, probabilities.T, thresholds.tolist(), strict=True):
        smooth = smoothed(of_class[:, None], width)[:, 0]  # class by class: a day has nine million frames
        for begin, end in joined(stretches(smooth >= threshold), round(settings.gap / row_seconds)):
            if (end - begin) * row_seconds >= settings.shortest:
                score = float(smooth[begin:end].max())
                events.append(Event(begin * row_seconds, end * row_seconds, name, score))
    return sorted(events)


def smoothed(probabilities: Float[Tensor, "rows classes"], width: int) -> Float[Tensor, "rows classes"]:
    """The mean over so many rows around each one; at the ends over the rows that are there."""
    if width <= 1:
        return probabilities
    width += 1 - width % 2  # odd, so that the mean is centred

    def means(values: Tensor) -> Tensor:
        return F.avg_pool1d(values, width, 1, width // 2, count_include_pad=False)

    return means(probabilities.T[None])[0].T


def stretches(is_heard: Bool[Tensor, " rows"]) -> list[tuple[int, int]]:
    """From where to where, end excluded, values are True."""
    steps = F.pad(is_heard.to(torch.int8), (1, 1)).diff()
    return list(zip((steps == 1).nonzero()[:, 0].tolist(), (steps == -1).nonzero()[:, 0].tolist(), strict=True))


def joined(found: Sequence[tuple[int, int]], gap: int) -> list[tuple[int, int]]:
    """The stretches, with those made one that are at most a gap apart."""
    together: list[tuple[int, int]] = []
    for begin, end in found:
        if together and begin - together[-1][1] <= gap:
            together[-1] = together[-1][0], end
        else:
            together.append((begin, end))
    return together


def row_probabilities(model: Any, scores: Float[Tensor, "n classes"]) -> Float[Tensor, "rows classes"]:
    """The probabilities of each row of tokens of one recording: a row of patches has several tokens, one for each band
    of mels, of which the most probable counts for each class."""
    columns = model.encoder.trunk.patch_embed.grid_size[1]
    return model.task.probabilities(scores).unflatten(0, (-1, columns)).amax(1).cpu()


def thresholds_of(model: Any) -> Float[Tensor, " classes"]:
    """The model's own threshold for each class: those of its last validation, or a half."""
    thresholds = getattr(model.head, "thresholds", None)
    return torch.full((model.num_classes,), 0.5) if thresholds is None else thresholds.cpu()
