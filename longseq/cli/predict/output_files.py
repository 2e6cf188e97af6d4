"""The output of the command predict: lines on standard output, or a file that a stopped run resumes with."""

import csv
import hashlib
import io
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longseq.cli.errors import UserError
from longseq.cli.names import escaped
from longseq.cli.runs.folders import lock
from longseq.files.storage import refuse_foreign, write_text
from longseq.training.answers.predictions import Prediction

COLUMNS = ("path", "start", "end", "class", "probability")


@contextmanager
def writable(path: str | Path, flag: str) -> Iterator[None]:
    """Turn an OSError into a UserError that names the file and the flag."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{flag}: {path}: {error.strerror}; give another", exit_code=6) from error


class TextFile:
    """A text file to which predictions are appended. A resumed run cuts it after the last complete predictions.

    Args:
        path: The file.
        flag: The flag that names it.
        mark: A regular expression that matches in every such file written by longseq.

    Raises:
        ValueError: If the file exists and longseq did not write it.
    """

    def __init__(self, path: Path, flag: str, mark: bytes) -> None:
        self.path, self.flag = path, flag
        refuse_foreign(path, flag, mark)

    def holds(self, size: int) -> bool:
        """Whether the file exists and has at least this many bytes."""
        return self.path.is_file() and self.path.stat().st_size >= size

    def open(self) -> None:
        """Open the file, without changing its content, and lock it against other processes.

        Raises:
            UserError: If it cannot be opened, or another process writes it.
        """
        with writable(self.path, self.flag):
            self._file = open(self.path, "a+b")  # noqa: SIM115  (close closes it)
        if not lock(self._file, self.path):
            raise self.in_use()

    def in_use(self) -> UserError:
        """The error to raise if another process writes the file."""
        return UserError(f"{self.flag}: {self.path}: another process writes it; wait for its end, or give another")

    def cut(self, size: int) -> None:
        """Keep this many bytes, and write after them."""
        self._file.truncate(size)
        self._file.seek(size)

    def text(self) -> str:
        """The whole content."""
        self._file.seek(0)  # closing a second descriptor would release the lock
        return self._file.read().decode(errors="surrogateescape")

    def write(self, text: str) -> None:
        """Append a text."""
        self._file.write(text.encode(errors="surrogateescape"))
        self._file.flush()

    def size(self) -> int:
        """The number of bytes written."""
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Output(ABC):
    """Receives predictions one after the other. It is a context manager that opens and closes its files."""

    done = 0  # number of files whose predictions an earlier run has written
    begun_otherwise = False

    def __enter__(self) -> "Output":
        return self

    @abstractmethod
    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None: ...

    @abstractmethod
    def write(self, predictions: Sequence[Prediction]) -> None:
        """Write the predictions of whole files."""


class Lines(Output):
    """Lines on standard output: path, for windows start and end, class and probability. Names are escaped.

    Args:
        events: The file of events, if there is one.
    """

    def __init__(self, events: TextFile | None = None) -> None:
        self._events = events
        # A progress bar replaces sys.stdout. On a terminal (None: the replacement) this keeps the bar below the lines;
        # elsewhere the lines must go to the original.
        self._stream = None if sys.stdout.isatty() else sys.stdout

    def __enter__(self) -> "Output":
        if self._events:
            self._events.open()
            self._events.cut(0)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if self._events:
            self._events.close()

    def write(self, predictions: Sequence[Prediction]) -> None:
        for path, start, end, answers, _ in predictions:
            begin = "\t".join([escaped(path), *times_of(start, end)])
            for name, probability in answers:
                print(f"{begin}\t{escaped(name)}\t{probability:.4f}", file=self._stream)
            if not answers:
                print(f"{begin}\t\t", file=self._stream)  # no class was predicted


class Text(Output):
    """A text file, written one input file at a time. Until all is written, a note beside it says how much of it is
    complete. A run that is started again with the same inputs and settings resumes from there.

    Args:
        path: The file.
        settings: Everything that decides what is written.
        events: The file of events, if there is one. The events of an input are written before its predictions.
        stamps: A text for each input, in order, that changes when the input is replaced. Only the stamps of inputs
            with written predictions are compared: a broken input may be repaired before a run resumes.

    Attributes:
        begun_otherwise: Whether an earlier, stopped run wrote to this path with other settings or inputs.
    """

    header = ""
    mark = b""

    def __init__(self, path: Path, settings: Any, events: TextFile | None = None, stamps: Sequence[str] = ()) -> None:
        self.file = TextFile(path, "out", self.mark)
        self._texts = [*([events] if events else []), self.file]  # events come first, because opening them may fail
        self._note = path.with_name(f".{path.name}.unfinished")
        described = json.dumps([settings, [str(text.path) for text in self._texts]])
        self._key = hashlib.sha256(described.encode()).hexdigest()
        self._sizes = [0 for _ in self._texts]
        self._stamps, self._seen = stamps, hashlib.sha256()
        self._note_at_start = note = self._read_note()
        if note.get("key") == self._key and all(map(TextFile.holds, self._texts, note["sizes"])):
            self._see(0, note["files"])
            if note["seen"] == self._seen.hexdigest():
                self.done, self._sizes = note["files"], note["sizes"]
            else:
                self._seen = hashlib.sha256()
        self.begun_otherwise = bool(note) and not self.done

    def __enter__(self) -> "Output":
        for text in self._texts:
            text.open()
        if self._read_note() != self._note_at_start:  # another process has written the file and has ended since
            raise self.file.in_use()
        for text, size in zip(self._texts, self._sizes, strict=True):
            text.cut(size)
        if not self.done:
            self.file.write(self.header)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is None:
            self._note.unlink(missing_ok=True)
        for text in self._texts:
            text.close()

    def write(self, predictions: Sequence[Prediction]) -> None:
        self.file.write("".join(map(self.text, predictions)))
        before, self.done = self.done, self.done + len({prediction.path for prediction in predictions})
        self._see(before, self.done)
        sizes = [text.size() for text in self._texts]
        note = {"key": self._key, "sizes": sizes, "files": self.done, "seen": self._seen.hexdigest()}
        write_text(self._note, json.dumps(note))

    def _see(self, start: int, end: int) -> None:
        self._seen.update("".join(f"{stamp}\n" for stamp in self._stamps[start:end]).encode())

    @abstractmethod
    def text(self, prediction: Prediction) -> str:
        """The lines for one prediction."""

    def _read_note(self) -> dict[str, Any]:
        try:
            note = json.loads(self._note.read_text())
        except (OSError, ValueError, RecursionError):  # there is no note, or it is incomplete: start anew
            return {}
        return note if isinstance(note, dict) and note.keys() == {"key", "sizes", "files", "seen"} else {}


def times_of(start: float | None, end: float | None) -> list[str]:
    """Start and end in seconds, to a millisecond, or to a microsecond if they are less than 10 ms apart; empty if there
    are none."""
    if start is None or end is None:
        return []
    digits = 3 if end - start > 0.01 - 1e-9 else 6
    return [f"{start:.{digits}f}", f"{end:.{digits}f}"]


def csv_lines(rows: Iterable[Sequence[str]]) -> str:
    """The rows as lines of CSV."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


class Table(Text):
    """CSV with a row for each predicted class. An input without one has a row without class and probability."""

    header = ",".join(COLUMNS) + "\r\n"
    mark = rb"\A" + header.encode()

    def text(self, prediction: Prediction) -> str:
        path, start, end, answers, _ = prediction
        times = times_of(start, end) or ["", ""]
        classes = [(name, f"{probability:.4f}") for name, probability in answers]
        return csv_lines([path, *times, *answer] for answer in classes or [("", "")])


class JsonLines(Text):
    """A JSON object on a line for each file or window."""

    mark = rb'\A\{"path": .*, "classes": \['

    def text(self, prediction: Prediction) -> str:
        path, start, end, answers, _ = prediction
        classes = [{"class": name, "probability": round(probability, 4)} for name, probability in answers]
        times = dict(zip(("start", "end"), map(float, times_of(start, end)), strict=False))
        return json.dumps({"path": path, **times, "classes": classes}) + "\n"


class Json(JsonLines):
    """A JSON array of the same objects, written when the last one is complete."""

    def __init__(self, path: Path, settings: Any, events: TextFile | None = None, stamps: Sequence[str] = ()) -> None:
        self._whole = path
        refuse_foreign(path, "out", rb'\A\[\n\{"path": .*, "classes": \[')
        super().__init__(path.with_name(f".{path.name}.lines"), settings, events, stamps)

    def __enter__(self) -> "Output":
        is_new = not self._whole.exists()
        with writable(self._whole, "out"):
            self._whole.open("ab").close()  # fails now, instead of after all predictions
        if is_new:
            self._whole.unlink()
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is None:
            lines = self.file.text().splitlines()
            with writable(self._whole, "out"):  # if this fails, the note stays and the run can be resumed
                write_text(self._whole, "[\n" + ",\n".join(lines) + "\n]\n")
        super().__exit__(kind, error, traceback)
        if error is None:
            self.file.path.unlink()


_KINDS: dict[str, type[Text]] = {".csv": Table, ".jsonl": JsonLines, ".json": Json}


def output_for(out: str | None, settings: Any, events: TextFile | None, stamps: Sequence[str]) -> Output:
    """Make the output for predictions.

    Args:
        out: A file in the form of its suffix; - or None for standard output.
        settings: As in `Text`.
        events: As in `Text`.
        stamps: As in `Text`.

    Raises:
        UserError: If the suffix is unknown, or the folder does not exist.
    """
    if out in (None, "-"):
        return Lines(events)
    path = Path(str(out))
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise UserError(f"out: {out}: ends in none of {', '.join(_KINDS)}; give one of them, or - for lines")
    if not path.parent.is_dir():
        raise UserError(f"out: {path.parent}: no such folder; make it, or give another", exit_code=6)
    if events and path.resolve() == events.path.resolve():
        raise UserError(f"events: {out}: the same file as --out; give another")
    return kind(path, settings, events, stamps)
