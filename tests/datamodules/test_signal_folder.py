"""Signals with several channels in files of every kind, with gaps, names and rates, from the file to the answer."""

import csv
import json
from pathlib import Path

import h5py
import numpy as np
import pyedflib
import pytest
import soundfile
import torch
import wfdb

import longseq
from datamodules import DataError, SignalFolder
from datamodules.decoding.signal_files import SUFFIXES, opened_signal
from datamodules.decoding.sound_files import change_rate

RATE = 100
NAMES = ["I", "V1"]
FIT = ["fit", "--experiment", "waves", "--data", "SignalFolder", "--model.encoder", "WaveformEncoder",
       "--model.encoder.patch_size", "5", "--model.encoder.attention", "Verma", "--model.encoder.dim", "16",
       "--model.encoder.depth", "1", "--model.encoder.heads", "1", "--model.encoder.local", "Conv1d",
       "--model.learning_rate", "1e-2", "--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu",
       "--trainer.devices", "1", "--data.batch_size", "8"]  # fmt: skip


def values(seed: int = 0, samples: int = 200) -> np.ndarray:
    """Two channels in mV; the first lags behind the second by a quarter of a period, or leads it if seed is odd."""
    time = np.arange(samples) / RATE
    lag = np.pi / 2 if seed % 2 else -np.pi / 2
    noise = 0.05 * np.random.default_rng(seed).standard_normal((2, samples))
    phase = seed * 0.7
    return (np.stack([np.sin(12 * time + phase), np.sin(12 * time + phase + lag)]) + noise).astype(np.float32)


def write(path: Path, signal: np.ndarray, rate_hz: int = RATE, names: list[str] = NAMES) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    suffix, folder = path.suffix, str(path.parent)
    if suffix == ".npy":
        np.save(path, signal)
    elif suffix == ".npz":
        np.savez(path, signal=signal, fs=rate_hz, channel_names=names, unit="mV")
    elif suffix in (".h5", ".hdf5"):
        with h5py.File(path, "w") as file:
            file["ecg"] = signal
            file["ecg"].attrs.update({"sample_rate_hz": rate_hz, "channel_names": names, "unit": "mV"})
    elif suffix == ".hea":
        wfdb.wrsamp(path.stem, rate_hz, ["mV"] * len(names), names, signal.T.astype(float), fmt=["16"] * len(names),
                    write_dir=folder)  # fmt: skip
    elif suffix in (".edf", ".bdf"):
        kind = pyedflib.FILETYPE_EDFPLUS if suffix == ".edf" else pyedflib.FILETYPE_BDFPLUS
        with pyedflib.EdfWriter(str(path), len(names), kind) as file:
            for number, name in enumerate(names):
                file.setSignalHeader(number, {"label": name, "dimension": "mV", "sample_frequency": rate_hz,
                                              "physical_max": 5, "physical_min": -5, "digital_max": 32767,
                                              "digital_min": -32768, "transducer": "", "prefilter": ""})  # fmt: skip
            file.writeSamples(list(signal.astype(float)))
    elif suffix in (".csv", ".tsv"):
        with open(path, "w", newline="") as file:
            rows = csv.writer(file, delimiter="," if suffix == ".csv" else "\t")
            rows.writerow(["time", *names])
            cells = [["" if np.isnan(value) else repr(float(value)) for value in row] for row in signal.T]
            rows.writerows([[number / rate_hz, *row] for number, row in enumerate(cells)])
    else:
        soundfile.write(path, signal.T / 5, rate_hz, "PCM_24")


@pytest.fixture
def waves(tmp_path: Path) -> Path:
    for number in range(24):
        write(tmp_path / "data" / ("ahead", "behind")[number % 2] / f"{number:02}.npz", values(number, 150 + number))
    return tmp_path / "data"


@pytest.mark.parametrize("suffix", sorted(SUFFIXES))
def test_every_kind_of_file_gives_its_channels_rate_names_and_unit(suffix: str, tmp_path: Path) -> None:
    for number in range(8):
        write(tmp_path / "ab"[number % 2] / f"{number}{suffix}", values(number))
    states_rate, states_names = suffix != ".npy", suffix not in (".npy", ".wav", ".flac")
    data = SignalFolder(str(tmp_path), sample_rate_hz=None if states_rate else RATE)
    data.setup("fit")
    scale = 5 if suffix in (".wav", ".flac") else 1
    for name, signal in zip(data.train_set.names, data.train_set.inputs, strict=True):
        expected = values(int(Path(name).stem))
        np.testing.assert_allclose(scale * signal.numpy(), expected, atol=2e-4)
        np.testing.assert_allclose(
            scale * data.read_part((str(tmp_path / name), 0.5, 1.0)), expected[:, 50:100], atol=2e-4
        )
    assert data.sample_rate_hz == RATE
    assert data.seconds == 2.0
    assert data.channel_names == (NAMES if states_names else ["1", "2"])
    assert data.inputs.unit == ("mV" if states_names and suffix not in (".csv", ".tsv") else None)
    assert data.inputs.shape == (2, None)
    one = SignalFolder(str(tmp_path), sample_rate_hz=RATE, channels=2)
    one.setup("fit")
    assert torch.equal(one.train_set.inputs[0], data.train_set.inputs[0][1])
    assert one.channel_names == data.channel_names[1:]


def test_lengths_differ_and_gaps_stay_nan(waves: Path, capsys) -> None:
    signal = values(0, 170)
    signal[:, 30:60] = np.nan
    write(waves / "ahead" / "gap.npz", signal)
    data = SignalFolder(str(waves), batch_size=25, in_memory=False)
    data.setup("fit")
    assert (
        "1 file of 25 has gaps (NaN), the largest share 17.6% in ahead/gap.npz; they are masked"
        in capsys.readouterr().err
    )
    item = next(item for item in data.items if item.name == "ahead/gap.npz")
    assert torch.equal(data.read_item(item), torch.from_numpy(signal)) or torch.equal(
        data.read_item(item).isnan(), torch.from_numpy(signal).isnan()
    )
    batch, _ = data.train_set.__getitems__(list(range(len(data.train_set))))
    assert batch["waveforms"].shape[1:] == (2, int(batch["lengths"].max()))
    assert len(batch["lengths"].unique()) > 5


def test_no_crop_lies_inside_a_gap() -> None:
    signal = torch.randn(2, 400)
    signal[:, 50:] = float("nan")
    data = SignalFolder("x", sample_rate_hz=RATE, seconds=0.4, channel_names=NAMES)
    samples = data.samples_of([signal], torch.tensor([0]))
    for generator in (None, *(torch.Generator().manual_seed(seed) for seed in range(20))):
        assert not samples.sample(0, generator).isnan().all()


def test_a_resampled_gap_stays_a_gap_and_does_not_ring() -> None:
    data = SignalFolder("x", sample_rate_hz=50, channel_names=NAMES)
    signal = torch.full((2, 400), 7.0)
    signal[:, 100:200] = float("nan")
    slower = data.at_rate(signal, 100.0)
    assert slower.shape == (2, 200)
    assert slower[:, 51:99].isnan().all()
    assert not slower[:, :50].isnan().any()
    assert not slower[:, 101:].isnan().any()
    torch.testing.assert_close(slower[~slower.isnan()], torch.full_like(slower[~slower.isnan()], 7.0))


@pytest.mark.parametrize(
    ("write_other", "line"),
    [
        (lambda path: write(path, values(), 250), "has 250 Hz, and the others 100; give --data.sample_rate_hz 100 to"),
        (lambda path: write(path, values()[:1], names=["I"]), "has one channel, and the data has 2; leave it out"),
        (lambda path: write(path, values(), names=["I", "V2"]), "has the channels I, V2, and the data I, V1; leave"),
        (lambda path: write(path, np.full((2, 50), np.nan)), "holds gaps (NaN) alone; leave it out"),
        (lambda path: write(path, np.full((2, 50), np.inf)), "holds infinite values; write NaN where a value is missi"),
        (lambda path: np.savez(path, signal=values()), "states no rate; give --data.sample_rate_hz"),
        (lambda path: np.savez(path, a=values(), b=values()), "holds a, b; call the array (channels, samples) signal"),
        (lambda path: np.savez(path, signal=np.array(["x"])), "holds <U1 of the shape (1,); write numbers (channels"),
        (lambda path: path.write_bytes(b"PK\x03\x04 cut off"), "not a readable signal ("),
        (lambda path: np.savez(path, signal=np.zeros((2, 0)), fs=RATE), "holds no signal; leave it out"),
    ],
)  # fmt: skip
def test_a_file_unlike_the_others_is_one_line(write_other, line: str, waves: Path, command) -> None:
    write_other(waves / "ahead" / "other.npz")
    done = command("check", "--data", "SignalFolder", "--data.root", waves)
    assert done.code == 3
    assert f"ahead/other.npz: {line}" in done.out
    done = command(*FIT, "--data.root", waves)
    assert done.code == 3
    assert f"ahead/other.npz: {line}" in done.err
    assert "Traceback" not in done.err
    data = SignalFolder(str(waves), on_error="skip")
    data.setup("fit")
    assert sum(map(len, data.splits().values())) == 24


def test_rates_are_changed_if_the_user_says_so(waves: Path) -> None:
    write(waves / "ahead" / "fast.npz", values(0, 400), 2 * RATE)
    data = SignalFolder(str(waves), sample_rate_hz=RATE)
    data.setup("fit")
    fast = data.read(waves / "ahead" / "fast.npz")
    assert fast.shape[1] == 200  # the longest, 2 s
    assert data.channel_names == NAMES


def test_arrays_that_are_all_turned_round_are_one_line(tmp_path: Path, command) -> None:
    for number in range(8):
        write(tmp_path / "data" / "ab"[number % 2] / f"{number}.npy", values(number).T)
    done = command("check", "--data", "SignalFolder", "--data.root", tmp_path / "data", "--data.sample_rate_hz", "100")
    assert done.code == 3
    assert "all arrays have more channels than samples (200 x 2); arrays are (channels, samples): transpose" in done.err
    data = SignalFolder(str(tmp_path / "data"), sample_rate_hz=100, num_channels=200)
    assert not data.bad_files()


def test_channels_of_other_rates_in_an_edf_can_be_left_out(tmp_path: Path) -> None:
    for number in range(8):
        path = tmp_path / "ab"[number % 2] / f"{number}.edf"
        path.parent.mkdir(exist_ok=True)
        with pyedflib.EdfWriter(str(path), 2, pyedflib.FILETYPE_EDFPLUS) as file:
            for channel, rate_hz in enumerate((100, 20)):
                file.setSignalHeader(channel, {"label": NAMES[channel], "dimension": "uV", "sample_frequency": rate_hz,
                                               "physical_max": 5, "physical_min": -5, "digital_max": 32767,
                                               "digital_min": -32768, "transducer": "", "prefilter": ""})  # fmt: skip
            file.writeSamples([values(number)[0].astype(float), values(number)[1, ::5].astype(float)])
    bad = SignalFolder(str(tmp_path)).bad_files() if False else None
    assert bad is None
    with pytest.raises(
        DataError, match="its channels have 20 and 100 Hz; choose some of one rate with --data.channels"
    ):
        SignalFolder(str(tmp_path)).read(tmp_path / "a" / "0.edf")
    data = SignalFolder(str(tmp_path), channels=2)
    data.setup("fit")
    assert data.sample_rate_hz == 20
    assert data.channel_names == ["V1"]


def test_a_model_of_signals_trains_with_gaps_and_answers_files_arrays_and_exports(waves, command, tmp_path) -> None:
    for number in range(4):
        signal = values(number, 160)
        signal[:, 40:70] = np.nan
        write(waves / ("ahead", "behind")[number % 2] / f"gap{number}.npz", signal)
    done = command(*FIT, "--data.root", waves, "--trainer.max_epochs", "15")
    assert done.code == 0, done.err
    checkpoint = tmp_path / "runs/waves/0/best.ckpt"
    model = longseq.load(checkpoint)
    waves.rename(tmp_path / "moved")
    paths = [str(tmp_path / "moved" / name) for name in ("ahead/gap0.npz", "behind/gap1.npz", "behind/05.npz")]
    of_files = model.predict(paths)
    assert [answer.answers[0].class_name for answer in of_files] == ["ahead", "behind", "behind"]
    of_arrays = model.predict([np.load(path)["signal"] for path in paths])
    for one, other in zip(of_files, of_arrays, strict=True):
        torch.testing.assert_close(one.probabilities, other.probabilities)
    signal = np.load(paths[0])["signal"]
    late = np.concatenate([np.full((len(signal), 600), np.nan), signal], 1)  # its first window lies in the gap
    write(tmp_path / "late.npz", late)
    (of_late,) = model.predict([str(tmp_path / "late.npz")])
    assert of_late.answers[0].class_name == "ahead" and of_late.probabilities.isfinite().all()
    assert all(row.isfinite().all() for row in model.embed([str(tmp_path / "late.npz")]))
    done = command("predict", "--ckpt_path", checkpoint, "--input", paths[0], "--window", "0.3", "--out", "out.csv",
                   "--events", "events.csv", "--picture", "seen.png")  # fmt: skip
    assert done.code == 0, done.err
    assert command("explain", "--ckpt_path", checkpoint, "--input", paths[0]).code == 0
    for format in ("torch", "onnx"):
        done = command("export", "--ckpt_path", checkpoint, "--format", format, "--input", paths[0])
        assert done.code == 0, done.err
    write(tmp_path / "empty.npz", np.full((2, 600), np.nan))  # nothing is heard, so no class is named
    done = command("predict", "--ckpt_path", checkpoint, "--input", tmp_path / "empty.npz", "--out", "empty.jsonl")
    assert done.code == 0 and json.loads(Path("empty.jsonl").read_text())["classes"] == []
    done = command("explain", "--ckpt_path", checkpoint, "--input", tmp_path / "empty.npz")
    assert done.code == 2 and "must hold something besides gaps" in done.err
    assert command("explain", "--ckpt_path", checkpoint, "--input", tmp_path / "late.npz").code == 0
    write(tmp_path / "other.npz", values(0), names=["I", "V7"])
    done = command("predict", "--ckpt_path", checkpoint, "--input", tmp_path / "other.npz")
    assert done.code == 3
    assert "other.npz: has the channels I, V7, and the data I, V1; " in done.err


def test_a_table_gives_times_and_events(tmp_path: Path) -> None:
    for number in range(6):
        write(tmp_path / f"{number}.csv", values(number, 600))
    times = (("beat", 0.2), ("pause", 3.1))
    rows = [(f"{number}.csv", label, start, start + 0.5) for number in range(6) for label, start in times]
    with open(tmp_path / "events.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "start", "end"), *rows])
    data = SignalFolder(str(tmp_path), table="events.csv", labels_separator=";", clip_seconds=2.0)
    data.setup("fit")
    assert {signal.shape for signal in data.train_set.inputs} == {(2, 200)}
    events = {path: of for split in ("train", "val", "test") for path, of in data.true_events(split).items()}
    assert events[str(tmp_path / "3.csv")] == [(0.2, 0.7, "beat"), (3.1, 3.6, "pause")]


def test_a_signal_is_examined_again_when_the_file_beside_its_header_has_changed(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / "data" / ("ahead", "behind")[number] / f"{number}.hea", values(number))
    before = SignalFolder(str(tmp_path / "data")).facts
    samples = tmp_path / "data/ahead/0.dat"
    samples.write_bytes(samples.read_bytes()[::-1])  # the header is the same, and so is the size
    after = SignalFolder(str(tmp_path / "data")).facts
    assert after["ahead/0.hea"]["sha256"] != before["ahead/0.hea"]["sha256"]
    assert after["behind/1.hea"]["sha256"] == before["behind/1.hea"]["sha256"]


def test_a_header_of_hostile_names_is_a_broken_file_not_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "ahead").mkdir()
    (tmp_path / "ahead/0.hea").write_text(f"0 1 100 200\n{'x' * 5000} 16 200 16 0 0 0 0 I\n")
    assert "error" in SignalFolder(str(tmp_path)).facts["ahead/0.hea"]


def test_a_missing_library_is_one_line(tmp_path: Path, monkeypatch) -> None:
    write(tmp_path / "x.hea", values())
    monkeypatch.setitem(__import__("sys").modules, "wfdb", None)
    with pytest.raises(DataError, match=r"x.hea: needs wfdb; pip install 'longseq\[signals\]'"):
        SignalFolder(str(tmp_path)).read(tmp_path / "x.hea")


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ("time,I,V1\n0,1,2\n0.1,x,2\n", "line 3: 0.1,x,2; write 3 numbers"),
        ("time,I,V1\n0,1,2\n0.1,2\n", "line 3: 0.1,2; write 3 numbers"),
        ("time,I,V1\n0,1,2\n0.1,1,2\n0.5,1,2\n", "the steps of its time column differ; resample it"),
        (",I,V1\n0,0.1,0.2\n1,0.1,0.2\n", "column 1 has no name, as pandas writes its index; write .* .index=False.,"),
    ],
)
def test_a_csv_that_is_wrong_says_where(lines: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(lines)
    with pytest.raises(DataError, match=line):
        SignalFolder(str(tmp_path), sample_rate_hz=10).read(tmp_path / "x.csv")


@pytest.mark.parametrize(
    ("lines", "names", "first"),
    [
        ("0,1\n0.5,0.25\n1.0,2.0\n", ("0", "1"), [0.5, 0.25]),
        ("1,2\n0.5,0.25\n1.0,2.0\n", ("1", "2"), [0.5, 0.25]),
        ("0,1\n5,0.25\n1,2.0\n", (), [0, 1]),
        ("0,2\n0.5,0.25\n1.0,2.0\n", (), [0, 2]),
        ("0\n0.5\n", (), [0]),
    ],
)
def test_the_numbers_of_columns_are_names_and_samples_are_not(lines, names, first, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(lines)
    with opened_signal(tmp_path / "x.csv") as signal:
        assert signal.names == names
        assert signal.read(range(len(first)), 0, 1)[:, 0].tolist() == first


@pytest.mark.parametrize("lines", ["ecg\n1.5\n\n2.5\n\n3.5\n", "1.5\n\n2.5\n\n3.5\n"])
def test_an_empty_line_of_one_channel_is_a_gap(lines: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(lines)
    with opened_signal(tmp_path / "x.csv") as signal:
        np.testing.assert_array_equal(signal.read([0], 0, 5), [[1.5, np.nan, 2.5, np.nan, 3.5]])


@pytest.mark.parametrize("rate", [np.nan, np.inf, -100.0, 5e6])
def test_a_rate_that_cannot_be_is_a_broken_file(rate: float, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", signal=np.zeros((2, 300)), fs=rate)
    with pytest.raises(DataError, match=r"x\.npz: states a rate of "), opened_signal(tmp_path / "x.npz"):
        pass


def test_two_signals_of_a_name_in_one_file_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for side in ("left", "right"):
            file[f"{side}/signal"] = np.zeros((2, 100))
    with pytest.raises(DataError, match="holds left/signal and right/signal; "), opened_signal(tmp_path / "x.h5"):
        pass


@pytest.mark.parametrize(("from_hz", "to_hz"), [(50_000, 10), (1_000_000, 100), (8000, 1)])
def test_a_rate_may_become_thousands_of_times_lower(from_hz: int, to_hz: int) -> None:
    slow = change_rate(torch.ones(1, 3 * from_hz), from_hz, to_hz)
    assert slow.shape == (1, 3 * to_hz) and slow[0, slow.shape[1] // 2].item() == pytest.approx(1, abs=0.05)


def test_a_wave_that_is_cut_off_is_broken(waves: Path) -> None:
    write(waves / "ahead/cut.wav", values(0, 4000))
    content = (waves / "ahead/cut.wav").read_bytes()
    (waves / "ahead/cut.wav").write_bytes(content[: len(content) // 4])
    with pytest.raises(DataError, match=r"cut\.wav: cut off, \d+ of \d+ bytes are there; record, copy"):
        SignalFolder(str(waves)).examine(waves / "ahead/cut.wav")
