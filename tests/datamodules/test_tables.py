"""Tables of other programs are read as they are, or refused in a line; what they leave open is said in one."""

import json
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import soundfile

from datamodules import AudioFolder, DataError, ImageFolder
from datamodules.own.files import Item

# two calls of each of two recordings of 12 s, as every one of these programs would write them
CALLS = [("r0.wav", "frog", 1.0, 2.5), ("r0.wav", "bird", 6.0, 7.0), ("r1.wav", "frog", 3.5, 4.0)]
RAVEN = "Selection\tView\tChannel\tBegin Time (s)\tEnd Time (s)\tLow Freq (Hz)\tHigh Freq (Hz)"
KALEIDOSCOPE = "INDIR,FOLDER,IN FILE,CHANNEL,OFFSET,DURATION,DATE,TIME,HOUR,AUTO ID*,Fmin,MANUAL ID"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for name in ("r0", "r1", "r2"):
        soundfile.write(tmp_path / f"{name}.wav", 0.1 * generator.standard_normal(12 * 1000), 1000)
    return tmp_path


def found(root: Path, table: str, **options) -> list[tuple[str, str, float, float | None]]:
    items = AudioFolder(str(root), table=table, labels_separator=";", **options).items
    return [(item.path, item.label, item.start, item.end) for item in items]


def written(header: str, row: str, separator: str = ",") -> str:
    rows = [
        row.format(path=path, label=label, start=start, end=end, seconds=end - start)
        for path, label, start, end in CALLS
    ]
    return "\n".join([header, *rows]).replace(",", separator) + "\n"


# Names of columns


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("file,start_time,end_time,annotation", "{path},{start},{end},{label}"),  # OpenSoundscape
        (
            "audio_file,annotation_file,annotation,start_time,end_time,low_f,high_f",
            "x/{path},r.txt,{label},{start},{end},1,2",
        ),
        ("filename,label,start,end", "{path},{label},{start},{end}"),  # ketos
        ("sel_id,filename,start,end,label", "0,{path},{start},{end},{label}"),
        (KALEIDOSCOPE, "D:\\rec,night,{path},0,{start},{seconds},2024-07-01,21:30:00,21,NoID,5,{label}"),
        ("INDIR,FOLDER,IN FILE,OFFSET,DURATION,TOP1MATCH", "/rec,,{path},{start},{seconds},{label}"),
        (
            "input,start_time,end_time,species_name,confidence",  # the package birdnet
            "/rec/{path},00:00:0{start}0,00:00:0{end}0,{label},0.9",
        ),
        ("filepath,start,end,scientific_name,common_name", "/rec/{path},{start},{end},x,{label}"),  # BirdNET for R
        ("filename,onset,offset,event_label", "{path},{start},{end},{label}"),  # DESED
        ("Filename,Start Time (s),End Time (s),Low Freq (Hz),Label", "{path},{start},{end},1,{label}"),
        ("path,label,onset,offset,duration", "{path},{label},{start},{end},600"),
        ("path,label,onset,duration", "{path},{label},{start},{seconds}"),
        ("path,label,start,duration", "{path},{label},{start},{seconds}"),
        ("path,label,start (s),end (s)", "{path},{label},{start},{end}"),
        ("path,label,Start_sec,End_sec", "{path},{label},{start},{end}"),
        ("path,label,begin,end,begin_frame", "{path},{label},{start},{end},7"),
        ("path,label,begin_time,stop", "{path},{label},{start},{end}"),
    ],
)
def test_the_names_that_programs_give_to_columns_are_known(root: Path, header: str, row: str) -> None:
    (root / "t.csv").write_text(written(header, row))
    assert found(root, "t.csv") == CALLS
    (root / "t.tsv").write_text(written(header, row, "\t"))
    assert found(root, "t.tsv") == CALLS


def test_names_of_columns_are_known_in_tables_of_json_and_parquet_too(root: Path) -> None:
    rows = [{"File": path, "Annotation": label, "Start_Time": s, "End_Time": e} for path, label, s, e in CALLS]
    (root / "t.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), root / "t.parquet")
    assert found(root, "t.jsonl") == found(root, "t.parquet") == CALLS


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ("start_ms,end_ms", "start_ms"),
        ("begin_sample,end_sample", "begin_sample"),
        ("StartFrame,EndFrame", "StartFrame"),
        ("offset,length", "offset"),
        ("time,score", "time"),
        ("timestamp_s,logit", "timestamp_s"),
        ("start,end_ms", "end_ms"),
        ("from,to", "from"),
    ],
)
def test_a_time_in_a_column_of_another_name_is_refused_and_not_left_out(root: Path, columns: str, name: str) -> None:
    (root / "t.csv").write_text(f"path,label,{columns}\nr0.wav,frog,1,2\nr1.wav,bird,3,4\n")
    what = f"column {name} looks like a time, and is none that longseq knows; call it start or end if it is in seconds"
    with pytest.raises(DataError, match=rf"^{root}/t\.csv: {what}, or leave it out \(start may be .*start_time.*\)$"):
        found(root, "t.csv")


def test_columns_that_are_no_times_of_rows_are_left_out(root: Path) -> None:
    (root / "t.csv").write_text(
        "path,label,duration,start_date,end_lat,time of day,event\nr0.wav,frog,12,2024-05-01,3,noon,1\n"
    )
    assert found(root, "t.csv") == [("r0.wav", "frog", 0.0, None)]


def test_a_table_of_images_may_have_any_column_of_times(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("path,label,start_time,timestamp\n1.png,cat,5,6\n2.png,dog,7,8\n")
    assert [item.start for item in ImageFolder(str(tmp_path), table="t.csv").items] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("sound,label", r"no column path; name it in the first line, or .* \(path may be file_name, .*filename.*\)$"),
        ("file,start_time,end_time,frog,bird", r"no column label; .* \(label may be class, Species, .*species_name"),
    ],
)
def test_the_error_about_an_unknown_table_names_the_columns_that_are_known(root: Path, header: str, said: str) -> None:
    (root / "t.csv").write_text(f"{header}\nr0.wav,1,0,1,1\n"[: None if header.count(",") > 1 else len(header) + 10])
    with pytest.raises(DataError, match=rf"^{root}/t\.csv: {said}"):
        found(root, "t.csv")


def test_metadata_without_a_row_is_refused_as_ever(root: Path) -> None:
    (root / "metadata.csv").write_text("file_name,label\n")
    with pytest.raises(DataError, match=rf"^{root}/metadata\.csv: holds no row; give each clip a row$"):
        AudioFolder(str(root)).items  # noqa: B018


# Tables that have the name of their recording


def raven_tables(folder: Path) -> None:
    """Tables with Raven's own names for them, of r0.wav, r1.wav and, without a call, r2.wav."""
    folder.mkdir(exist_ok=True, parents=True)
    for name in ("r0", "r1", "r2"):
        calls = [call for call in CALLS if call[0] == f"{name}.wav"]
        rows = [
            f"{number}\tSpectrogram 1\t1\t{start}\t{end}\t100\t2000\t{label}\n"
            for number, (_, label, start, end) in enumerate(calls, start=1)
        ]
        (folder / f"{name}.Table.1.selections.txt").write_text(f"{RAVEN}\tSpecies\n{''.join(rows)}")


@pytest.mark.parametrize("where", [".", "tables"])
def test_a_folder_of_ravens_tables_is_one_table(root: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    raven_tables(root / where)
    given = str(root) if where == "." else where
    assert found(root, given) == [*CALLS, ("r2.wav", "", 0.0, None)]
    said = "1 table without a row, such as r2.Table.1.selections.txt: such a recording has no events\n"
    assert capsys.readouterr().err.endswith(said)
    data = AudioFolder(str(root), table=given, labels_separator=";", clip_seconds=6.0)
    assert [(item.path, item.label) for item in data.items] == [
        ("r0.wav", "frog"),
        ("r0.wav", "bird"),
        ("r1.wav", "frog"),
        ("r1.wav", ""),
        ("r2.wav", ""),
        ("r2.wav", ""),
    ]


@pytest.mark.parametrize(("where", "has_file"), [("", False), ("", True), ("tables/", False)])
def test_a_table_in_a_folder_is_of_the_recording_of_that_folder(root: Path, where: str, has_file: bool) -> None:
    for number in (0, 1):
        (root / f"site{number}").mkdir()
        (root / f"{where}site{number}").mkdir(parents=True, exist_ok=True)
        shutil.move(root / f"r{number}.wav", root / f"site{number}/dawn.wav")
        row = f"{number}\tS\t1\t{number}\t{number + 1}\t1\t2\tfrog\tdawn.wav"
        text = f"{RAVEN}\tSpecies\tBegin File\n{row}\n"
        if not has_file:
            text = text.replace("\tBegin File", "").replace("\tdawn.wav", "")
        (root / f"{where}site{number}/dawn.Table.1.selections.txt").write_text(text)
    expected = [(f"site{number}/dawn.wav", "frog", float(number), number + 1.0) for number in (0, 1)]
    assert found(root, str(root / where)) == expected


def test_a_table_of_two_possible_recordings_or_of_none_is_refused(root: Path) -> None:
    raven_tables(root / "tables")
    (root / "old").mkdir()
    shutil.move(root / "r1.wav", root / "old/r1.wav")
    assert found(root, "tables")[2][0] == "old/r1.wav"
    (root / "new").mkdir()
    shutil.copy(root / "old/r1.wav", root / "new/r1.wav")
    both = "no column path, and both new/r1.wav and old/r1.wav may be its recording; put the table beside its recording"
    with pytest.raises(DataError, match=rf"tables/r1\.Table\.1\.selections\.txt: {both}"):
        found(root, "tables")
    shutil.rmtree(root / "new")
    (root / "r2.wav").unlink()
    with pytest.raises(DataError, match=r"r2\.Table\.1\.selections\.txt: no column path; .*, such as r2\.wav \("):
        found(root, "tables")
    (root / "tables/r2.Table.1.selections.txt").write_text(f"{RAVEN}\tSpecies\tBegin File\n")
    with pytest.raises(DataError, match=r"r2\.Table\.1\.selections\.txt: holds no row, and no recording has its name"):
        found(root, "tables")
    (root / "tables/r2.Table.1.selections.txt").unlink()
    (root / "tables/notes.txt").write_text("the night was wet\n")
    with pytest.raises(DataError, match=r"tables/notes\.txt: no column label and path; "):
        found(root, "tables")
    shutil.rmtree(root / "tables")
    (root / "tables").mkdir()
    with pytest.raises(DataError, match=r"tables: holds no table; give a folder with \.csv, "):
        found(root, "tables")


def test_a_recording_with_calls_in_one_table_is_not_silent_by_another_without_rows(root: Path) -> None:
    raven_tables(root)
    (root / "r1.Table.2.selections.txt").write_text(f"{RAVEN}\tSpecies\n")
    assert found(root, str(root)) == [*CALLS, ("r2.wav", "", 0.0, None)]


def test_a_recording_without_calls_is_left_out_with_a_line_where_a_clip_has_one_class(root: Path, capsys) -> None:
    raven_tables(root)
    items = AudioFolder(str(root), table=str(root)).items
    assert [item.path for item in items] == ["r0.wav", "r0.wav", "r1.wav"]
    assert "r2.Table.1.selections.txt: left out, because without data.labels_separator" in capsys.readouterr().err


@pytest.mark.parametrize("recording", ["frog pond_Ä.wav", unicodedata.normalize("NFD", "frog pond_Ä.wav")])
def test_the_accents_of_a_name_may_be_written_apart_or_not(root: Path, recording: str) -> None:
    shutil.move(root / "r0.wav", root / recording)
    (root / unicodedata.normalize("NFC", "frog pond_Ä.txt")).write_text("1.0\t2.5\tfrog\n")
    assert found(root, unicodedata.normalize("NFC", "frog pond_Ä.txt")) == [(recording, "frog", 1.0, 2.5)]
    for form in ("NFC", "NFD"):
        (root / "t.csv").write_text(unicodedata.normalize(form, "path,label\nfrog pond_Ä.wav,frog\n"))
        assert found(root, "t.csv") == [(recording, "frog", 0.0, None)]


# Labels of Audacity


@pytest.mark.parametrize(
    "text",
    [
        "1.000000\t2.500000\tfrog\n6.000000\t7.000000\tbird\n",
        "1,0\t2,5\tfrog\r\n\\\t100,0\t2000,0\r\n6,0\t7,0\tbird\r\n\\\t100.0\t2000.0\r\n",  # with frequencies
        "1.0\t2.5\tfrog\t0.9\n6.0\t7.0\tbird\t0.8\n",  # of BirdNET, with the confidence
    ],
)
def test_labels_of_audacity_are_of_the_recording_that_has_their_name(root: Path, text: str) -> None:
    (root / "r0.txt").write_text(text)
    assert found(root, "r0.txt") == CALLS[:2]
    (root / "t.txt").write_text(text)
    with pytest.raises(DataError, match=r"t\.txt: no column path; .*or give the table the name of .*, such as t\.wav"):
        found(root, "t.txt")


def test_a_point_label_of_audacity_is_heard_in_the_clip_that_holds_it(root: Path) -> None:
    (root / "r0.txt").write_text("3.0\t3.0\tfrog\n6.5\t6.5\tbird\n")
    cut = found(root, "r0.txt", clip_seconds=3.0)
    assert [label for _, label, _, _ in cut] == ["", "frog", "bird", ""]


def test_a_file_of_audacity_without_a_label_is_a_recording_without_calls(root: Path) -> None:
    (root / "labels").mkdir()
    (root / "labels/r0.txt").write_text("1.0\t2.5\tfrog\n6.0\t7.0\tbird\n")
    (root / "labels/r1.txt").write_text("")
    assert found(root, "labels") == [*CALLS[:2], ("r1.wav", "", 0.0, None)]
    for name, text in (("r2.txt", "windy\n"), ("r2.csv", "")):  # a note, and what an interrupted program leaves
        (root / "labels" / name).write_text(text)
        with pytest.raises(DataError, match=rf"labels/{name}: no column label and path; "):
            found(root, "labels")
        (root / "labels" / name).unlink()


# Times


def test_a_row_that_begins_before_its_recording_is_cut_and_counted(root: Path, capsys) -> None:
    (root / "t.csv").write_text("path,label,start,end\nr0.wav,bird,5,6\nr0.wav,frog,-0.013,1\n")
    assert found(root, "t.csv") == [("r0.wav", "bird", 5.0, 6.0), ("r0.wav", "frog", 0.0, 1.0)]
    assert (
        f"{root}/t.csv: 1 row begins before its recording (line 3 at -0.013 s); cut there\n" in capsys.readouterr().err
    )


@pytest.mark.parametrize("times", ["-2,-1", "-1,", "-1,0", "2,1"])
def test_a_row_outside_of_its_recording_is_refused(root: Path, times: str) -> None:
    (root / "t.csv").write_text(f"path,label,start,end\nr0.wav,frog,{times}\n")
    with pytest.raises(DataError, match=r"t\.csv: line 2: from .*; give seconds from 0 on, the end after the start"):
        found(root, "t.csv")


def test_hours_minutes_and_seconds_are_times(root: Path) -> None:
    (root / "t.csv").write_text("path,label,start,end\nr0.wav,frog,00:00:01,0:00:02.5\nr0.wav,bird,01:02:03,90:00:00\n")
    assert found(root, "t.csv") == [("r0.wav", "frog", 1.0, 2.5), ("r0.wav", "bird", 3723.0, 324000.0)]
    (root / "t.csv").write_text("path,label,start,end\nr0.wav,frog,00:61:01,2:00:00\n")
    with pytest.raises(DataError, match=r"t\.csv: line 2: start or end is not a number"):
        found(root, "t.csv")


def test_decimal_commas_between_tabs_are_those_of_times_and_not_of_labels(root: Path) -> None:
    (root / "t.txt").write_text(f"{RAVEN}\tBegin File\tSpecies\n1\tS\t1\t1,5\t2,500\t1\t2\tr0.wav\t2,4\n")
    assert found(root, "t.txt") == [("r0.wav", "2,4", 1.5, 2.5)]


# What is written otherwise


def test_a_table_in_utf_16_or_windows_1252_is_read_and_a_guess_is_said(root: Path, capsys) -> None:
    text = "path,label\nr0.wav,grün\nr1.wav,bird\n"
    for encoding in ("utf-16", "utf-8", "utf-8-sig"):
        (root / "t.csv").write_bytes(text.encode(encoding))
        assert [label for _, label, _, _ in found(root, "t.csv")] == ["grün", "bird"]
    assert "Windows" not in capsys.readouterr().err
    (root / "t.csv").write_bytes(text.encode("cp1252"))
    assert [label for _, label, _, _ in found(root, "t.csv")] == ["grün", "bird"]
    said = f"{root}/t.csv: not in UTF-8, and read as Windows-1252, such as r0.wav,grün; write it again as UTF-8 if"
    assert said in capsys.readouterr().err
    (root / "t.csv").write_bytes("path,label\nr1.wav,ä\n".encode() + "r0.wav,grün\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"t\.csv: not a readable table \(.*\); give CSV, TSV or JSON Lines in UTF-8"):
        found(root, "t.csv")


def test_a_quote_that_is_not_closed_swallows_no_row(root: Path) -> None:
    rows = 'r0.wav,0,3,frog,"see\nthe next, page"\nr0.wav,3,6,bird,"see comment\nr1.wav,0,3,frog,\nr2.wav,3,6,bird,\n'
    (root / "t.csv").write_text(f"path,start,end,label,note\n{rows}")
    what = "unexpected end of data; close each quote in its cell, and double a quote that belongs to the text"
    with pytest.raises(DataError, match=rf"t\.csv: line 4: {what}$"):
        found(root, "t.csv")
    (root / "t.tsv").write_text('path\tstart\tend\tlabel\tnote\nr0.wav\t0\t3\tfrog\t"loud" one\n')
    with pytest.raises(DataError, match=r"t\.tsv: line 2: .* expected after .*; close each quote"):
        found(root, "t.tsv")
    (root / "t.csv").write_text('path,start,end,label,note\nr0.wav,0,3,frog,"a ""loud"" one"\nr1.wav,0,3,bird,5" off\n')
    assert [label for _, label, _, _ in found(root, "t.csv")] == ["frog", "bird"]


def test_tables_of_two_folders_whose_recordings_become_one_file_are_named(root: Path, capsys) -> None:
    (root / "tables").mkdir()
    for site, row in (("site1", "0,2,frog"), ("site2", "3,5,bird")):
        (root / f"tables/{site}.csv").write_text(f"File,start,end,label\nC:\\forest\\{site}\\r0.wav,{row}\n")
    assert [label for _, label, _, _ in found(root, "tables")] == ["frog", "bird"]
    said = (
        "site2.csv: C:\\forest\\site2\\r0.wav is read as r0.wav, as is C:\\forest\\site1\\r0.wav in site1.csv; if these"
    )
    assert said in capsys.readouterr().err
    (root / "tables/site2.csv").write_text("File,start,end,label\nC:/forest/site1/r0.wav,3,5,bird\n")
    assert len(found(root, "tables")) == 2
    assert "is read as" not in capsys.readouterr().err


def test_a_word_of_windows_1252_may_be_a_space_alone_and_a_path_may_be_too_long(root: Path, capsys) -> None:
    (root / "t.csv").write_bytes("path,label,note\nr0.wav,frog,10\xa0m\nr1.wav,bird,\n".encode("cp1252"))
    assert len(found(root, "t.csv")) == 2
    assert "such as r0.wav,frog,10" in capsys.readouterr().err
    (root / "t.csv").write_text(f"path,label\n{300 * 'r'}.wav,frog\nr0.wav,frog\nr1.wav,bird\n")
    data = AudioFolder(str(root), table="t.csv", on_error="skip")
    assert [*data.bad_files()] == [f"{300 * 'r'}.wav"]


def test_labels_that_differ_in_capitals_alone_are_classes_and_are_said_once(root: Path, capsys) -> None:
    rows = "".join(f"r{number}.wav,{number},{number + 1},{name}\n" for number in range(3) for name in ("Frog", "frog "))
    (root / "t.csv").write_text(f"path,start,end,label\n{rows}".replace("frog ", "frog;bird"))
    data = AudioFolder(str(root), table="t.csv", labels_separator=";")
    data.setup()
    assert data.class_names == ["Frog", "bird", "frog"]
    told = f"{root}: classes Frog and frog differ in capitals or blanks alone; if they are one, rename one\n"
    err = capsys.readouterr().err
    assert told in err and err.count("capitals") == 1


def test_a_selection_without_a_label_is_said_where_recordings_are_cut_into_clips(root: Path, capsys) -> None:
    (root / "t.csv").write_text("path,label,start,end\nr0.wav,frog,1,2\nr0.wav,,4,5\nr1.wav,,,\n")
    assert len(found(root, "t.csv", clip_seconds=6.0)) == 4
    said = f"{root}: 1 row has times and no label (line 3, r0.wav); nothing is heard there\n"
    assert said in capsys.readouterr().err


def test_a_class_is_once_in_a_clip_that_two_views_of_a_selection_name(root: Path) -> None:
    rows = "".join(f"1\t{view}\t1\t1.0\t2.5\t1\t2\tr0.wav\tfrog\n" for view in ("Waveform 1", "Spectrogram 1"))
    (root / "t.txt").write_text(f"{RAVEN}\tBegin File\tSpecies\n{rows}")
    items = AudioFolder(str(root), table="t.txt", labels_separator=";").items
    assert items == [Item("r0.wav", "frog", start=1.0, end=2.5, line=2)]


def test_a_url_of_a_file_is_its_path(root: Path) -> None:
    shutil.move(root / "r0.wav", root / "a b.wav")
    (root / "t.csv").write_text(f"path,label\nfile://{root}/a%20b.wav,frog\n")
    assert found(root, "t.csv") == [("a b.wav", "frog", 0.0, None)]


def test_check_prints_how_many_clips_have_how_many_labels(root: Path, command) -> None:
    rows = "".join(
        f"r{n}.wav,{name},{start},{start + 2}\n" for n in range(3) for name, start in (("frog", 0), ("bird", 1))
    )
    (root / "t.csv").write_text(f"path,label,start,end\n{rows}")
    flags = ["--data.table", "t.csv", "--data.labels_separator", ";", "--data.clip_seconds", "3"]
    done = command("check", "--data", "AudioFolder", "--data.root", root, *flags)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == "labels per clip: 0: 9, 2: 3"
