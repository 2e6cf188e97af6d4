"""What is heard when: events from probabilities, in every form, from windows and from whole recordings."""

import csv
import itertools
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from tones import tone

import longseq
from longseq import SpectrogramEncoder, Verma
from longseq.arguments import ArgumentError
from longseq.cli.predict.command import draw, say_if_long
from longseq.cli.predict.windows_without_events import Eventless
from longseq.tasks import MultiLabel
from longseq.training.answers.events import Event, EventFinder, Settings, Stitching, smoothed, stretches
from longseq.training.answers.predictions import ByPart, EventDetector, Recording
from longseq.training.classifier import Answers, Classifier


def found_in(probabilities: torch.Tensor, pieces: list[int] | None = None, **settings) -> list[Event]:
    """The events of classes a, b, ... whose probabilities (rows of half a second, classes) come in pieces."""
    names = list("abc")[: probabilities.shape[1]]
    thresholds = torch.full((len(names),), 0.5)
    finder = EventFinder(0.5, names, thresholds, Settings(**{"smooth": 0.0, "gap": 0.0, "shortest": 0.0} | settings), 4)
    for piece in probabilities.split(pieces or [len(probabilities)]):
        finder.add(piece)
    return finder.finish()


def events(rows: list[list[float]], **settings) -> list[Event]:
    """The events of classes a, b, ... each of which has a list of its probabilities."""
    return found_in(torch.tensor(rows).T, **settings)


def test_an_event_is_a_stretch_that_reaches_the_threshold() -> None:
    found = events([[0.1, 0.6, 0.9, 0.2, 0.7], [0.5, 0.2, 0.4, 0.4, 0.4]])
    expected = [(0.0, 0.5, "b", 0.5), (0.5, 1.5, "a", 0.9), (2.0, 2.5, "a", 0.7)]
    assert [(*event[:3], pytest.approx(event.score)) for event in found] == expected
    assert events([[0.1, 0.2]]) == []
    assert [event[:2] for event in events([[0.9] * 4])] == [(0.0, 2.0)]
    assert len(events([[0.1, 0.6, 0.9]], threshold=0.05)) == 1 and events([[0.1, 0.6, 0.9]], threshold=0.95) == []


def test_an_event_begins_and_ends_where_half_of_the_threshold_is_reached() -> None:
    assert [event[:2] for event in events([[0.1, 0.26, 0.4, 0.6, 0.3, 0.25, 0.24, 0.4, 0.1]])] == [(0.5, 3.0)]
    assert [event[:2] for event in events([[0.3, 0.3, 0.3, 0.8, 0.3]], threshold=0.7)] == [(1.5, 2.0)]
    # a stretch that never reaches the threshold is no event, also where an event is near
    assert [event[:2] for event in events([[0.9, 0.1, 0.4, 0.1, 0.4]], gap=0.5)] == [(0.0, 0.5)]


def test_events_of_noise_are_those_of_a_plain_loop() -> None:
    values = torch.rand(300, 1, generator=torch.Generator().manual_seed(0))
    expected, begin = [], None
    for row, value in enumerate([*values[:, 0].tolist(), 0.0]):
        if value >= 0.45 and begin is None:
            begin = row
        elif value < 0.45 and begin is not None:
            if max(values[begin:row, 0].tolist()) >= 0.9:
                expected.append((begin * 0.5, row * 0.5))
            begin = None
    assert len(expected) > 10
    assert [event[:2] for event in found_in(values, threshold=0.9)] == expected
    assert [event[:2] for event in found_in(values, [1] * 300, threshold=0.9)] == expected


def test_a_call_of_some_frames_that_reaches_its_threshold_is_an_event_by_default() -> None:
    """Validation chooses the threshold on the same probabilities: a mean over their neighbours would not reach it."""
    rows = torch.full((100, 1), 0.02)
    rows[40:46] = torch.tensor([0.3, 0.2, 0.5, 0.93, 0.9, 0.4])[:, None]  # frames of 10 ms
    finder = EventFinder(0.01, ["a"], torch.tensor([0.9]), Settings())
    finder.add(rows)
    assert [(event.start, event.end) for event in finder.finish()] == [(pytest.approx(0.42), pytest.approx(0.45))]


def test_short_gaps_join_and_short_events_go() -> None:
    heard = [[0.9, 0.1, 0.9, 0.1, 0.1, 0.9]]
    assert [event[:2] for event in events(heard)] == [(0.0, 0.5), (1.0, 1.5), (2.5, 3.0)]
    assert [event[:2] for event in events(heard, gap=0.5)] == [(0.0, 1.5), (2.5, 3.0)]
    assert [event[:2] for event in events(heard, gap=1.0)] == [(0.0, 3.0)]
    assert [event[:2] for event in events(heard, gap=0.5, shortest=1.0)] == [(0.0, 1.5)]


def test_stretches_and_means_are_those_of_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    for length in (1, 2, 30):
        values = torch.rand(length, generator=generator)
        for reach in (0, 1, 2, 3):
            plain = [values[max(row - reach, 0) : row + reach + 1].mean() for row in range(length)]
            torch.testing.assert_close(smoothed(values, reach), torch.stack(plain))
        inside = [row for begin, end in stretches(values > 0.5) for row in range(begin, end)]
        assert inside == (values > 0.5).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("smooth", [0.0, 1.0, 3.0, 9.0])  # the last reaches further than a block
@pytest.mark.parametrize("gap", [0.0, 1.0])
def test_events_do_not_depend_on_the_pieces_in_which_a_recording_comes(smooth: float, gap: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for trial in range(6):
        probabilities = torch.rand(200, 2, generator=generator).sqrt()
        probabilities[(torch.arange(200) // 25) % 2 == 1] *= 0.1  # else all would be one event
        settings = {"smooth": smooth, "gap": gap, "shortest": 0.5 * (trial % 3)}
        expected = found_in(probabilities, **settings)
        assert len(expected) > 2
        cuts = sorted({0, 200, *torch.randint(201, (40,), generator=generator).tolist()})
        pieces = [0, *(end - begin for begin, end in itertools.pairwise(cuts))]
        for sizes in (pieces, [1] * 200, [199, 1]):
            found = found_in(probabilities, sizes, **settings)
            assert [event[:3] for event in found] == [event[:3] for event in expected]
            assert [event.score for event in found] == pytest.approx([event.score for event in expected])


def test_where_windows_overlap_their_mean_counts() -> None:
    stitching = Stitching(0.5)
    pieces = [
        stitching.add(0.0, torch.tensor([[0.2], [0.4]])),
        stitching.add(0.5, torch.tensor([[0.8], [0.6]])),
        stitching.add(2.0, torch.tensor([[0.3]])),  # half a second was not heard
        stitching.finish(),
    ]
    assert [len(piece) for piece in pieces] == [0, 1, 3, 1]
    torch.testing.assert_close(torch.cat(pieces), torch.tensor([[0.2], [0.6], [0.6], [0.0], [0.3]]))


def hearing_of(parts: list[tuple[str, float, float]], rows: int, heard: int) -> list[Recording]:
    """What is heard in parts of which so many were predicted, each with so many rows of 0.1 s and a probability of
    0.95 in each."""
    encoder = SpectrogramEncoder(8000, 1.0, Verma(), num_mels=8, dim=8, depth=1, heads=1, hop_ms=100.0)
    model = Classifier(encoder, 2, ["a", "b"], MultiLabel())
    hearing, divide = (
        EventDetector(model, Settings(0.5, smooth=0.0, gap=0.0, shortest=0.0), keeps_rows=True),
        ByPart(parts),
    )
    for _ in range(heard):
        for answered in divide(Answers(scores=torch.full((1, rows, 2), 0.95).logit())):
            hearing.add(answered)
    hearing.finish()
    return hearing.heard()


@pytest.mark.parametrize("rows", [9, 10, 11])
def test_a_sound_that_fills_all_windows_is_one_event(rows: int) -> None:
    """Also where overlapping patches end a row before their window (9 of 10)."""
    parts = [("a.wav", start, start + 1.0) for start in (0.0, 1.0, 2.0)]
    (heard,) = hearing_of(parts, rows, 3)
    assert [(event.start, event.end, event.class_name) for event in heard.events] == [(0.0, 3.0, "a"), (0.0, 3.0, "b")]
    assert heard.rows is not None and heard.rows.min() > 0.9


def test_a_recording_that_is_left_in_the_middle_has_the_events_until_then() -> None:
    parts = [("a.wav", 0.0, 1.0), ("b.wav", 0.0, 1.0), ("b.wav", 1.0, 2.0), ("b.wav", 2.0, 3.0)]
    first, second = hearing_of(parts, 10, 3)
    assert (first.path, second.path, second.seconds) == ("a.wav", "b.wav", 2.0)
    assert [(event.start, event.end) for event in second.events] == [(0.0, 2.0)] * 2
    assert [heard.path for heard in hearing_of(parts, 10, 1)] == ["a.wav"]


def test_stitched_windows_are_those_of_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    for hop in (1, 2, 3, 5, 7):  # windows of 5 rows
        windows = torch.rand(8, 5, 2, generator=generator)
        total, counts = torch.zeros(7 * hop + 5, 2), torch.zeros(7 * hop + 5, 1)
        stitching = Stitching(0.5)
        pieces = []
        for number, window in enumerate(windows):
            total[number * hop : number * hop + 5] += window
            counts[number * hop : number * hop + 5] += 1
            pieces.append(stitching.add(number * hop * 0.5, window))
        torch.testing.assert_close(torch.cat([*pieces, stitching.finish()]), total / counts.clamp(min=1))


def test_each_class_is_heard_from_its_own_threshold_on() -> None:
    encoder = SpectrogramEncoder(8000, 1.0, Verma(), dim=8, depth=1, heads=1)
    model = Classifier(encoder, 2, task=MultiLabel(), class_names=["owl", "frog"])
    model.head.thresholds.copy_(torch.tensor([0.25, 0.9]))
    chances = torch.full((1, 101, 2), 0.05)
    chances[0, 10:30, 0], chances[0, 20:50, 1], chances[0, 60:70, 0], chances[0, 60:80, 1] = 0.4, 0.95, 0.2, 0.8
    sure = Settings(smooth=0, gap=0)
    answered = Answers(scores=chances[0].logit(), part=("a.wav", 0.0, 1.0), is_last=True)
    hearing = EventDetector(model, sure)
    hearing.add(answered)
    (heard,) = hearing.heard()
    expected = [Event(0.1, 0.3, "owl", 0.4), Event(0.2, 0.5, "frog", 0.95)]
    assert [(*event[:2], event.class_name) for event in heard.events] == [
        (pytest.approx(event.start), pytest.approx(event.end), event.class_name) for event in expected
    ]
    assert [event.score for event in heard.events] == pytest.approx([event.score for event in expected])
    hearing = EventDetector(model, sure._replace(threshold=0.15))
    hearing.add(answered)
    assert [event.class_name for event in hearing.heard()[0].events] == ["owl", "frog", "owl", "frog"]


@pytest.mark.parametrize("change", [{"threshold": 1.0}, {"threshold": 0.0}, {"smooth": -1.0}, {"gap": float("nan")}])
def test_a_setting_out_of_its_range_is_refused(change) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(change))} must"):
        Settings(**change).check()


def windows_without_an_event(events: list[Event], capsys, **settings: float) -> str:
    """What is said of three windows of a second, in which owl (threshold 0.25) has 0.3, 0.2 and 0.4."""
    encoder = SpectrogramEncoder(8000, 1.0, Verma(), dim=8, depth=1, heads=1)
    model = Classifier(encoder, 2, task=MultiLabel(), class_names=["owl", "frog"])
    model.head.thresholds.copy_(torch.tensor([0.25, 0.9]))
    parts = [("a.wav", start, start + 1.0) for start in (0.0, 1.0, 2.0)]
    eventless = Eventless(model, Settings(**settings))
    chances = torch.tensor([[0.3, 0.5], [0.2, 0.5], [0.4, 0.8]])
    eventless.take(Recording("a.wav", 3.0, None, events, list(zip(parts, chances, strict=True))))
    eventless.take(Recording("b.wav", 1.0, None, [], [(("b.wav", 0.0, 1.0), torch.tensor([0.1, 0.1]))]))
    eventless.say()
    return capsys.readouterr().err


def test_windows_that_name_a_class_without_an_event_are_said(capsys) -> None:
    owl = Event(0.9, 1.2, "owl", 0.3)
    assert windows_without_an_event([owl, owl._replace(start=2.0, end=2.1)], capsys) == ""
    named = "events: a class is named, but has no event: a.wav from"
    remedy = "--shortest 0 keeps what is short\n"
    assert windows_without_an_event([owl], capsys, shortest=0.2) == f"{named} 2 to 3 s: owl; {remedy}"
    frog = owl._replace(class_name="frog", start=0.0, end=3.0)
    said = windows_without_an_event([frog], capsys, shortest=0.2)
    assert said == f"{named} 0 to 1 s: owl, and 1 more such window; {remedy}"
    said = windows_without_an_event([owl], capsys, smooth=0.5)
    assert said == f"{named} 2 to 3 s: owl; --smooth 0 keeps what is short\n"
    said = windows_without_an_event([owl], capsys)
    assert said == f"{named} 2 to 3 s: owl; where windows overlap, their mean counts\n"
    assert windows_without_an_event([owl], capsys, threshold=0.9) == ""  # the user's own threshold is reached nowhere


def rows_of(path: Path, delimiter: str = ",") -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file, delimiter=delimiter))


def test_a_low_tone_and_then_a_high_one_are_heard_where_they_are(command, free_checkpoint, recording, tmp_path) -> None:
    flags = ["predict", "--ckpt_path", free_checkpoint, "--input", recording]
    forms = {name: tmp_path / f"events.{name}" for name in ("csv", "txt", "tsv")}
    for name, path in forms.items():
        picture = ["--picture", tmp_path / "events.png"] if name == "csv" else []
        done = command(*flags, "--events", path, *picture)
        assert done.code == 0, done.err
        assert len(done.out.splitlines()) == 1  # the prediction of the whole is printed as ever
    header, *found = rows_of(forms["csv"])
    assert header == ["path", "start", "end", "class", "score"]
    assert [(row[0], row[3]) for row in found] == [(str(recording), "low"), (str(recording), "high")]
    low, high = ((float(row[1]), float(row[2])) for row in found)
    assert low == (0.0, pytest.approx(0.5, abs=0.06)) and high == (
        pytest.approx(0.5, abs=0.06),
        pytest.approx(1.1, abs=0.02),
    )
    labels = [(f"{float(start):.3f}", f"{float(end):.3f}", name) for start, end, name in rows_of(forms["txt"], "\t")]
    assert labels == [(row[1], row[2], row[3]) for row in found]
    columns, *selections = rows_of(forms["tsv"], "\t")
    assert columns[:5] == ["Selection", "View", "Channel", "Begin Time (s)", "End Time (s)"]
    assert [(row[0], f"{float(row[3]):.3f}", row[9]) for row in selections] == [
        ("1", found[0][1], "low"),
        ("2", found[1][1], "high"),
    ]
    with Image.open(tmp_path / "events.png") as picture:
        assert picture.size[0] > 600 and len(picture.convert("RGB").getcolors(1 << 24)) > 100
    model = longseq.load(free_checkpoint)
    assert [(f"{e.start:.3f}", f"{e.end:.3f}", e.class_name, f"{e.score:.4f}") for e in model.events(recording)] == [
        tuple(row[1:]) for row in found
    ]
    short = command(*flags, "--events", forms["csv"], "--shortest", "0.55")
    assert short.code == 0 and [row[3] for row in rows_of(forms["csv"])[1:]] == ["high"]


def test_a_picture_has_the_sound_the_probabilities_and_the_events_at_their_times(free_checkpoint, recording) -> None:
    predictor = longseq.load(free_checkpoint)
    rows = torch.zeros(111, 2)  # of 10 ms, the last one centred on the last sample
    rows[20:40, 1] = 0.8
    low = Event(0.2, 0.4, "low", 0.8)
    figure = draw(Recording(str(recording), 1.1, rows, [low]), predictor.model, predictor.data)
    above, middle, below = figure.axes
    (spectrogram,) = above.images
    bands = predictor.model.encoder.num_mels
    assert above.get_title("left") == "long.wav" and spectrogram.get_extent() == [0, pytest.approx(1.1), 0, bands]
    loudest = np.asarray(spectrogram.get_array()).argmax(0)
    columns = len(loudest)
    of_low, of_high = (np.median(loudest[round(columns * t / 1.1)]) for t in (0.25, 0.8))
    assert of_low < of_high  # 300 Hz and then 2,000 Hz
    of_classes = [line for line in middle.lines if len(line.get_xdata()) == 111]
    high, heard = (np.array(line.get_ydata()) for line in of_classes)
    assert not high.any() and heard[20:40] == pytest.approx(0.8) and heard.sum() == pytest.approx(16)
    (bars,) = below.collections
    (box,) = (path.get_extents() for path in bars.get_paths())
    assert (box.x0, box.x1) == pytest.approx((0.2, 0.4))
    assert [label.get_text() for label in below.get_yticklabels()] == ["low"] and below.get_xlabel() == "seconds"
    assert below.get_xlim() == pytest.approx((0, 1.1))


def test_dollars_in_a_name_are_no_formula(free_checkpoint, recording, tmp_path) -> None:
    path = tmp_path / "cost$1_$2.wav"
    path.symlink_to(recording)
    predictor = longseq.load(free_checkpoint)
    predictor.model.class_names[1] = "$x^$"
    figure = draw(
        Recording(str(path), 1.1, torch.zeros(111, 2), [Event(0.2, 0.4, "$x^$", 0.8)]), predictor.model, predictor.data
    )
    figure.draw_without_rendering()


def test_a_model_of_bounded_clips_hears_events_in_windows(command, checkpoint, recording, tmp_path) -> None:
    second = tmp_path / "second.wav"
    soundfile.write(second, np.concatenate([tone(2000, 0.2), tone(300, 0.4)]), 8000)
    flags = ["predict", "--ckpt_path", checkpoint, "--hop", "0.1", "--events", tmp_path / "events.csv"]
    done = command(*flags, "--input", tmp_path)
    assert done.code == 0, done.err
    found = rows_of(tmp_path / "events.csv")[1:]
    assert [(Path(row[0]).name, row[3]) for row in found] == [
        ("long.wav", "low"), ("long.wav", "high"), ("second.wav", "high"), ("second.wav", "low"),
    ]  # fmt: skip
    assert float(found[1][1]) == pytest.approx(0.5, abs=0.15) and float(found[3][1]) == pytest.approx(0.2, abs=0.15)
    of_python = longseq.load(checkpoint).events(second, hop=0.1)
    assert [(f"{e.start:.3f}", f"{e.end:.3f}", e.class_name, f"{e.score:.4f}") for e in of_python] == [
        tuple(row[1:]) for row in found[2:]
    ]
    flags[-1] = tmp_path / "events.tsv"
    assert command(*flags, "--input", tmp_path).code == 0
    columns, *selections = rows_of(tmp_path / "events.tsv", "\t")
    assert [columns.index(name) for name in ("Begin Time (s)", "Begin Path", "File Offset (s)")] == [3, 7, 8]
    before = [0.0, 0.0, 1.1, 1.1]  # seconds of the recordings in front of the event's
    for row, event, seconds in zip(selections, found, before, strict=True):
        assert row[5:8] == ["0", "8000" if seconds == 0 else "4000", event[0]] and row[9] == event[3]
        assert float(row[8]) == pytest.approx(float(event[1]), abs=6e-4)
        assert float(row[3]) - float(row[8]) == pytest.approx(seconds, abs=1e-5)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--events", "a.doc"], "events: a.doc: ends in none of .csv, .txt (Audacity), .tsv (Raven); "),
        (["--events", "no/a.csv"], "events: no: no such folder; "),
        (["--threshold", "0.7"], "threshold: applies to events; give --events or --picture, or leave it out"),
        (["--gap", "0"], "gap: applies to events; give --events or --picture, or leave it out"),
        (["--picture", "a.bmp"], "picture: a.bmp: not a known format; give a .png, .pdf or .svg"),
        (["--picture", "events"], "picture: events: not a known format; give a "),
        (["--picture", "no/a.png"], "picture: no/a.png: No such file or directory; "),
        (["--events", "a.csv", "--threshold", "2"], "threshold: must be between 0 and 1, got 2.0; "),
    ],
)
def test_a_wrong_flag_is_one_line(command, free_checkpoint, recording, flags, said, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    before = b"path,start,end,class,probability\r\nas it was"
    Path("before.csv").write_bytes(before)
    done = command("predict", "--ckpt_path", free_checkpoint, "--input", recording, "--out", "before.csv", *flags)
    assert Path("before.csv").read_bytes() == before
    assert done.code in (2, 6) and done.err.startswith(f"error: {said}") and done.err.count("\n") == 1


def test_a_recording_that_raven_cannot_open_is_known_before_it_is_heard(
    command, free_checkpoint, recording, monkeypatch, tmp_path
) -> None:  # fmt: skip
    def refused(path: bytes) -> None:
        raise soundfile.LibsndfileError(1)

    monkeypatch.setattr(soundfile, "info", refused)
    flags = ["--input", recording, "--out", tmp_path / "out.csv", "--events", tmp_path / "a.tsv"]
    done = command("predict", "--ckpt_path", free_checkpoint, *flags)
    assert (done.code, done.error) == (2, f"error: events: {recording}: not in a format that Raven opens; give a .csv")
    assert not (tmp_path / "out.csv").exists()


def test_events_end_with_a_short_sound(free_checkpoint, tmp_path) -> None:
    soundfile.write(tmp_path / "short.wav", tone(300, 0.153), 8000)
    (event,) = longseq.load(free_checkpoint).events(tmp_path / "short.wav")
    assert (event.class_name, event.end) == ("low", pytest.approx(0.153))


def test_a_sequence_of_many_hours_is_said_to_take_memory(free_checkpoint, capsys) -> None:
    model = longseq.load(free_checkpoint).model
    parts = [("short.wav", 0.0, 3600.0), ("day.flac", 0.0, 86_400.0)]
    say_if_long(parts, model)
    said = "day.flac: 24.0 h as one sequence of 8,640,000 rows, which take about 11 GiB; --window 10 divides it"
    assert capsys.readouterr().err == f"{said}\n"
    say_if_long(parts[:1], model)
    say_if_long([("day.flac", 10.0 * number, 10.0 * (number + 1)) for number in range(3)], model)
    assert capsys.readouterr().err == ""


def test_one_picture_and_audacitys_labels_are_of_one_recording(command, free_checkpoint, recording, tmp_path) -> None:
    soundfile.write(tmp_path / "second.wav", tone(300, 0.4), 8000)
    for flag, said in {
        "--picture=a.png": "picture: a.png: a picture is of one recording, got 2",
        "--events=a.txt": "events: a.txt: Audacity's labels are of one recording, got 2",
    }.items():
        done = command("predict", "--ckpt_path", free_checkpoint, "--input", tmp_path, flag)
        assert done.code == 2 and done.err.startswith(f"error: {said}")


def test_images_have_no_events(command, tmp_path: Path) -> None:
    flags = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2", "--trainer.default_root_dir", tmp_path]
    assert command("fit", "--config", "image/digits", *flags).code == 0
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    flags = ["--ckpt_path", tmp_path / "runs/digits/0/best.ckpt", "--input", tmp_path / "a.png", "--events", "a.csv"]
    done = command("predict", *flags)
    assert done.code == 2 and done.err == "error: events: must be of sounds, but this model sees images; leave it out\n"
