"""Reports windows whose prediction names a class although no event of that class lies in them."""

import math
import sys

from longseq.cli.names import shown
from longseq.training import Classifier
from longseq.training.answers.events import Settings, thresholds_of
from longseq.training.answers.predictions import Recording


class Eventless:
    """Counts the windows in which a class reaches the threshold for events, but has no event.

    Args:
        model: The classifier.
        settings: How probabilities become events.
    """

    def __init__(self, model: Classifier, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self._count, self._first = 0, ""

    def take(self, recording: Recording) -> None:
        """Compare the windows of the next recording with its events."""
        thresholds = thresholds_of(self.model)
        if self.settings.threshold is not None:
            thresholds = thresholds.new_full(thresholds.shape, self.settings.threshold)
        for (path, start, end), row in recording.windows:
            last = math.inf if end is None else end
            inside = {event.class_name for event in recording.events if event.start < last and event.end > start}
            names = [self.model.class_names[label] for label in (row.cpu() >= thresholds).nonzero()[:, 0].tolist()]
            missing = [name for name in names if name not in inside]
            self._count += bool(missing)
            if missing and not self._first:
                self._first = f"{shown(path)} from {start:g} to {last:g} s: {', '.join(map(shown, missing))}"

    def say(self) -> None:
        """Print the number of such windows, if there are any."""
        if not self._count:
            return
        settings = {"--smooth": self.settings.smooth, "--shortest": self.settings.shortest}
        given = [f"{flag} 0" for flag, value in settings.items() if value]
        remedy = f"{' '.join(given)} keeps what is short" if given else "where windows overlap, their mean counts"
        others = self._count - 1
        more = f", and {others} more such window{'s' * (others > 1)}" if others else ""
        print(f"events: a class is named, but has no event: {self._first}{more}; {remedy}", file=sys.stderr)
