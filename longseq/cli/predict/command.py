"""The command predict: from files to predictions, and to events with their times."""

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from jsonargparse import Namespace
from matplotlib.figure import Figure
from pytorch_lightning.callbacks import RichProgressBar
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.cli.errors import UserError
from longseq.cli.names import shown
from longseq.cli.predict.event_tables import table_for
from longseq.cli.predict.input_files import files_of, parts_of, say_of_windows
from longseq.cli.predict.output_files import Output, output_for, writable
from longseq.cli.predict.spectrogram import sections_of
from longseq.cli.predict.windows_without_events import Eventless
from longseq.encoders.lettering import legible, lettering
from longseq.files.checkpoint import Checkpoint
from longseq.files.storage import refuse_foreign, replacing
from longseq.reports.plots import COLOURS, can_be_drawn, refuse_foreign_picture, save, styled
from longseq.tasks import Task
from longseq.training import Classifier
from longseq.training.answers.events import Settings
from longseq.training.answers.predictions import (
    ByPart,
    EventDetector,
    FilePredictions,
    Prediction,
    Recording,
    batches_of,
    features_of_files,
)
from longseq.training.data import Part

_DRAWN_COLUMNS = 1500
_MANY_ROWS = 2**20  # rows of tokens in a sequence; three hours at 10 ms
_BYTES = 84  # memory for each row and channel: 4.5 GiB for 900,001 rows of width 64, with Verma


def predict(trainer: pl.Trainer, model: Classifier, datamodule: Any, checkpoint: Checkpoint, asked: Namespace) -> None:
    """Predict the inputs, and print or write the predictions of each file as soon as it is processed.

    Args:
        trainer: Runs the model.
        model: The classifier.
        datamodule: Reads the files.
        checkpoint: The checkpoint of the model's weights.
        asked: The flags of the command.

    Raises:
        UserError: If a flag does not fit the inputs or the model.
    """
    _refuse_what_is_not_predicted(model.task, asked)
    if asked.embeddings is not None:
        if not asked.embeddings.endswith(".npz"):
            raise UserError(f"embeddings: {asked.embeddings}: does not end in .npz; give another")
        refuse_foreign(Path(asked.embeddings), "embeddings", rb"\bembeddings\.npy")
        _check_place(asked.embeddings, "embeddings")
    chosen = Settings(asked.threshold, asked.smooth, asked.gap, asked.shortest)
    others = [name for name, value in chosen._asdict().items() if value != getattr(Settings(), name)]
    if asked.explained is not None and asked.page is None:
        raise UserError("explained: applies to --page; give it too, or leave this out")
    if others and asked.events is None and asked.picture is None:
        raise UserError(f"{others[0]}: applies to events; give --events or --picture, or leave it out")
    has_windows = asked.window is not None or asked.hop is not None
    paths = files_of(asked.input, datamodule.predict_suffixes)
    by_path = parts_of(datamodule, paths, asked.window, asked.hop, model.encoder.any_length)
    paths = list(by_path)
    if asked.picture is not None:
        if len(paths) > 1:
            raise UserError(f"picture: {asked.picture}: a picture is of one recording, got {len(paths)}; give one")
        _check_picture(asked.picture)
    answers = [asked.window, asked.hop, asked.top, chosen, asked.data.as_dict(), asked.model.as_dict()]
    settings = [checkpoint.digest, paths, *answers]
    files = [os.stat(path) for path in paths]
    stamps = [f"{file.st_size} {file.st_mtime_ns}" for file in files]
    if any(asked[flag] is not None for flag in ("picture", "embeddings", "page")):
        settings.append(time.time())  # a stopped run keeps none of these, so it must start anew
    lengths = {path: parts[-1][2] or 0.0 for path, parts in by_path.items()}
    events = None if asked.events is None else table_for(Path(asked.events), lengths)
    output = output_for(asked.out, settings, events, stamps)
    if output.begun_otherwise:
        what = "holds a part of another run (of another model, or with other settings or inputs)"
        print(shown(f"out: {asked.out} {what}: starting again"), file=sys.stderr)
    if output.done:
        print(f"out: {output.done} of {len(paths)} files are written; resuming", file=sys.stderr)
    finished, paths = paths[: output.done], paths[output.done :]
    parts = [part for path in paths for part in by_path[path]]
    takers: list[_Taker] = [] if events is None else [events.take]
    if asked.picture is not None:
        takers.append(lambda recording: _save(draw(recording, model, datamodule), asked.picture))
    eventless, detector = Eventless(model, chosen), None
    try:
        gathering = FilePredictions(model, has_windows, asked.top)
        page = None if asked.page is None else _page(asked, model, datamodule, checkpoint, by_path)
        if page is not None and (takers or page.hears):
            takers.append(page.take)
        if takers:
            keeps_rows = asked.picture is not None or (page is not None and page.keeps_rows)
            detector = EventDetector(model, chosen, keeps_rows)
    except ArgumentError as error:
        raise UserError(f"{error.argument}: {error.what}") from error
    if not has_windows:
        say_of_windows({path: by_path[path] for path in paths})
    say_if_long(parts, model)
    wanted = {"features": asked.embeddings is not None, "scores": bool(takers)}
    model.predict_step = partial(model.predict_step, **wanted)  # Lightning passes only a batch and its number
    writes = _Writes(parts, gathering, output, detector, [*takers, eventless.take], page)
    trainer.callbacks.append(writes)  # type: ignore[attr-defined]
    with output:
        if events is not None:
            events.begin(finished)
        loader = batches_of(datamodule, parts)
        trainer.predict(model, loader, ckpt_path=asked.ckpt_path, weights_only=True, return_predictions=False)
    eventless.say()
    if page is not None:
        del model.predict_step  # explain asks for other answers
        with writable(page.folder, "page"):
            page.write()
    if asked.embeddings is not None:
        of_files = dict(features_of_files(writes.features))
        with writable(asked.embeddings, "embeddings"), replacing(Path(asked.embeddings)) as part:
            np.savez(part, paths=np.array(list(of_files)), embeddings=torch.stack(list(of_files.values())))


def _page(asked: Namespace, *parts: Any) -> Any:
    from longseq.cli.page.page import Page  # what explain needs takes a while to import

    return Page(asked, *parts)


def progress_bars() -> list[pl.Callback]:
    """A progress bar on standard error, if that is a terminal."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        return []
    return [RichProgressBar(console_kwargs={"stderr": True})]


_Taker = Callable[[Recording], None]


class _Writes(pl.Callback):
    """Writes the events and the predictions of each file as soon as its last part is predicted. Events come first: a
    file whose predictions are written counts as done.

    Attributes:
        features: Each part with its features, if they are asked for.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        gathering: FilePredictions,
        output: Output,
        detector: EventDetector | None,
        takers: list[_Taker],
        page: Any = None,
    ) -> None:
        self._divide, self._gathering, self._output, self._page = ByPart(parts), gathering, output, page
        self._detector, self._takers = detector, takers
        self.features: list[tuple[Part, Tensor]] = []

    def on_predict_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *batch: Any) -> None:
        complete: list[Prediction] = []
        for answered in self._divide(outputs):
            if answered.features is not None:
                self.features.append((answered.part, answered.features))
            if self._detector is not None:
                self._detector.add(answered)
            if answered.probabilities is not None:
                complete += self._gathering.add(answered)
        self._write(complete)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._detector is not None:
            self._detector.finish()
        self._write(self._gathering.finish())

    def _write(self, complete: list[Prediction]) -> None:
        for recording in [] if self._detector is None else self._detector.heard():
            for take in self._takers:
                take(recording)
        if complete:
            self._output.write(complete)
            if self._page is not None:
                self._page.predictions += complete


def say_if_long(parts: Sequence[Part], model: Classifier) -> None:
    """Print how much memory the longest part may take if it has more than a million rows of tokens."""
    encoder: Any = model.encoder
    if encoder.row_seconds is None:
        return
    lengths = [(end - start, path) for path, start, end in parts if end is not None]
    seconds, path = max(lengths, default=(0.0, ""))
    num_rows = round(seconds / encoder.row_seconds)
    if num_rows > _MANY_ROWS:
        gib = num_rows * encoder.dim * _BYTES / 2**30
        takes = f"{seconds / 3600:.1f} h as one sequence of {num_rows:,} rows, which take about {gib:.0f} GiB"
        print(f"{shown(path)}: {takes}; --window 10 divides it", file=sys.stderr)


def _refuse_what_is_not_predicted(task: Task, asked: Namespace) -> None:
    """Check that no classes are asked of a model without classes, and only features of one that predicts nothing."""
    if task.predicts == "classes":
        return
    name = type(task).__name__
    if task.predicts is None and asked.embeddings is None:
        remedy = "give --embeddings, or train from it with --model.init_from"
        raise UserError(f"model.task: {name} predicts no classes; {remedy}")
    of_classes = ["events", "picture", "page", "top"] if task.predicts else ["out", "events", "picture", "page", "top"]
    given = [flag for flag in of_classes if asked[flag] is not None]
    if given:
        raise UserError(f"{given[0]}: applies to classes, and {name} predicts none; leave it out")


def _check_place(path: str, flag: str) -> None:
    """Open a file for appending, so that a wrong path fails before the prediction instead of after it."""
    with writable(path, flag):
        open(path, "ab").close()


def _check_picture(path: str) -> None:
    if not can_be_drawn(path):
        raise UserError(f"picture: {path}: not a known format; give a .png, .pdf or .svg")
    refuse_foreign_picture(Path(path), "picture")
    _check_place(path, "picture")


def _save(figure: Figure, path: str) -> None:
    with writable(path, "picture"):
        save(figure, Path(path))


@styled
def draw(recording: Recording, model: Classifier, datamodule: Any) -> Figure:
    """Draw a recording's spectrogram, the probabilities of its classes over time, and its events."""
    path, length, rows, events, _ = recording
    assert rows is not None  # EventDetector had keeps_rows
    encoder: Any = model.encoder
    spectrogram = torch.cat([*sections_of(encoder, datamodule, path, length, _DRAWN_COLUMNS / length)], dim=1)
    names = [name for name in model.class_names if any(event.class_name == name for event in events)]
    figure = Figure((9, 5.5))
    above, middle, below = figure.subplots(3, 1, sharex=True, height_ratios=[2, 2, 0.4 + 0.3 * max(len(names), 1)])
    above.imshow(
        spectrogram.numpy(), origin="lower", aspect="auto", cmap="magma", extent=(0, length, 0, len(spectrogram)),
        vmin=float(spectrogram.nan_to_num(-math.inf).max()) - 6 * math.log(10), interpolation="nearest",
    )  # fmt: skip
    above.set_ylabel("mel band")
    title = legible(Path(path).name)
    above.set_title(title, **lettering(title))
    above.grid(False)
    columns = min(len(rows), _DRAWN_COLUMNS)
    highest = F.adaptive_max_pool1d(rows.T[None], columns)[0]
    times = (torch.arange(columns) + 0.5) * len(rows) * encoder.row_seconds / columns
    for number, name in enumerate(model.class_names):
        # classes without an event are grey
        colour = COLOURS[2 + names.index(name) % 6] if name in names else "#cccccc"
        middle.plot(times, highest[number], color=colour, linewidth=1, zorder=2 if name in names else 1)
    middle.set(ylabel="probability", ylim=(0, 1.03))
    for place, name in enumerate(names):
        spans = [(event.start, event.end - event.start) for event in events if event.class_name == name]
        below.broken_barh(spans, (place - 0.35, 0.7), color=COLOURS[2 + place % 6])
    below.set(xlabel="seconds", xlim=(0, length), ylim=(-0.6, max(len(names), 1) - 0.4))
    below.set_yticks(range(len(names)), map(legible, names), **lettering(*map(legible, names)))
    return figure
