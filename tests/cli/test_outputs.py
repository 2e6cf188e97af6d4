"""Predictions in files, and from Python: the same answers in every form, and a stopped run goes on."""

import csv
import fcntl
import io
import json
import os
import re
import shutil
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from tones import rows, tone

import longseq
from longseq.arguments import ArgumentError
from longseq.cli.errors import UserError
from longseq.cli.predict.command import progress_bars
from longseq.cli.predict.output_files import COLUMNS, Json, JsonLines, Lines, Table, Text, times_of
from longseq.encoders import SpectrogramEncoder
from longseq.files.storage import write_checkpoint
from longseq.tasks.task import Answer
from longseq.training.answers.predictions import Prediction


@pytest.mark.parametrize(
    ("start", "end", "texts"),
    [
        (0.5, 0.51, ["0.500", "0.510"]),
        (0.0003, 0.0006, ["0.000300", "0.000600"]),
        (1.0, 31.12345, ["1.000", "31.123"]),
        (None, None, []),
    ],
)
def test_times_of_short_windows_have_more_digits(start: float | None, end: float | None, texts: list[str]) -> None:
    assert times_of(start, end) == texts


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Four recordings of unlike lengths, two of them longer than the model's clips."""
    folder = tmp_path / "sounds"
    folder.mkdir()
    for number, (hertz, seconds) in enumerate([(300, 0.2), (2000, 0.5), (300, 0.7), (2000, 0.1)]):
        soundfile.write(folder / f"{number}, of 4.wav", tone(hertz, seconds), 8000, subtype="FLOAT")
    return folder


def table(path: Path) -> list[list[str]]:
    with open(path, newline="") as file:
        header, *lines = csv.reader(file)
    assert tuple(header) == COLUMNS
    return lines


@pytest.mark.parametrize("flags", [[], ["--window", "0.2", "--hop", "0.1"], ["--top", "2"]], ids=str)
def test_every_form_has_the_answers_of_the_lines(command, checkpoint, recordings, tmp_path, flags) -> None:
    flags = ["predict", "--ckpt_path", checkpoint, "--input", recordings, *flags]
    lines = rows(command(*flags))
    for name in ("out.csv", "out.jsonl", "out.json"):
        done = command(*flags, "--out", tmp_path / name)
        assert done.code == 0 and done.out == "", done.err
    of_table = [[value for value in row if value] for row in table(tmp_path / "out.csv")]
    assert of_table == lines
    objects = json.loads((tmp_path / "out.json").read_text())
    assert objects == [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    flat = [
        [
            each["path"],
            *(f"{each[key]:.3f}" for key in ("start", "end") if key in each),
            one["class"],
            one["probability"],
        ]
        for each in objects
        for one in each["classes"]
    ]
    assert [[*row[:-1], f"{row[-1]:.4f}"] for row in flat] == lines
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "out.json", "out.jsonl", "sounds"]


def test_the_most_probable_classes_come_first(command, checkpoint, recordings) -> None:
    flags = ["predict", "--ckpt_path", checkpoint, "--input", recordings, "--top"]
    found = rows(command(*flags, "2"))
    assert len(found) == 8
    for (path, first, high), (same, second, low) in zip(found[::2], found[1::2], strict=True):
        assert path == same and {first, second} == {"high", "low"} and float(high) >= float(low)
        assert float(high) + float(low) == pytest.approx(1, abs=2e-4)
    done = command(*flags, "3")
    assert done.code == 2 and done.err.endswith("error: top: must be in 1..2 (the classes), got 3; leave it out\n")


@pytest.mark.parametrize("form", ["csv", "tsv"])
def test_a_run_that_stops_at_a_broken_file_goes_on_where_it_was(
    command, checkpoint, recordings, tmp_path, form: str
) -> None:
    flags = ["predict", "--ckpt_path", checkpoint, "--input", recordings, "--data.batch_size", "1", "--window", "0.2"]
    of_whole, events = tmp_path / f"whole-events.{form}", tmp_path / f"events.{form}"
    whole = command(*flags, "--out", tmp_path / "whole.csv", "--events", of_whole)
    assert whole.code == 0
    flags += ["--events", events]
    third = recordings / "2, of 4.wav"
    sound = third.read_bytes()
    broken = tone(300, 0.7)
    broken[-1] = np.nan  # the header is right, and two of its windows can be heard
    soundfile.write(third, broken, 8000, subtype="FLOAT")
    stopped = command(*flags, "--out", tmp_path / "out.csv")
    assert stopped.code == 3 and "2, of 4.wav" in stopped.err
    before = events.read_bytes()
    assert len(before.splitlines()) > 2 and of_whole.read_bytes().startswith(before) and before != of_whole.read_bytes()
    events.write_bytes(before + b"what was not yet whole")
    first_two = table(tmp_path / "out.csv")
    assert {Path(row[0]).name for row in first_two} == {"0, of 4.wav", "1, of 4.wav"}
    third.write_bytes(sound)
    going_on = command(*flags, "--out", tmp_path / "out.csv")
    assert going_on.code == 0 and "out: 2 of 4 files are written; resuming" in going_on.err
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert events.read_bytes() == of_whole.read_bytes()
    again = command(*flags, "--out", tmp_path / "out.csv")
    assert "resuming" not in again.err and table(tmp_path / "out.csv") == table(tmp_path / "whole.csv")
    assert events.read_bytes() == of_whole.read_bytes()


def test_several_processes_of_torchrun_are_refused(command, checkpoint, recordings, monkeypatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    done = command("predict", "--ckpt_path", checkpoint, "--input", recordings)
    assert done.code == 2
    assert done.error == "error: trainer.devices: predict uses one process, got 2; start it without torchrun"


def test_a_wrong_flag_leaves_files_of_before_as_they_are(command, checkpoint, recordings, tmp_path) -> None:
    files = [tmp_path / name for name in ("out.csv", "events.csv", "features.npz", "events.png")]
    flags = ["--out", files[0], "--events", files[1], "--embeddings", files[2], "--picture", files[3]]
    one = min(recordings.iterdir())
    for _ in range(2):  # what longseq has written may be written again
        assert command("predict", "--ckpt_path", checkpoint, "--input", one, *flags).code == 0
    before = [file.read_bytes() for file in files]
    for wrong in (["--top", "9"], ["--threshold", "2"], ["--events", files[0]], ["--input", "nowhere"]):
        done = command("predict", "--ckpt_path", checkpoint, "--input", one, *flags, *wrong)
        assert done.code in (2, 3) and done.error.startswith("error: ") and done.err.count("\n") == 1
        assert [file.read_bytes() for file in files] == before


@pytest.mark.parametrize(
    ("flag", "name"),
    [("out", "a.csv"), ("out", "a.jsonl"), ("out", "a.json"), ("events", "a.csv"), ("events", "a.txt"),
     ("events", "a.tsv"), ("embeddings", "a.npz"), ("picture", "a.png"), ("picture", "a.svg")],
)  # fmt: skip
def test_a_file_of_somebody_else_is_not_overwritten(command, checkpoint, recordings, tmp_path, flag, name) -> None:
    one, mine = min(recordings.iterdir()), 'path,label\n{"path": "a.wav", "label": "low"}\n'
    (tmp_path / name).write_text(mine)
    done = command("predict", "--ckpt_path", checkpoint, "--input", one, f"--{flag}", name)
    said = f"error: {flag}: must be a new file, or one that longseq has written, got {name}, which it has not; give "
    assert (done.code, done.err.count("\n"), done.error.startswith(said)) == (2, 1, True), done.err
    assert (tmp_path / name).read_text() == mine


def test_events_of_every_form_may_be_written_again(command, checkpoint, recordings, tmp_path) -> None:
    one = min(recordings.iterdir())
    for name, flag in {"a.txt": "--events", "a.tsv": "--events", "a.svg": "--picture", "a.pdf": "--picture"}.items():
        for _ in range(2):
            done = command("predict", "--ckpt_path", checkpoint, "--input", one, flag, name)
            assert done.code == 0 and (tmp_path / name).stat().st_size, done.err


def test_an_unwritable_file_of_events_leaves_the_predictions_of_before(
    command, checkpoint, recordings, tmp_path
) -> None:  # fmt: skip
    before = ",".join(COLUMNS) + "\r\nof before"
    (tmp_path / "out.csv").write_text(before, newline="")
    (tmp_path / "events.csv").mkdir()
    flags = ["--input", recordings, "--out", tmp_path / "out.csv", "--events", tmp_path / "events.csv"]
    done = command("predict", "--ckpt_path", checkpoint, *flags)
    assert (done.code, done.error) == (6, f"error: events: {tmp_path}/events.csv: Is a directory; give another")
    assert (tmp_path / "out.csv").read_bytes().decode() == before


@pytest.mark.parametrize(
    ("out", "code", "said"),
    [
        ("predictions.txt", 2, "out: predictions.txt: ends in none of .csv, .jsonl, .json; "),
        ("nowhere/out.csv", 6, "out: nowhere: no such folder; "),
        (".csv", 2, "out: .csv: ends in none of"),
        ("folder.json", 6, "out: folder.json: Is a directory; "),
    ],
)
def test_a_wrong_place_is_one_line(command, checkpoint, recordings, tmp_path, out, code, said) -> None:
    (tmp_path / "folder.json").mkdir()
    done = command("predict", "--ckpt_path", checkpoint, "--input", recordings, "--out", out)
    assert done.code == code and done.error.startswith(f"error: {said}")


def prediction(path: str, *names: str) -> Prediction:
    return Prediction(path, None, None, [Answer(name, 0.5) for name in names], torch.tensor([0.5, 0.5]))


FILES = [prediction("a.wav", "one", "two"), prediction('b "2".wav'), prediction("c\udcff.wav", "one")]


def stop_after_two(output: Text, of_third: str = "") -> None:
    """Write two files, and be stopped in the middle of the third."""
    with suppress(KeyboardInterrupt), output:
        output.write(FILES[:2])
        output.file.write(of_third)
        raise KeyboardInterrupt


def test_an_array_that_cannot_be_written_at_the_end_loses_no_prediction(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    output = Json(path, 1).__enter__()
    output.write(FILES)
    path.mkdir()
    with pytest.raises(UserError, match=r"out: .*out\.json: "):
        output.__exit__(None, None, None)
    path.rmdir()
    assert Json(path, 1).done == len(FILES)
    with Json(path, 1):
        assert not path.exists()
    assert [each["path"] for each in json.loads(path.read_text())] == [each.path for each in FILES]


@pytest.mark.parametrize("kind", [Table, JsonLines, Json])
def test_what_was_written_in_part_is_written_again(kind, tmp_path: Path) -> None:
    with kind(tmp_path / "whole", "settings") as whole:
        for each in FILES:
            whole.write([each])
    stop_after_two(kind(tmp_path / "out", "settings"), "c.wa")
    with kind(tmp_path / "out", "settings") as output:
        assert output.done == 2
        output.write(FILES[2:])
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_a_file_in_which_no_class_is_heard_has_a_row_without_class_and_probability(tmp_path: Path) -> None:
    with Table(tmp_path / "out.csv", "settings") as output:
        output.write(FILES[:2])
    assert table(tmp_path / "out.csv")[1:] == [["a.wav", "", "", "two", "0.5000"], ['b "2".wav', "", "", "", ""]]


NOTES = {"cut off": '{"key": ', "a list": "[]", "deep": "[" * 100_000}


@pytest.mark.parametrize("change", ["settings", "file", "second input", *NOTES])
def test_another_run_starts_anew(change: str, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    stop_after_two(Table(out, ["settings"], stamps=["1", "2", "3"]))
    if change == "file":
        out.unlink()
    if change in NOTES:
        (tmp_path / ".out.csv.unfinished").write_text(NOTES[change])
    stamps = ["1", "changed" if change == "second input" else "2", "3"]
    with Table(out, ["others" if change == "settings" else "settings"], stamps=stamps) as output:
        assert output.done == 0 and output.begun_otherwise == (change not in NOTES)
        output.write(FILES[:1])
    assert [row[0] for row in table(out)] == ["a.wav", "a.wav"]


def test_a_run_goes_on_if_an_input_that_was_not_yet_predicted_has_changed(tmp_path: Path) -> None:
    stop_after_two(Table(tmp_path / "out.csv", 1, stamps=["1", "2", "3"]))
    with Table(tmp_path / "out.csv", 1, stamps=["1", "2", "mended"]) as output:
        assert output.done == 2
        output.write(FILES[2:])


def test_a_run_with_another_model_in_the_same_place_or_a_changed_input_starts_anew(
    command, checkpoint, recordings, tmp_path, monkeypatch
) -> None:
    """They have the size of those before, and the model its time too."""
    model, out, first = tmp_path / "model.ckpt", tmp_path / "out.csv", min(recordings.iterdir())
    shutil.copy(checkpoint, model)
    flags = ["predict", "--ckpt_path", model, "--input", recordings, "--data.batch_size", "1", "--out", out]

    write = Table.write

    def two_files(self: Table, found: Any) -> None:
        if self.done == 2:
            raise KeyboardInterrupt
        write(self, found)

    def stopped() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Table, "write", two_files)
            assert command(*flags).code == 130
        assert {Path(row[0]).name for row in table(out)} == {"0, of 4.wav", "1, of 4.wav"}

    stopped()
    going_on = command(*flags)
    assert going_on.code == 0 and "2 of 4 files are written; resuming" in going_on.err
    whole = out.read_bytes()
    stopped()
    status = model.stat()
    changed = torch.load(model, weights_only=True)
    for name, weight in changed["state_dict"].items():
        if name.startswith("head."):
            weight.neg_()
    write_checkpoint(changed, model)
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    anew = command(*flags)
    assert anew.code == 0 and "resuming" not in anew.err
    said = (
        f"out: {out} holds a part of another run (of another model, or with other settings or inputs): starting again"
    )
    assert said in anew.err.splitlines()
    assert out.read_bytes() != whole
    by_other = out.read_bytes()
    stopped()
    soundfile.write(first, tone(2000, 0.2), 8000, subtype="FLOAT")
    anew = command(*flags)
    assert said in anew.err.splitlines() and out.read_bytes() != by_other
    assert command(*flags[:-1], tmp_path / "alone.csv").code == 0
    assert out.read_bytes() == (tmp_path / "alone.csv").read_bytes()


@pytest.mark.parametrize("flags", [["--out", "a.csv"], ["--out", "a.json"], ["--events", "a.csv"]], ids=str)
def test_a_file_is_written_by_one_process_at_a_time(command, checkpoint, recordings, tmp_path, flags) -> None:
    held = tmp_path / (".a.json.lines" if flags[1] == "a.json" else flags[1])
    flags = ["predict", "--ckpt_path", checkpoint, "--input", recordings, *flags]
    if "--events" in flags:
        flags += ["--out", "b.csv"]
        (tmp_path / "b.csv").write_bytes(before := ",".join(COLUMNS).encode() + b"\r\nof before")
    ready, is_ready = os.pipe()
    holder = os.fork()
    if not holder:
        with open(held, "ab") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            os.write(is_ready, b"x")
            signal.pause()
    try:
        os.read(ready, 1)
        done = command(*flags)
        said = f"{flags[5][2:]}: {held.name}: another process writes it; wait for its end, or give another"
        assert (done.code, done.error) == (2, f"error: {said}")
        assert "--events" not in flags or (tmp_path / "b.csv").read_bytes() == before
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    assert command(*flags).code == 0


def test_a_process_that_waited_while_another_wrote_the_file_does_not_write_it(tmp_path: Path) -> None:
    stop_after_two(Table(tmp_path / "out.csv", 1))
    late = Table(tmp_path / "out.csv", 1)
    with Table(tmp_path / "out.csv", 1) as output:
        output.write(FILES[2:])
    whole = (tmp_path / "out.csv").read_bytes()
    with pytest.raises(UserError, match=r"out: .*out\.csv: another process writes it; "):
        late.__enter__()
    assert (tmp_path / "out.csv").read_bytes() == whole


def test_python_gives_the_answers_of_the_command_line(command, checkpoint, recordings) -> None:
    model = longseq.load(checkpoint)
    assert model.class_names == ["high", "low"]
    flags = ["predict", "--ckpt_path", checkpoint, "--input", recordings]
    paths = sorted(recordings.iterdir())

    def lines(found: list[Prediction]) -> list[list[str]]:
        return [
            [each.path, *(f"{time:.3f}" for time in (each.start, each.end) if time is not None), name, f"{chance:.4f}"]
            for each in found
            for name, chance in each.answers
        ]

    assert lines(model.predict(paths)) == rows(command(*flags))
    assert lines(model.predict(paths, window=0.2, hop=0.1)) == rows(command(*flags, "--window", "0.2", "--hop", "0.1"))
    assert lines(model.predict(str(paths[0]), top=2)) == rows(command(*flags, "--top", "2"))[:2]
    with pytest.raises(ArgumentError, match="top must be in"):
        model.predict(paths, top=9)


def test_arrays_are_predicted_and_embedded_as_files_are(checkpoint, recordings) -> None:
    model = longseq.load(checkpoint)
    path = min(recordings.iterdir())
    waveform = soundfile.read(path, dtype="float32")[0]
    (of_file,), (of_array,) = model.predict(one for one in [path]), model.predict(waveform)
    torch.testing.assert_close(of_array.probabilities, of_file.probabilities)
    assert of_array.answers[0].class_name == of_file.answers[0].class_name and of_array.path == ""
    features = model.embed([*sorted(recordings.iterdir()), waveform])
    assert features.shape == (5, 16)
    torch.testing.assert_close(features[0], features[4])
    windows = torch.stack([model.embed(waveform[start : start + 800])[0] for start in (0, 400, 800)])
    torch.testing.assert_close(model.embed(path, window=0.1, hop=0.05)[0], windows.mean(0))
    # what the head makes of the features is the prediction
    chances = model.model.task.probabilities(model.model.head(features[:1]))[0]
    torch.testing.assert_close(chances, of_file.probabilities)


def test_events_of_an_array_are_those_of_its_file(free_checkpoint, recordings) -> None:
    model = longseq.load(free_checkpoint)
    for path in sorted(recordings.iterdir()):
        found = model.events(soundfile.read(path, dtype="float32")[0])
        assert found and [event[:3] for event in found] == [event[:3] for event in model.events(path)]
    with pytest.raises(ValueError, match="^window must be None for an array; cut it yourself, or write it"):
        model.events(np.zeros(1600, np.float32), window=0.1)
    with pytest.raises(ValueError, match=r"^inputs must be \(samples,\), got \(\); "):
        model.events(np.float32(0))


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((1600, 2), np.float32), "inputs must be (samples,), got (1600, 2); average channels first"),
        (np.zeros(0, np.float32), "inputs must be (samples,), got (0,); "),
        (np.zeros(1600, np.int16), "inputs must be floats in -1..1, got torch.int16; divide 16 bits by 32768"),
        (np.full(1600, np.nan, np.float32), "inputs must be finite floats in -1..1, got values up to nan; "),
        (np.full(1600, 3e4, np.float32), "inputs must be finite floats in -1..1, got values up to 30000; divide by "),
    ],
)
def test_an_array_that_is_no_waveform_is_refused(checkpoint, array, said) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        longseq.load(checkpoint).predict(array)


def test_an_array_has_no_windows(checkpoint) -> None:
    for ask in (longseq.load(checkpoint).predict, longseq.load(checkpoint).embed):
        with pytest.raises(ValueError, match="^window must be None for an array; cut it yourself, or write it"):
            ask([np.zeros(1600, np.float32)], window=0.1)


def test_images_too(command, tmp_path: Path) -> None:
    flags = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2", "--trainer.default_root_dir", tmp_path]
    assert command("fit", "--config", "image/digits", *flags).code == 0
    model = longseq.load(tmp_path / "runs/digits/0/best.ckpt")
    image = torch.randint(256, (1, 8, 8), dtype=torch.uint8)
    (found,) = model.predict(image)
    assert found.probabilities.sum() == pytest.approx(1, abs=1e-5)
    assert model.embed([image, image]).shape == (2, model.model.encoder.dim)
    assert model.embed([]).shape == (0, model.model.encoder.dim)
    (of_16_bits,) = model.predict(image.numpy().astype(np.uint16))
    assert torch.equal(of_16_bits.probabilities, found.probabilities)
    with pytest.raises(ValueError, match="^inputs must be finite pixels in 0..255, got values from 0 to 65535; scale"):
        model.predict(np.array([[[0, 65535]]], np.uint16))
    turned = np.asfortranarray(image.numpy().astype(">f4"))[:, ::-1]
    still = image.flip(1).numpy()
    still.flags.writeable = False  # as PIL gives them
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.set_warn_always(True)
        of_turned, of_still = model.predict([turned, still])
    torch.set_warn_always(False)
    (expected,) = model.predict(image.flip(1))
    for found in (of_turned, of_still):
        torch.testing.assert_close(found.probabilities, expected.probabilities)
    with pytest.raises(ValueError, match="^inputs must be paths or arrays, or a list of them, got object; pass a"):
        model.predict(object())
    with pytest.raises(ValueError, match="^events must be of sounds, but this model sees images; leave it out"):
        model.events(image)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_shown_on_a_terminal_and_takes_no_lines_from_a_pipe(monkeypatch, is_terminal: bool) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert len(progress_bars()) == is_terminal
    piped, of_the_bar = io.StringIO(), io.StringIO()
    piped.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", piped)
    lines = Lines()
    monkeypatch.setattr(sys, "stdout", of_the_bar)  # as rich does while a bar is shown
    lines.write([Prediction("a.wav", None, None, [Answer("owl", 0.5)], torch.tensor([0.5]))])
    expected = "a.wav\towl\t0.5000\n"
    assert (piped.getvalue(), of_the_bar.getvalue()) == (("", expected) if is_terminal else (expected, ""))


def test_embeddings_are_those_of_python(command, checkpoint, recordings, tmp_path) -> None:
    flags = ["predict", "--ckpt_path", checkpoint, "--input", recordings]
    done = command(*flags, "--embeddings", tmp_path / "features.npz")
    assert done.code == 0 and len(done.out.splitlines()) == 4, done.err
    with np.load(tmp_path / "features.npz") as found:
        paths, features = found["paths"].tolist(), torch.from_numpy(found["embeddings"])
    assert paths == [str(path) for path in sorted(recordings.iterdir())]
    torch.testing.assert_close(features, longseq.load(checkpoint).embed(paths))
    assert command(*flags, "--embeddings", tmp_path / "of_windows.npz", "--window", "0.1", "--hop", "0.05").code == 0
    with np.load(tmp_path / "of_windows.npz") as found:
        of_windows = torch.from_numpy(found["embeddings"])
    assert not torch.allclose(of_windows, features)
    torch.testing.assert_close(of_windows, longseq.load(checkpoint).embed(paths, window=0.1, hop=0.05))
    done = command(*flags, "--embeddings", "features.npy")
    assert done.code == 2 and done.err.startswith("error: embeddings: features.npy: does not end in .npz; ")
    done = command(*flags, "--embeddings", "nowhere/features.npz")
    assert done.code == 6 and done.err.startswith(
        "error: embeddings: nowhere/features.npz: No such file or directory; "
    )


def test_a_file_passes_the_model_once_also_for_events_and_embeddings(
    command, checkpoint, recordings, tmp_path, monkeypatch
) -> None:  # fmt: skip
    heard: list[int] = []
    front_end = SpectrogramEncoder.front_end

    def counted(encoder: SpectrogramEncoder, inputs: Any) -> Any:
        heard.append(len(inputs["lengths"]))
        return front_end(encoder, inputs)

    monkeypatch.setattr(SpectrogramEncoder, "front_end", counted)
    flags = ["predict", "--ckpt_path", checkpoint, "--input", recordings, "--window", "0.2"]
    parts = len(rows(command(*flags)))
    assert sum(heard) == parts > 4
    heard.clear()
    assert len(rows(command(*flags, "--events", tmp_path / "e.csv", "--embeddings", tmp_path / "f.npz"))) == parts
    assert sum(heard) == parts
