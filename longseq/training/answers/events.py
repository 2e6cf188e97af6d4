"""From the probabilities of a recording's frames to events with a start and an end."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from longseq.arguments import ArgumentError

_CONTINUES = 0.5  # share of the threshold above which an event continues, because a call swells and fades


class Event(NamedTuple):
    """A span of a recording in which a class is present.

    Attributes:
        start, end: In seconds.
        class_name: The class.
        score: The highest probability in it, after smoothing.
    """

    start: float
    end: float
    class_name: str
    score: float


class Settings(NamedTuple):
    """How probabilities become events.

    Attributes:
        threshold: The probability that an event reaches; it continues while the probability is above half of that. None
            is the model's own threshold.
        smooth: Seconds over which probabilities are averaged; 0 leaves them as they are, as when the model's threshold
            was chosen.
        gap: Seconds below the threshold that do not end an event.
        shortest: Seconds; shorter events are left out.
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
    """Join the probabilities of a recording's windows into those of its frames; where windows overlap, their mean.

    A day has nine million frames, so only the frames that a later window may still reach stay in memory.

    Args:
        row_seconds: Seconds from one row of tokens to the next.
    """

    def __init__(self, row_seconds: float) -> None:
        self.row_seconds = row_seconds
        self._total, self._counts = torch.zeros(0, 0), torch.zeros(0, 1)
        self._begin = 0  # the first row that is still here

    def add(self, start: float, rows: Float[Tensor, "rows classes"]) -> Float[Tensor, "before classes"]:
        """Add a window that starts at a time in seconds, no earlier than the one before.

        Returns:
            The probabilities of the rows before it that were not returned yet; rows in no window have zeros.
        """
        begin = round(start / self.row_seconds)
        before = self._taken(begin - self._begin, rows.shape[1])
        missing = max(len(rows) - len(self._total), 0)
        if not len(self._total):
            self._total, self._counts = rows.clone(), torch.ones(len(rows), 1)
        else:
            self._total, self._counts = (F.pad(sums, (0, 0, 0, missing)) for sums in (self._total, self._counts))
            self._total[: len(rows)] += rows
            self._counts[: len(rows)] += 1
        return before

    def finish(self) -> Float[Tensor, "rows classes"]:
        """The probabilities of the rows that were not returned yet."""
        return self._taken(len(self._total), self._total.shape[1])

    def _taken(self, count: int, num_classes: int) -> Float[Tensor, "count classes"]:
        means = self._total[:count] / self._counts[:count].clamp(min=1)
        self._total, self._counts = self._total[count:], self._counts[count:]
        self._begin += count
        return F.pad(means.reshape(len(means), num_classes), (0, 0, 0, count - len(means)))


class EventFinder:
    """Find the events of a recording, whose probabilities may come in pieces.

    Args:
        row_seconds: Seconds from one row of tokens to the next.
        class_names: The names of the classes.
        thresholds: The model's own threshold for each class.
        settings: How probabilities become events.
        block: Rows that are processed together.
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
        self._begin = self._done = 0  # the rows before _done were processed
        # begin, end and score of what may continue: stretches above half of the threshold, and events
        self._stretches: dict[str, tuple[int, int, float]] = {}
        self._open: dict[str, tuple[int, int, float]] = {}
        self._events: list[Event] = []

    def add(self, rows: Float[Tensor, "rows classes"]) -> None:
        """Add the probabilities of the next rows."""
        self._pieces.append(rows)
        self.num_rows += len(rows)
        if self.num_rows - self._reach - self._done >= self.block:
            self._process(self.num_rows - self._reach)

    def finish(self) -> list[Event]:
        """All events, in the order of their starts."""
        self._process(self.num_rows)
        for name in self.class_names:
            self._complete(name)
        for name in list(self._open):
            self._close(name)
        return sorted(self._events)

    def _process(self, end: int) -> None:
        """Process the rows before this one; the rows that their means need are here."""
        rows = torch.cat(self._pieces)
        for (name, threshold), of_class in zip(self.thresholds.items(), rows.T, strict=True):
            smooth = smoothed(of_class, self._reach)[self._done - self._begin : end - self._begin]
            for begin, stop in stretches(smooth >= _CONTINUES * threshold):
                score = float(smooth[begin:stop].max())
                begin, stop = self._done + begin, self._done + stop
                first, last, highest = self._stretches.get(name, (begin, -1, 0.0))
                if last != begin:
                    self._complete(name)
                    first, highest = begin, 0.0
                self._stretches[name] = first, stop, max(highest, score)
        begin = max(end - self._reach, self._begin)
        self._pieces, self._begin, self._done = [rows[begin - self._begin :].clone()], begin, end

    def _complete(self, name: str) -> None:
        """Take the last stretch of a class, which is complete now, as an event or as a part of one, if it reaches the
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
    """The moving mean over each row and ``reach`` rows on either side; at the ends over the rows that exist."""
    if reach == 0:
        return probabilities
    return F.avg_pool1d(probabilities[None], 2 * reach + 1, 1, reach, count_include_pad=False)[0]


def stretches(is_present: Bool[Tensor, " rows"]) -> list[tuple[int, int]]:
    """Begin and end, excluded, of each run of True."""
    steps = F.pad(is_present.to(torch.int8), (1, 1)).diff()
    return list(zip((steps == 1).nonzero()[:, 0].tolist(), (steps == -1).nonzero()[:, 0].tolist(), strict=True))


def row_probabilities(model: Any, scores: Float[Tensor, "n classes"]) -> Float[Tensor, "rows classes"]:
    """The probabilities of each row of tokens of one recording. A row of patches has a token for each band of mels; for
    each class the most probable one counts."""
    columns = model.encoder.trunk.patch_embed.grid_size[1]
    return model.task.probabilities(scores).unflatten(0, (-1, columns)).amax(1).cpu()


def thresholds_of(model: Any) -> Float[Tensor, " classes"]:
    """The model's own threshold for each class, from its last validation, or 0.5."""
    return model.task.thresholds(model.head, model.num_classes)
