"""Collects predictions, and writes the page that shows them."""

import secrets
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jsonargparse import Namespace
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.cli.names import shown
from longseq.cli.page.folder import (
    FILES,
    INDEX,
    TABLE,
    decisions_in,
    page_before,
    write_index,
)
from longseq.cli.page.known import RunTable, figure_of, retraining, start_of
from longseq.cli.page.pictures import Sounds, columns_for, write_image, write_spectrogram
from longseq.cli.predict.output_files import writable
from longseq.deploy.explain import explain_file
from longseq.deploy.predictor import Predictor
from longseq.files.checkpoint import Checkpoint
from longseq.training import Classifier
from longseq.training.answers.events import thresholds_of
from longseq.training.answers.predictions import Prediction, Recording, answers_of
from longseq.training.data import Part

_SHOWN = 5  # classes of an item whose probabilities the page has, and curves of a recording
_LEVELS = "0123456789abcdefghijklmnopqrstuvwxyz"  # of a curve: one character for each point
_POINTS = 4000  # of a curve: ten a second, in longer recordings fewer, but one a second
_KEPT = 2**26  # numbers that the probabilities of a recording's frames may have
_EXPLAINED = 12  # files with explain's picture, unless another number is given


class Page:
    """Collects predictions and recordings, and writes the page.

    Args:
        asked: The flags of predict.
        model: The classifier.
        datamodule: Reads the files.
        checkpoint: The checkpoint of the model, before Lightning takes its content.
        by_path: The parts of each file.

    Raises:
        ArgumentError: If the model predicts no classes, the folder holds other files, or decisions of other classes.
    """

    def __init__(
        self,
        asked: Namespace,
        model: Classifier,
        datamodule: Any,
        checkpoint: Checkpoint,
        by_path: dict[str, list[Part]],
    ) -> None:
        self.folder, self.model, self.datamodule, self.by_path = Path(asked.page), model, datamodule, by_path
        self.asked, self._input = asked, Path(asked.input)
        if asked.explained is not None and asked.explained < 0:
            raise ArgumentError("explained", f"must be 0 or more, got {asked.explained}; {_EXPLAINED} is the default")
        if self._input.is_dir() and self.folder.resolve().is_relative_to(self._input.resolve()):
            raise ArgumentError("page", f"{self.folder} lies in the input, and would be predicted too; give another")
        self._before = page_before(self.folder, "page") or {}
        with writable(self.folder, "page"):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._decisions = decisions_in(self.folder, model.class_names, "page")
        self._table = RunTable(datamodule, Path(asked.ckpt_path).parent, self._input)
        self._figures = self._before.get("figures", []) + self._figure(checkpoint)
        raw = getattr(datamodule, "raw_inputs", datamodule.inputs)
        self.kind: str = raw.kind
        self._rate_hz = raw.rate_hz if raw.kind in ("sounds", "signals") else None
        self.predictions: list[Prediction] = []
        self._recordings: dict[str, dict[str, Any]] = {}

    @property
    def hears(self) -> bool:
        """Whether the model says when a class is heard, so that the page shows events and curves."""
        is_by_frame = self.model.task.names_silence or self.model.pooling is not None
        return self.model.encoder.row_seconds is not None and is_by_frame

    @property
    def keeps_rows(self) -> bool:
        """Whether the probabilities of all frames of the longest recording fit into memory."""
        longest = max((parts[-1][2] or 0.0 for parts in self.by_path.values()), default=0.0)
        return longest / (self.model.encoder.row_seconds or 1.0) * self.model.num_classes < _KEPT

    def take(self, recording: Recording) -> None:
        """Keep the events and the curves of a recording."""
        rows = recording.rows
        if rows is None:
            rows = torch.stack([row for _, row in recording.windows]).float()
        numbers = {name: number for number, name in enumerate(self.model.class_names)}
        events = [
            [round(event.start, 3), round(event.end, 3), numbers[event.class_name], round(event.score, 3)]
            for event in (recording.events if self.model.task.names_silence else [])
        ]
        self._recordings[recording.path] = {"events": events, "curves": _curves(rows, recording.seconds)}

    def write(self) -> None:
        """Write the folder, and print where the page is."""
        self.model.cpu()
        part = self.folder / f".{FILES}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            data = self._data(part)
            shutil.rmtree(self.folder / FILES, ignore_errors=True)
            part.rename(self.folder / FILES)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        write_index(self.folder, data["title"], data)
        print(shown(f"page: {self.folder / INDEX}"), file=sys.stderr)

    def _data(self, part: Path) -> dict[str, Any]:
        items = [self._item(prediction) for prediction in self.predictions]
        paths = list(dict.fromkeys(item["path"] for item in items))
        number_of = {path: number for number, path in enumerate(paths)}
        several = self.model.task.names_silence
        separator = getattr(self.datamodule, "labels_separator", None) or ";"
        return {
            "id": self._before.get("id") or secrets.token_hex(8),
            "title": self._input.resolve().name or str(self._input),
            "made": datetime.now().isoformat(" ", "minutes"),
            "model": str(self.asked.ckpt_path),
            "kind": self.kind,
            "classes": self.model.class_names,
            "separator": separator if several else None,
            "figures": self._figures,
            "lower": self.model.task.mode == "min",
            "table": {"columns": self._table.columns, "rows": self._table.rows, "root": str(self._table.root)},
            "retrain": retraining(self.datamodule, Path(self.asked.ckpt_path), self.folder / TABLE),
            "decisions": self._decisions,
            "files": self._files(paths, items, part, separator if several else None),
            "items": [[number_of[item.pop("path")], *item.values()] for item in items],
        }

    def _item(self, prediction: Prediction) -> dict[str, Any]:
        """An item of the page; its values are in the order that page.js reads."""
        probabilities, names = prediction.probabilities.float(), self.model.class_names
        answer = [names.index(answer.class_name) for answer in answers_of(self.model, probabilities)]
        probabilities = probabilities.nan_to_num()  # JSON has no NaN
        top = probabilities.topk(min(_SHOWN, len(names))).indices.tolist()
        scores = [[label, round(float(probabilities[label]), 4)] for label in dict.fromkeys([*top, *answer])]
        # as precise as splits.csv, whose rows decisions replace
        times = [None if time is None else round(time, 6) for time in (prediction.start, prediction.end)]
        return {
            "path": prediction.path,
            "start": times[0],
            "end": times[1],
            "answer": answer,
            "scores": scores,
            "uncertainty": round(_uncertainty(self.model, probabilities), 4),
        }

    def _files(self, paths: list[str], items: list[dict], part: Path, separator: str | None) -> list[dict[str, Any]]:
        explained = self._explained(items, part)
        sounds, lengths = Sounds(self.folder), {path: self._seconds(path) for path in paths}
        columns = columns_for(sum(lengths.values()))
        described = []
        for number, path in enumerate(paths):
            row, target = self._table.path_of(path), part / str(number)
            of_file: dict[str, Any] = {"path": path, "row": row, "split": self._table.split_of(row)}
            of_file["cells"] = self._table.cells_of(path)
            of_file["known"] = self._table.label_of(path, row, self.model.class_names, separator)
            of_file["explained"] = explained.get(path)
            if self.kind == "images":
                of_file["picture"] = write_image(self.datamodule, path, target)
            elif self._rate_hz and lengths[path]:
                drawn = write_spectrogram(self.model, self.datamodule, path, lengths[path], columns, target)
                of_file |= {"seconds": lengths[path], "began": start_of(path), **self._recordings.get(path, {})}
                of_file["picture"], of_file["sections"] = drawn
                of_file["sound"] = sounds.address(path, target) if self.kind == "sounds" else None
            described.append(of_file)
        if sounds.num_outside:
            what = f"{sounds.num_outside} large sounds are not copied; the page plays them where they lie"
            print(f"page: {what}", file=sys.stderr)
        return described

    def _seconds(self, path: str) -> float:
        """The length of a recording; 0 for what is none."""
        if not self._rate_hz:
            return 0.0
        part = self.by_path[path][-1]
        return part[2] or self.datamodule.read_part(part).shape[-1] / self._rate_hz

    def _explained(self, items: list[dict], part: Path) -> dict[str, str]:
        """Draw explain's pictures of the files that are most uncertain; of bags of all, because they have no other."""
        ordered = dict.fromkeys(item["path"] for item in sorted(items, key=lambda item: -item["uncertainty"]))
        default = len(ordered) if self.kind == "features" else _EXPLAINED
        most = default if self.asked.explained is None else self.asked.explained
        predictor = Predictor(self.model, self.datamodule)
        names: dict[str, str] = {}
        for number, path in enumerate([*ordered][:most]):
            name = f"explained-{number}.png"
            try:
                explain_file(predictor, path, min(3, self.model.num_classes), part / name)
            except ArgumentError as error:  # for example a model without attention, or a sound that is too short
                print(shown(f"page: without explain's pictures: {error}"), file=sys.stderr)
                break
            names[path] = name
        return names

    def _figure(self, checkpoint: Checkpoint) -> list[dict[str, Any]]:
        """The figure of this checkpoint; none if the page shows it already."""
        figure, digest = figure_of(checkpoint), checkpoint.digest
        if figure is None or digest in [before["model"] for before in self._before.get("figures", [])[-1:]]:
            return []
        name, value = figure
        return [
            {
                "name": name,
                "value": value,
                "model": digest,
                "split": self._table.digest,
                "decisions": sum(decision.get("label") is not None for decision in self._decisions.values()),
            }
        ]


def _uncertainty(model: Classifier, probabilities: Tensor) -> float:
    """From 0 to 1: how near the two most probable classes are to each other, or one of several to its threshold."""
    if not model.task.names_silence:
        first, second = probabilities.topk(2).values.tolist()
        return 1 - (first - second)
    thresholds = thresholds_of(model)
    room = torch.where(probabilities < thresholds, thresholds, 1 - thresholds).clamp(min=1e-6)
    return 1 - float(((probabilities - thresholds).abs() / room).min())


def _curves(rows: Tensor, seconds: float) -> dict[int, str]:
    """The probabilities of the most probable classes over time: for each a text with a character for each point."""
    points = min(len(rows), max(min(round(10 * seconds), _POINTS), round(seconds), 100))
    highest = F.adaptive_max_pool1d(rows.T[None].float(), points)[0]
    most = highest.amax(1).topk(min(_SHOWN, len(highest))).indices.tolist()
    levels = (highest * (len(_LEVELS) - 1)).round().nan_to_num(0).long()
    return {label: "".join(_LEVELS[level] for level in levels[label].tolist()) for label in most}
