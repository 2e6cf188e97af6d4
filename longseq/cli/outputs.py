"""Where the command predict writes: lines on standard output, or a file that a stopped run goes on with."""

import csv
import hashlib
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longseq.cli.errors import UserError
from longseq.cli.names import escaped
from longseq.training.predictions import Prediction
from longseq.training.storage import write_text

COLUMNS = ("path", "start", "end", "class", "probability")


class Output(ABC):
    """Takes predictions as they come; used as a context, which ends when all are written, or an error stops it."""

    done = 0  # files that an earlier run has written

    def __enter__(self) -> "Output":
        return self

    @abstractmethod
    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None: ...

    @abstractmethod
    def write(self, predictions: Sequence[Prediction]) -> None:
        """Write the predictions of whole files."""


class Lines(Output):
    """Lines on standard output: path, with times start and end, class and probability, with names escaped."""

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """There is nothing to close."""

    def write(self, predictions: Sequence[Prediction]) -> None:
        for path, start, end, answers, _ in predictions:
            begin = escaped(path) if start is None else f"{escaped(path)}\t{start:.3f}\t{end:.3f}"
            for name, probability in answers:
                print(f"{begin}\t{escaped(name)}\t{probability:.4f}")
            if not answers:
                print(f"{begin}\t\t")  # no class is there


class Text(Output):
    """A text that grows by the predictions of one file after the other. Until all is written, a note beside it says how
    much of it is whole, and a run that is started again with the same inputs and settings goes on from there.

    Args:
        path: The file.
        settings: All that decides what is written into it.
    """

    header = ""

    def __init__(self, path: Path, settings: Any) -> None:
        self.path = path
        self._note = path.with_name(f".{path.name}.unfinished")
        self._key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def __enter__(self) -> "Output":
        note = self._read_note()
        size = note.get("bytes", -1)
        goes_on = note.get("key") == self._key and self.path.is_file() and self.path.stat().st_size >= size
        self.done = note["files"] if goes_on else 0
        try:
            self.file = open(self.path, "r+b" if goes_on else "wb")
        except OSError as error:
            raise UserError(f"out: {self.path}: {error.strerror}; give another", exit_code=6) from error
        if goes_on:
            self.file.truncate(size)
            self.file.seek(size)
        else:
            self.file.write(self.header.encode())
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.file.close()
        if error is None:
            self._note.unlink(missing_ok=True)

    def write(self, predictions: Sequence[Prediction]) -> None:
        self.file.write("".join(map(self.text, predictions)).encode(errors="surrogateescape"))
        self.file.flush()
        self.done += len({prediction.path for prediction in predictions})
        note = {"key": self._key, "bytes": self.file.tell(), "files": self.done}
        write_text(self._note, json.dumps(note))

    @abstractmethod
    def text(self, prediction: Prediction) -> str:
        """The lines of a prediction."""

    def _read_note(self) -> dict[str, Any]:
        try:
            return json.loads(self._note.read_text())
        except (OSError, ValueError):  # there is none, or it was cut off: start anew
            return {}


class Table(Text):
    """CSV with a row for each class that is named; where none is, a row without class and probability."""

    header = ",".join(COLUMNS) + "\r\n"

    def text(self, prediction: Prediction) -> str:
        text = io.StringIO()
        rows = csv.writer(text)
        path, start, end, answers, _ = prediction
        times = ["", ""] if start is None else [f"{start:.3f}", f"{end:.3f}"]
        classes = [(name, f"{probability:.4f}") for name, probability in answers]
        rows.writerows([path, *times, *answer] for answer in classes or [("", "")])
        return text.getvalue()


class JsonLines(Text):
    """A JSON object on each line, for each file or each window."""

    def text(self, prediction: Prediction) -> str:
        path, start, end, answers, _ = prediction
        classes = [{"class": name, "probability": round(probability, 4)} for name, probability in answers]
        times = {} if start is None or end is None else {"start": round(start, 3), "end": round(end, 3)}
        return json.dumps({"path": path, **times, "classes": classes}) + "\n"


class Json(JsonLines):
    """A JSON array of the same objects; it is made when all of them are there."""

    def __init__(self, path: Path, settings: Any) -> None:
        self._whole = path
        super().__init__(path.with_name(f".{path.name}.lines"), settings)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        if error is None:
            lines = self.path.read_text().splitlines()
            self._whole.write_text("[\n" + ",\n".join(lines) + "\n]\n")
            self.path.unlink()


_KINDS: dict[str, type[Text]] = {".csv": Table, ".jsonl": JsonLines, ".json": Json}


def output_for(out: str | None, settings: Any) -> Output:
    """Where predictions go.

    Args:
        out: A file whose suffix says its form, - or None for standard output.
        settings: All that decides what is written.

    Raises:
        UserError: If the suffix is unknown, or the folder is not there.
    """
    if out in (None, "-"):
        return Lines()
    path = Path(str(out))
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise UserError(f"out: {out}: ends in none of {', '.join(_KINDS)}; give one of them, or - for lines")
    if not path.parent.is_dir():
        raise UserError(f"out: {path.parent}: no such folder; make it, or give another", exit_code=6)
    return kind(path, settings)
