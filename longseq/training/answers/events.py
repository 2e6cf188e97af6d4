"""When something is heard: from the probabilities of a recording's frames to events with a start and an end."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from longseq.arguments import ArgumentError

_GOES_ON = 0.5  # share of the threshold down to which an event goes on, as a call swells and fades


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
        threshold: The probability that an event reaches, and it goes on while it has half of it; None for that of the
            model.
        smooth: Seconds over which probabilities are averaged; 0 for those by which the model's threshold was chosen.
        gap: Seconds of silence that do not end an event.
        shortest: Events that are shorter, in seconds, are left out.
    """

    threshold: float | None = None
    smooth: float = 0.0
    gap: float = 0.2
    shortest: float = 0.0

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

    A day has nine million frames, so only those are kept that another window may still reach.

    Args:
        row_seconds: Seconds from one row of tokens to the next.
    """

    def __init__(self, row_seconds: float) -> None:
        self.row_seconds = row_seconds
        self._total, self._counts = torch.zeros(0, 0), torch.zeros(0, 1)
        self._begin = 0  # the row of the recording with which the kept ones begin

    def add(self, start: float, rows: Float[Tensor, "rows classes"]) -> Float[Tensor, "before classes"]:
        """Add a window that starts at a time in seconds, no earlier than the one before.

        Returns:
            The probabilities of the rows before it that were not returned yet; those that no window has heard are zero.
        """
        begin = round(start / self.row_seconds)
        before = self._taken(begin - self._begin, rows.shape[1])
        missing = max(len(rows) - len(self._total), 0)
        if not len(self._total):
            self._total, self._counts = rows.clone(), torch.ones(len(rows), 1)
        else:
            self._total, self._counts = (F.pad(kept, (0, 0, 0, missing)) for kept in (self._total, self._counts))
            self._total[: len(rows)] += rows
            self._counts[: len(rows)] += 1
        return before

    def finish(self) -> Float[Tensor, "rows classes"]:
        """The probabilities of the rows that were not returned yet."""
        return self._taken(len(self._total), self._total.shape[1])

    def _taken(self, count: int, num_classes: int) -> Float[Tensor, "count classes"]:
        heard = self._total[:count] / self._counts[:count].clamp(min=1)
        self._total, self._counts = self._total[count:], self._counts[count:]
        self._begin += count
        return F.pad(heard.reshape(len(heard), num_classes), (0, 0, 0, count - len(heard)))


class EventFinder:
    """Finds the events of a recording, whose probabilities may come in pieces.

    Args:
        row_seconds: Seconds from one row of tokens to the next.
        class_names: The names of the classes.
        thresholds: The model's own threshold for each class.
        settings: How probabilities become events.
        block: Rows that are kept until they are looked at together.
    """

    def __init__(
        self,
        row_seconds: float,
        class_names: Sequence[str],
        thresholds: Float[Tensor, " classes"],
        settings: Settings,
        block: int = 1 << 16,
    ) -> None:
        if settings.threshold is not None:
            thresholds = torch.full_like(thresholds, settings.threshold)
        self.class_names = class_names
        self.thresholds = dict(zip(class_names, thresholds.tolist(), strict=True))
        self.row_seconds, self.shortest, self.block = row_seconds, settings.shortest, block
        self._reach = round(settings.smooth / row_seconds) // 2  # rows on each side over which one is averaged
        self._gap = round(settings.gap / row_seconds)
        self._pieces: list[Tensor] = []  # probabilities of the rows from _begin on
        self.num_rows = 0  # that are there
        self._begin = self._done = 0  # the rows before _done were looked at
        # begin, end and score of what may go on: of stretches above half of the threshold, and of events
        self._stretches: dict[str, tuple[int, int, float]] = {}
        self._open: dict[str, tuple[int, int, float]] = {}
        self._events: list[Event] = []

    def add(self, rows: Float[Tensor, "rows classes"]) -> None:
        """Add the probabilities of the next rows."""
        self._pieces.append(rows)
        self.num_rows += len(rows)
        if self.num_rows - self._reach - self._done >= self.block:
            self._look(self.num_rows - self._reach)

    def finish(self) -> list[Event]:
        """All events, in the order of their starts."""
        self._look(self.num_rows)
        for name in self.class_names:
            self._hear(name)
        for name in list(self._open):
            self._close(name)
        return sorted(self._events)

    def _look(self, end: int) -> None:
        """Look at the rows before this one; the rows that their means need are there."""
        rows = torch.cat(self._pieces)
        for (name, threshold), of_class in zip(self.thresholds.items(), rows.T, strict=True):
            smooth = smoothed(of_class, self._reach)[self._done - self._begin : end - self._begin]
            for begin, stop in stretches(smooth >= _GOES_ON * threshold):
                score = float(smooth[begin:stop].max())
                begin, stop = self._done + begin, self._done + stop
                first, last, highest = self._stretches.get(name, (begin, -1, 0.0))
                if last != begin:
                    self._hear(name)
                    first, highest = begin, 0.0
                self._stretches[name] = first, stop, max(highest, score)
        kept = max(end - self._reach, self._begin)
        self._pieces, self._begin, self._done = [rows[kept - self._begin :].clone()], kept, end

    def _hear(self, name: str) -> None:
        """Take the last stretch of a class, now that it is complete, as an event or a part of one, if it reaches the
        threshold."""
        begin, end, score = self._stretches.pop(name, (0, 0, 0.0))
        if score < self.thresholds[name]:
            return
        if name in self._open:
            first, last, highest = self._open[name]
            if begin - last <= self._gap:
                self._open[name] = first, end, max(highest, score)
                return
            self._close(name)
        self._open[name] = begin, end, score

    def _close(self, name: str) -> None:
        begin, end, score = self._open.pop(name)
        if (end - begin) * self.row_seconds >= self.shortest:
            self._events.append(Event(begin * self.row_seconds, end * self.row_seconds, name, score))


def smoothed(probabilities: Float[Tensor, " rows"], reach: int) -> Float[Tensor, " rows"]:
    """The mean over so many rows on each side of each one, and itself; at the ends over the rows that are there."""
    if reach == 0:
        return probabilities
    return F.avg_pool1d(probabilities[None], 2 * reach + 1, 1, reach, count_include_pad=False)[0]


def stretches(is_heard: Bool[Tensor, " rows"]) -> list[tuple[int, int]]:
    """From where to where, end excluded, values are True."""
    steps = F.pad(is_heard.to(torch.int8), (1, 1)).diff()
    return list(zip((steps == 1).nonzero()[:, 0].tolist(), (steps == -1).nonzero()[:, 0].tolist(), strict=True))


def row_probabilities(model: Any, scores: Float[Tensor, "n classes"]) -> Float[Tensor, "rows classes"]:
    """The probabilities of each row of tokens of one recording: a row of patches has several tokens, one for each band
    of mels, of which the most probable counts for each class."""
    columns = model.encoder.trunk.patch_embed.grid_size[1]
    return model.task.probabilities(scores).unflatten(0, (-1, columns)).amax(1).cpu()


def thresholds_of(model: Any) -> Float[Tensor, " classes"]:
    """The model's own threshold for each class: those of its last validation, or a half."""
    return model.task.thresholds(model.head, model.num_classes)
