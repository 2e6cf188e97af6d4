"""Recordings that are longer than a model's clips are heard in windows."""

import csv
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from tones import SMALL, rows, tone

from datamodules import AudioFolder
from datamodules.decoding.sound_files import change_rate
from datamodules.errors import DataError
from longseq.training import Classifier


def test_windows_cover_a_recording_and_say_what_is_heard_when(command, checkpoint, recording) -> None:
    done = command("predict", "--ckpt_path", checkpoint, "--input", recording, "--window", "0.2", "--hop", "0.1")
    found = rows(done)
    assert [(start, end) for _, start, end, *_ in found] == [
        (f"{number / 10:.3f}", f"{number / 10 + 0.2:.3f}") for number in range(10)
    ]
    heard = {float(start): name for _, start, _, name, _ in found}
    assert [heard[start] for start in (0.0, 0.1, 0.2, 0.6, 0.7, 0.8, 0.9)] == ["low"] * 3 + ["high"] * 4
    assert "processed in windows" not in done.err


@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_a_window_is_read_without_the_rest_of_its_file(monkeypatch, suffix: str, tmp_path: Path) -> None:
    waveform = np.linspace(-0.5, 0.5, 8000 * 60)
    soundfile.write(tmp_path / f"minute{suffix}", waveform, 8000)
    ranges: list[tuple[int, int]] = []
    read = soundfile.SoundFile.read

    def counted(file: soundfile.SoundFile, frames: int = -1, *arguments, **options):
        start = file.tell()
        found = read(file, frames, *arguments, **options)
        ranges.append((start, len(found)))
        return found

    monkeypatch.setattr(soundfile.SoundFile, "read", counted)
    data = AudioFolder(root=str(tmp_path), seconds=1.0, sample_rate_hz=8000)
    parts = data.parts(str(tmp_path / f"minute{suffix}"), window=1.0, hop=0.5)
    assert len(parts) == 119 and ranges == []  # the header alone says how long it is
    for number in (118, 0, 57):
        ranges.clear()
        heard = data.read_part(parts[number])
        assert ranges == [(4000 * number, 8000)]
        np.testing.assert_allclose(heard, waveform[4000 * number :][:8000], atol=1e-4)


def test_without_a_window_all_of_a_long_recording_is_heard_and_answered_once(command, checkpoint, recording) -> None:
    done = command("predict", "--ckpt_path", checkpoint, "--input", recording)
    assert f"{recording}: longer than the model's clips of 0.2 s, so processed in windows of that length" in done.err
    ((path, name, chance),) = rows(done)
    of_windows = rows(command("predict", "--ckpt_path", checkpoint, "--input", recording, "--window", "0.2"))
    assert [start for _, start, *_ in of_windows] == ["0.000", "0.200", "0.400", "0.600", "0.800", "0.900"]
    chances = [float(share) if said == "high" else 1 - float(share) for *_, said, share in of_windows]
    assert (path, name) == (str(recording), "high")  # four of the six windows; its middle alone is half and half
    assert float(chance) == pytest.approx(np.mean(chances), abs=2e-4)


def test_a_short_sound_is_answered_as_before(command, checkpoint, recording) -> None:
    short = checkpoint.parents[3] / "data/low/00.wav"
    done = command("predict", "--ckpt_path", checkpoint, "--input", short)
    ((path, name, _),) = rows(done)
    assert (path, name, done.err.count("processed in windows")) == (str(short), "low", 0)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--window", "5"], "window: must be positive and at most 0.2 s, got 5.0; clips are no longer"),
        (["--window", "0"], "window: must be positive and at most 0.2 s, got 0.0; clips are no longer"),
        (["--window", "0.1", "--hop", "0.2"], "hop: must be positive and at most 0.1 s, got 0.2; or some sound would "),
    ],
)
def test_windows_that_cannot_be_are_one_line(flags, said, command, checkpoint, recording) -> None:
    done = command("predict", "--ckpt_path", checkpoint, "--input", recording, *flags)
    assert (done.code, said in done.error) == (2, True), done.err


def test_images_have_no_windows(command, tmp_path: Path) -> None:
    for number in range(8):
        path = tmp_path / "data" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), 30 * number).save(path)
    fit = ["fit", "--data", "ImageFolder", "--data.root", tmp_path / "data", "--data.grayscale", "true"]
    done = command(*fit, "--model.encoder", "ImageEncoder", "--model.encoder.attention", "Verma", *SMALL,
                   "--trainer.max_steps", "1", "--experiment", "x", "--data.test_fraction", "0.5")  # fmt: skip
    assert done.code == 0, done.err
    done = command("predict", "--ckpt_path", "runs/x/0/last.ckpt", "--input", path, "--window", "1")
    assert (done.code, "window: must be left out, got 1.0; only sounds have windows" in done.error) == (2, True), (
        done.err
    )


@pytest.mark.parametrize(("window", "hop"), [(1.0, 1.0), (1.0, 0.3), (0.7, 0.7), (1.0, 0.999)])
@pytest.mark.parametrize("seconds", [0.4, 1.0, 1.3, 2.0, 3.05])
def test_windows_have_one_length_and_leave_nothing_out(window, hop, seconds, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(round(1000 * seconds)), 1000)
    data = AudioFolder(str(tmp_path), sample_rate_hz=1000, seconds=1.0)
    parts = data.parts(str(tmp_path / "a.wav"), window, hop)
    ends = [0.0, *(end for _, _, end in parts)]
    assert all(start <= before + 1e-9 for (_, start, _), before in zip(parts, ends, strict=False))
    assert (parts[0][1], ends[-1]) == (0.0, pytest.approx(seconds))
    assert {len(data.read_part(part)) for part in parts} == {round(1000 * min(window, seconds))}


@pytest.mark.parametrize(
    ("rate_hz", "samples", "seconds"),
    [(8000, 8001, 1.0), (44_100, 44_103, 1.0), (22_050, 22_050 * 5, 2.05), (22_050, 22_050 * 5, 0.41)],
)
def test_no_part_is_longer_than_the_clips_of_a_bounded_model(rate_hz, samples, seconds, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(samples), rate_hz)
    data = AudioFolder(str(tmp_path), sample_rate_hz=min(rate_hz, 22_050), seconds=seconds)
    parts = data.parts(str(tmp_path / "a.wav"))
    assert {len(data.read_part(part)) for part in parts} == {*data.shape}


def test_windows_of_a_length_that_floats_round_are_heard_in_batches(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(8000), 1000)
    data = AudioFolder(str(tmp_path), sample_rate_hz=1000, seconds=0.4, batch_size=8)
    data.predict_parts = data.parts(str(tmp_path / "a.wav"), 0.4, 0.4)
    assert any(end - start > 0.4 for _, start, end in data.predict_parts)
    assert data.predict_dataloader().batch_size == 8


def test_long_recordings_with_short_clips_are_said(tmp_path: Path, capsys) -> None:
    for name, seconds in {"a/1.wav": 10.0, "b/2.wav": 12.345}.items():
        (tmp_path / name).parent.mkdir()
        soundfile.write(tmp_path / name, np.zeros(round(1000 * seconds)), 1000)
    assert AudioFolder(str(tmp_path)).seconds == 10
    said = "data.seconds: the longest clip has 12.35 s; 10 s of each are used, "
    assert capsys.readouterr().err == f"{said}at random in training, otherwise the middle; give data.seconds\n"
    assert AudioFolder(str(tmp_path), seconds=5.0).seconds == 5 and capsys.readouterr().err == ""


@pytest.mark.parametrize("any_length", [False, True])
def test_a_hop_without_a_window_takes_that_of_the_models_clips(tmp_path: Path, any_length: bool) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(2500), 1000)
    soundfile.write(tmp_path / "short.wav", np.zeros(500), 1000)
    data = AudioFolder(str(tmp_path), sample_rate_hz=1000, seconds=1.0)
    options = {"hop": 0.75, "any_length": any_length}
    assert [part[1:] for part in data.parts(str(tmp_path / "a.wav"), **options)] == [(0, 1), (0.75, 1.75), (1.5, 2.5)]
    assert [part[1:] for part in data.parts(str(tmp_path / "short.wav"), **options)] == [(0, 0.5)]


def test_a_model_for_any_length_hears_a_recording_as_one_sequence(command, free_checkpoint, recording) -> None:
    done = command("predict", "--ckpt_path", free_checkpoint, "--input", recording)
    ((path, _, probability),) = rows(done)
    assert path == str(recording) and done.err == ""
    model = Classifier.load_from_checkpoint(free_checkpoint).eval()
    waveform = torch.from_numpy(soundfile.read(recording, dtype="float32")[0])
    heard = change_rate(waveform, 16000, 8000).clamp(-1, 1)
    with torch.no_grad():
        expected = model({"waveforms": heard[None], "lengths": torch.tensor([8800])}).softmax(-1).max()
    assert float(probability) == pytest.approx(float(expected), abs=2e-4)
    # windows are still to be had, also longer ones than the clips of the training
    done = command("predict", "--ckpt_path", free_checkpoint, "--input", recording, "--window", "0.5")
    assert [row[3] for row in rows(done)] == ["low", "high", "high"]
    done = command("predict", "--ckpt_path", free_checkpoint, "--input", recording, "--window", "-3")
    assert done.error == "error: window: must be positive, got -3.0; 10 is usual"
    done = command("predict", "--ckpt_path", free_checkpoint)
    assert done.error == "error: input: missing; give a file, or a folder of files"
    card = (free_checkpoint.parent / "README.md").read_text()
    assert "Its inputs are sounds of any length at 8000 Hz, other rates after resampling." in card


def damaged(path: Path, seconds: float = 4.0) -> None:
    """A FLAC file of low, then high tones, of which the second half is overwritten with zeros."""
    soundfile.write(path, np.concatenate([tone(300, seconds / 2), tone(2000, seconds / 2)]), 8000)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes(len(content) - middle))


def test_of_a_file_that_breaks_off_what_was_heard_is_given_and_a_line(command, checkpoint, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    damaged(tmp_path / "in/broken.flac")
    soundfile.write(tmp_path / "in/good.wav", tone(2000, 0.6), 8000)
    flags = ["--ckpt_path", checkpoint, "--input", tmp_path / "in", "--events", tmp_path / "events.csv"]
    done = command("predict", *flags, "--window", "0.2")
    found = rows(done)
    whole = [row for row in found if "broken" in row[0]]
    assert 3 <= len(whole) < 20 and [row[1] for row in whole] == [f"{number / 5:.3f}" for number in range(len(whole))]
    assert {row[3] for row in whole[:8]} == {"low"} and len(found) - len(whole) == 3
    assert done.err.count("broken.flac: breaks off after") == 1 and "good.wav" not in done.err
    last = [line.split(",") for line in (tmp_path / "events.csv").read_text().split("\n") if "broken" in line][-1]
    assert float(last[2]) <= float(whole[-1][2]) + 0.03
    answered = command("predict", *flags[:4])
    assert rows(answered)[0][1] == "low" and "nan" not in answered.out
    picture = ["--picture", tmp_path / "events.png", "--input", tmp_path / "in/broken.flac", "--window", "0.2"]
    assert command("predict", *flags[:2], *picture).code == 0 and Image.open(tmp_path / "events.png").size[0] > 500


@pytest.mark.parametrize("suffix", ["wav", "flac", "mp3", "ogg"])
def test_of_a_file_that_was_cut_off_all_that_is_there_is_heard(command, checkpoint, tmp_path: Path, suffix) -> None:
    path = tmp_path / f"half.{suffix}"
    soundfile.write(path, np.concatenate([tone(300, 2.5), tone(2000, 1.5)]), 8000)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    there = sum(len(block) for block in blocks_of(path)) / 8000
    assert 1 < there < 3
    flags = ["predict", "--ckpt_path", checkpoint, "--input", path, "--out", tmp_path / "out.csv"]
    done = command(*flags, "--window", "0.2")
    assert done.code == 0, done.err
    with open(tmp_path / "out.csv", newline="") as file:
        found = list(csv.reader(file))[1:]
    assert float(found[-1][1]) < there <= float(found[-1][2]) + 0.01 and "nan" not in str(found)
    assert {row[3] for row in found[:4]} == {"low"}
    # an Ogg file does not say how long it is
    assert done.err.count("used up to this point") == done.err.count("half.") == (suffix != "ogg"), done.err


def blocks_of(path: Path) -> Iterator[np.ndarray]:
    with suppress(soundfile.LibsndfileError), soundfile.SoundFile(path) as file:
        while len(block := file.read(100)):
            yield block


def test_a_broken_file_as_one_sequence_is_heard_as_far_as_it_goes(command, free_checkpoint, tmp_path: Path) -> None:
    damaged(tmp_path / "broken.flac", 60.0)
    done = command("predict", "--ckpt_path", free_checkpoint, "--input", tmp_path / "broken.flac")
    assert len(rows(done)) == 1 and "nan" not in done.out and done.err.count("breaks off after") == 1
    features = tmp_path / "features.npz"
    assert command("predict", "--ckpt_path", free_checkpoint, "--input", tmp_path, "--embeddings", features).code == 0
    assert np.isfinite(np.load(features)["embeddings"]).all()


def test_a_file_that_is_broken_from_the_start_is_an_error(tmp_path: Path) -> None:
    damaged(tmp_path / "broken.flac")
    content = (tmp_path / "broken.flac").read_bytes()
    (tmp_path / "broken.flac").write_bytes(content[:60] + bytes(len(content) - 60))
    data = AudioFolder(str(tmp_path), sample_rate_hz=8000, seconds=0.2)
    for start, end in ((0.0, 4.0), (2.0, 3.0)):
        with pytest.raises(DataError, match="not a readable sound"):
            data.read_part((str(tmp_path / "broken.flac"), start, end))


def test_a_part_without_sound_or_with_wrong_values_is_an_error_and_no_break(tmp_path: Path) -> None:
    data = AudioFolder(str(tmp_path), sample_rate_hz=8000, seconds=0.2)
    soundfile.write(tmp_path / "short.wav", tone(300, 1.0), 8000)
    with pytest.raises(DataError, match="holds no sound from 2 s"):
        data.read_part((str(tmp_path / "short.wav"), 2.0, 3.0))
    samples = tone(300, 4.0).astype(np.float32)
    samples[20_000] = np.nan
    soundfile.write(tmp_path / "wrong.wav", samples, 8000, subtype="FLOAT")
    with pytest.raises(DataError, match="holds values that are not finite"):
        data.read_part((str(tmp_path / "wrong.wav"), 0.0, 4.0))


def test_a_short_file_that_breaks_off_is_heard_as_far_as_it_goes(command, free_checkpoint, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    soundfile.write(tmp_path / "in/short.wav", tone(300, 0.2), 8000)
    content = (tmp_path / "in/short.wav").read_bytes()
    (tmp_path / "in/short.wav").write_bytes(content[: len(content) * 3 // 4])
    done = command("predict", "--ckpt_path", free_checkpoint, "--input", tmp_path / "in")
    assert (rows(done)[0][1], done.err.count("used up to this point")) == ("low", 1)


def test_without_any_sound_a_file_is_known_before_others_are_heard(command, checkpoint, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    soundfile.write(tmp_path / "in/good.wav", tone(300, 0.4), 8000)
    soundfile.write(tmp_path / "in/nothing.wav", np.zeros(0), 8000)
    done = command("predict", "--ckpt_path", checkpoint, "--input", tmp_path / "in")
    said = f"{tmp_path}/in/nothing.wav: holds no sound; leave it out, or give --data.on_error skip"
    assert (done.code, done.out, done.error) == (3, "", f"error: {said}")
    done = command("predict", "--ckpt_path", checkpoint, "--input", tmp_path / "in", "--data.on_error", "skip")
    assert (done.code, len(rows(done))) == (0, 1) and f"left out: {said}" in done.err


@pytest.mark.parametrize("is_free", [False, True])
def test_with_skip_wrong_values_and_damage_end_no_run(
    is_free: bool, command, checkpoint, free_checkpoint, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    wrong = tone(300, 1.0).astype(np.float32)
    wrong[4100] = np.nan
    soundfile.write(tmp_path / "in/a.wav", wrong, 8000, subtype="FLOAT")
    soundfile.write(tmp_path / "in/b.wav", tone(2000, 0.2), 8000)
    damaged(tmp_path / "in/c.flac")
    flags = ["--ckpt_path", free_checkpoint if is_free else checkpoint, "--input", tmp_path / "in"]
    flags += [] if is_free else ["--window", "0.1"]
    done = command("predict", *flags)
    assert (done.code, done.error) == (
        3, f"error: {tmp_path}/in/a.wav: holds values that are not finite; write it again",
    )  # fmt: skip
    done = command("predict", *flags, "--data.on_error", "skip")
    assert done.code == 0 and "nan" not in done.out, done.err
    assert "a.wav: holds values that are not finite at 1 s; used up to this point" in done.err
    assert "c.flac: breaks off after" in done.err and "left out" not in done.err
    heard = [float(row[1]) for row in rows(done) if "a.wav" in row[0] and not is_free]
    # the window from 0.5 s on is heard up to the value in it, and those behind it are heard
    assert is_free or heard == pytest.approx([number / 10 for number in range(10)])
