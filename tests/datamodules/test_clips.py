"""Recordings whose table says what is heard when become clips, each with all classes that overlap it."""

import csv
import itertools
from pathlib import Path

import numpy as np
import pytest
import soundfile

from datamodules import AudioFolder, DataError
from datamodules.own._clips import cut_into_clips
from datamodules.own.files import Item

ROWS = [
    ("a.wav", "bird", 0.5, 1.5),
    ("a.wav", "frog", 1.2, 1.4),
    ("a.wav", "bird", 1.9, 2.0),
    ("a.wav", "rain", 5.5, 5.8),
    ("b.wav", "frog", "", ""),
    ("c.wav", "", "", ""),
]
SECONDS = {"a.wav": 6.5, "b.wav": 2.0, "c.wav": 0.7}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for name, seconds in SECONDS.items():
        soundfile.write(tmp_path / name, 0.1 * generator.standard_normal(round(seconds * 8000)), 8000)
    with open(tmp_path / "events.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "start", "end"), *ROWS])
    return tmp_path


def clips(
    root: Path, seconds: float, min_overlap: float | None = None
) -> list[tuple[str, float, float | None, set[str]]]:
    data = AudioFolder(
        str(root), table="events.csv", labels_separator=";", clip_seconds=seconds, min_overlap=min_overlap
    )
    return [(item.path, item.start, item.end, set(item.label.split(";")) - {""}) for item in data.items]


def test_every_clip_has_the_classes_that_overlap_it(root: Path) -> None:
    assert clips(root, 2.0) == [
        ("a.wav", 0.0, 2.0, {"bird", "frog"}),
        ("a.wav", 2.0, 4.0, set()),
        ("a.wav", 4.0, 6.0, {"rain"}),
        ("a.wav", 4.5, 6.5, {"rain"}),  # the last one ends with the recording
        ("b.wav", 0.0, 2.0, {"frog"}),
        ("c.wav", 0.0, 0.7, set()),
    ]


@pytest.mark.parametrize("seconds", [0.3, 0.5, 1.0, 6.5, 20.0])
def test_clips_cover_a_recording_and_miss_no_event(root: Path, seconds: float) -> None:
    for path, length in SECONDS.items():
        of_path = [clip for clip in clips(root, seconds, min_overlap=0.0) if clip[0] == path]
        assert of_path[0][1] == 0 and of_path[-1][2] == pytest.approx(length)
        for (_, start, end, _), (_, after, _, _) in itertools.pairwise(of_path):
            assert start < after <= end + 1e-6
        for of_row, name, begin, stop in ROWS:
            if of_row == path:
                for _, start, end, heard in of_path:
                    overlaps = begin == "" or (begin < end and stop > start)
                    assert name == "" or (name in heard) >= overlaps


def test_a_clip_has_the_events_of_which_it_holds_a_quarter_of_a_second_or_half(root: Path) -> None:
    """The oracle counts milliseconds. OpenSoundscape calls this min_label_overlap=0.25, min_label_fraction=0.5."""
    random = np.random.default_rng(0)
    starts = random.integers(0, 6000, 60).tolist()
    events = [(start, start + int(random.choice([20, 50, 300, 400, 2500]))) for start in starts]
    rows = [f"a.wav,{number},{start / 1000},{end / 1000}\n" for number, (start, end) in enumerate(events)]
    (root / "events.csv").write_text("path,label,start,end\n" + "".join(rows))
    found = clips(root, 2.0)
    assert [(start, end) for _, start, end, _ in found] == [(0.0, 2.0), (2.0, 4.0), (4.0, 6.0), (4.5, 6.5)]
    in_any: set[str] = set()
    for _, first, last, heard in found:
        clip = {*range(round(1000 * first), round(1000 * last or 0))}
        expected = set()
        for number, (start, end) in enumerate(events):
            event = {*range(start, min(end, 6500))}
            if len(event & clip) >= 250 or 2 * len(event & clip) >= len(event):
                expected.add(str(number))
        assert heard == expected
        in_any |= heard
    assert in_any == {str(number) for number in range(60)}  # none is lost


@pytest.mark.parametrize(
    ("min_overlap", "heard"),
    [(None, [{"long"}, {"long", "pulse", "edge"}]), (0.0, [{"long", "edge"}, {"long", "pulse", "edge"}]),
     (1.0, [set(), {"long", "pulse", "edge"}])],
)  # fmt: skip
def test_a_pulse_makes_a_label_and_ten_milliseconds_of_a_call_only_if_asked(
    root: Path, min_overlap: float | None, heard: list[set[str]]
) -> None:
    rows = "a.wav,pulse,5.0,5.05\na.wav,edge,2.99,4.0\na.wav,long,2.3,6.5\n"
    (root / "events.csv").write_text(f"path,label,start,end\n{rows}")
    assert [found for *_, found in clips(root, 3.0, min_overlap)][:2] == heard


def test_a_point_in_time_is_in_the_clip_that_holds_it_and_is_no_clip_by_itself(root: Path) -> None:
    (root / "events.csv").write_text("path,label,start,end\na.wav,bird,2.0,2.0\na.wav,frog,0.5,0.5\n")
    assert [heard for *_, heard in clips(root, 2.0)] == [{"frog"}, {"bird"}, set(), set()]
    with pytest.raises(DataError, match=r"^events\.csv: line 2: a point in time, at 2 s, is not a clip; give it "):
        AudioFolder(str(root), table="events.csv").items  # noqa: B018


@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.48, 0.7, 0.96, 1.1, 2.4, 3.0])
def test_an_event_on_the_grid_of_the_clips_is_in_one_clip(seconds: float) -> None:
    """Multiples of 0.96 s do not come out as the numbers that a table writes."""
    every_second = [(round(number * seconds, 2), round((number + 1) * seconds, 2)) for number in range(0, 100, 2)]
    items = [Item("a.wav", "x", start=start, end=end, line=2) for start, end in every_second]
    cut = cut_into_clips(items, seconds, lambda path: round(100 * seconds, 2), ";")
    assert [clip.label for clip in cut] == ["x", ""] * 50


def test_one_second_of_each_clip_is_read(root: Path) -> None:
    data = AudioFolder(str(root), table="events.csv", labels_separator=";", clip_seconds=1.0, sample_rate_hz=8000)
    assert data.seconds == 1.0 and data.class_names == ["bird", "frog", "rain"]
    first = data.read_item(data.items[1])
    sound = soundfile.read(root / "a.wav", dtype="float32")[0]
    assert np.allclose(first.numpy(), sound[8000:16000])


def test_the_true_events_of_a_split_are_the_rows_of_its_recordings(root: Path) -> None:
    table = [("path", "label", "start", "end", "split"), ("a.wav", "bird;frog", 0.5, 1.5, "test")]
    table += [("a.wav", "frog", 6.0, 9.0, "test"), ("b.wav", "bird;frog", 0.1, 0.4, "train")]
    table += [("c.wav", "", "", "", "val")]
    with open(root / "split.csv", "w", newline="") as file:
        csv.writer(file).writerows(table)
    flags = {"table": "split.csv", "labels_separator": ";"}
    data = AudioFolder(str(root), clip_seconds=1.0, **flags)
    data.setup()
    assert data.true_events("test") == {
        str(root / "a.wav"): [(0.5, 1.5, "bird"), (0.5, 1.5, "frog"), (6.0, 6.5, "frog")],  # cut at its end
    }
    assert data.true_events("val") == {str(root / "c.wav"): []}
    whole = AudioFolder(str(root), **flags)  # every row is a clip: nothing says what is heard outside of it
    whole.setup()
    assert whole.true_events("test") == {}


def test_labels_of_whole_recordings_are_no_events(root: Path) -> None:
    rows = [("path", "label", "split"), ("a.wav", "bird;frog", "train"), ("b.wav", "frog", "val")]
    rows.append(("c.wav", "bird", "test"))
    with open(root / "weak.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    data = AudioFolder(str(root), table="weak.csv", labels_separator=";", clip_seconds=0.5)
    data.setup()
    assert data.true_events("test") == {}


def test_clips_need_labels_of_several_classes_and_a_length() -> None:
    with pytest.raises(ValueError, match=r"^labels_separator must be given with clip_seconds, got None; "):
        AudioFolder("nowhere", table="t.csv", clip_seconds=3.0)
    with pytest.raises(ValueError, match=r"^clip_seconds must be 0\.01 or more, got 0\.0; "):
        AudioFolder("nowhere", table="t.csv", labels_separator=";", clip_seconds=0.0)
    with pytest.raises(ValueError, match=r"^clip_seconds must be given with min_overlap, got None; "):
        AudioFolder("nowhere", table="t.csv", labels_separator=";", min_overlap=0.1)
    with pytest.raises(ValueError, match=r"^min_overlap must be in 0\.\.2, the seconds of a clip, got 2\.5; "):
        AudioFolder("nowhere", table="t.csv", labels_separator=";", clip_seconds=2.0, min_overlap=2.5)


def test_a_broken_recording_is_named_as_ever(root: Path) -> None:
    (root / "b.wav").write_bytes(b"RIFF")
    data = AudioFolder(str(root), table="events.csv", labels_separator=";", clip_seconds=1.0)
    with pytest.raises(DataError, match=r"b\.wav: not a readable sound"):
        data.setup()


def test_a_row_behind_the_end_of_its_recording_is_named_or_left_out(root: Path) -> None:
    with open(root / "events.csv", "a", newline="") as file:
        csv.writer(file).writerow(("b.wav", "bird", "70", "71"))
    flags = {"table": "events.csv", "labels_separator": ";", "clip_seconds": 1.0}
    what = "line 8 of the table: holds no sound from 70 s on, it is 2 s long; correct start and end"
    with pytest.raises(DataError, match=f"b\\.wav 70-71: {what}: "):
        AudioFolder(str(root), **flags).setup()
    data = AudioFolder(str(root), **flags, on_error="skip")
    assert data.bad_files() == {"b.wav 70-71": what}
    assert [item.start for item in data._good_items() if item.path == "b.wav"] == [0.0, 1.0]


def test_a_row_keeps_its_split_and_fold() -> None:
    item = Item("a.wav", "bird", "test", "3", 0.0, 1.0, 7)
    (clip,) = cut_into_clips([item], 5.0, lambda path: 2.0, ";")
    assert (clip.split, clip.fold, clip.end, clip.label) == ("test", "3", 2.0, "bird")


RAVEN = (
    "Selection\tView\tChannel\tBegin Time (s)\tEnd Time (s)\tLow Freq (Hz)\tHigh Freq (Hz)\tBegin File\t"
    "File Offset (s)\tSpecies\n"
    "1\tSpectrogram 1\t1\t0.500000\t1.500000\t0\t4000\ta.wav\t0.500000\tbird\n"
    "2\tSpectrogram 1\t1\t6.700000\t7.450000\t0\t4000\tb.wav\t0.200000\tfrog\n"
)
BIRDNET = "Start (s),End (s),Scientific name,Common name,Confidence,File\n0.5,1.5,Aves,bird,0.9,a.wav\n"
BIRDNET += "0.2,0.95,Anura,frog,0.8,b.wav\n"
EVENTS = "path,start,end,class,score\na.wav,0.500,1.500,bird,0.9\nb.wav,0.200,0.950,frog,0.8\n"
ELSEWHERE = BIRDNET.replace("a.wav", "/home/me/recordings/a.wav").replace("b.wav", "C:\\recordings\\b.wav")
# as Excel writes where numbers have decimal commas, and as one types it
EXCEL = "sep=;\npath;Start;End;label\na.wav;0,5;1,5;bird\nb.wav;0,2;0,95;frog\n"
TYPED = "Path, START ,end, Label\na.wav,0.5,1.5, bird\n\nb.wav,0.2,0.95,frog\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.txt", RAVEN),
        ("t.tsv", RAVEN),
        *(("t.csv", text) for text in (BIRDNET, ELSEWHERE, EVENTS, EXCEL, EXCEL.partition("\n")[2], TYPED)),
    ],
)
def test_tables_of_raven_birdnet_and_our_own_events_are_read(root: Path, name: str, text: str) -> None:
    (root / name).write_text(text)
    data = AudioFolder(str(root), table=name, labels_separator=";")
    found = [(item.path, item.label, item.start, item.end) for item in data.items]
    assert found == [("a.wav", "bird", 0.5, 1.5), ("b.wav", "frog", 0.2, 0.95)]


def test_a_column_has_its_own_name_before_one_that_differs_in_capitals(root: Path) -> None:
    (root / "t.csv").write_text("path,Label,label,notes;\na.wav,x,bird,\nb.wav,x,frog,\n")
    assert [item.label for item in AudioFolder(str(root), table="t.csv").items] == ["bird", "frog"]


def test_rows_that_last_beyond_their_recordings_are_cut_and_counted(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"a.wav": (0, 999, "bird"), "b.wav": (0, 0.5, "frog")}
    length = soundfile.info(root / "a.wav").duration
    text = "".join(f"{path},{start},{end},{label}\n" for path, (start, end, label) in rows.items())
    (root / "t.csv").write_text(f"path,start,end,label\n{text}a.wav,{length - 1},{length + 0.9},frog\n")
    data = AudioFolder(str(root), table="t.csv")
    assert not data.bad_files()
    said = (
        f"2 rows of the table last beyond their recordings (line 2 ends at 999 s, a.wav has {length:g} s); cut there\n"
    )
    assert said in capsys.readouterr().err
    AudioFolder(str(root), table="t.csv", labels_separator=";", clip_seconds=3.0).items  # noqa: B018
    assert said in capsys.readouterr().err


def test_begin_times_of_raven_that_count_through_several_recordings_are_refused(root: Path) -> None:
    (root / "t.txt").write_text(RAVEN.replace("File Offset (s)", "Delta Time (s)"))
    said = r"t\.txt: Begin Time \(s\) counts from the first of several recordings; have Raven write its column File Off"
    with pytest.raises(DataError, match=said):
        AudioFolder(str(root), table="t.txt", labels_separator=";").items  # noqa: B018


AT_SITES = (
    "Begin Time (s)\tEnd Time (s)\tBegin File\tBegin Path\tFile Offset (s)\tSpecies\n"
    "0\t0.5\tdawn.wav\tD:\\forest\\site1\\dawn.wav\t0\tbird\n"
    "1\t1.5\tdawn.wav\tD:\\forest\\site2\\dawn.wav\t0\tfrog\n"
    "0\t0.5\tdawn.wav\tD:/forest/site1/dawn.wav\t0.5\tfrog\n"
)


@pytest.mark.parametrize("above", ["", "forest", "old/forest"])
def test_recordings_of_ravens_with_one_name_at_several_sites_are_several(root: Path, above: str) -> None:
    for site in ("site1", "site2"):
        (root / above / site).mkdir(parents=True)
        soundfile.write(root / above / site / "dawn.wav", np.full(8000, 0.1 * (site == "site2")), 8000)
    (root / "t.txt").write_text(AT_SITES)
    folder = root / "old" if above == "old/forest" else root
    data = AudioFolder(str(folder), table=str(root / "t.txt"))
    prefix = "forest/" if above else ""
    paths = [f"{prefix}site1/dawn.wav", f"{prefix}site2/dawn.wav", f"{prefix}site1/dawn.wav"]
    assert [item.path for item in data.items] == paths
    assert not data.bad_files()


def test_two_recordings_of_ravens_for_which_one_file_is_there_are_refused(root: Path) -> None:
    (root / "t.txt").write_text(AT_SITES)
    data = AudioFolder(str(root), table="t.txt", on_error="skip")
    assert {*data.bad_files()} >= {"D:\\forest\\site1\\dawn.wav", "D:\\forest\\site2\\dawn.wav"}
    soundfile.write(root / "dawn.wav", np.zeros(8000), 8000)
    with pytest.raises(DataError, match=r"t\.txt: D:.*site1.dawn.wav and D:.*site2.dawn.wav are two recordings, "):
        AudioFolder(str(root), table="t.txt").items  # noqa: B018


@pytest.mark.parametrize("separator", [None, ";"])
def test_a_selection_that_raven_wrote_once_for_each_view_is_one_sample(root: Path, separator, capsys) -> None:
    head, *rows = RAVEN.splitlines()
    views = [row.replace("Spectrogram 1", view) for row in rows for view in ("Waveform 1", "Spectrogram 1")]
    (root / "t.txt").write_text("\n".join([head, *views]))
    items = AudioFolder(str(root), table="t.txt", labels_separator=separator).items
    found = [(item.path, set(item.classes(separator)), item.start, item.end) for item in items]
    assert found == [("a.wav", {"bird"}, 0.5, 1.5), ("b.wav", {"frog"}, 0.2, 0.95)]
    assert ("t.txt: 2 rows left out, equal to others before\n" in capsys.readouterr().err) == (separator is None)


def test_a_quote_in_a_note_of_ravens_swallows_no_row(root: Path) -> None:
    head, *rows = RAVEN.splitlines()
    noted = [
        f"{head}\tNotes",
        f'{rows[0]}\t"good one',
        f'{rows[1]}\t"as "before"',
        f"{rows[1]}\t".replace("frog", "toad"),
    ]
    (root / "t.txt").write_text("\r\n".join(noted))
    items = AudioFolder(str(root), table="t.txt", labels_separator=";").items
    assert [(item.path, item.label) for item in items] == [("a.wav", "bird"), ("b.wav", "frog;toad")]
