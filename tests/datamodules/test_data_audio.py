"""FSDD, and how sound files of any kind are read."""

import ctypes
import io
import math
import os
import shutil
import subprocess
from contextlib import suppress

import numpy as np
import pytest
import soundfile
import torch
from small_sets import noise

from datamodules import FSDD, AudioFolder, AudioShards, DataError, Gain, audio
from datamodules.decoding import sound_files
from datamodules.decoding.sound_files import SUFFIXES, change_rate, clip_of, read_sound, read_until_break, seconds_of
from datamodules.errors import ArgumentError
from datamodules.samples import Clips

DATA = FSDD("nowhere", seconds=0.5, sample_rate_hz=8000)
TONE_HZ = 440.0


def tone(rate_hz: int, seconds: float, amplitude: float = 0.5) -> np.ndarray:
    return amplitude * np.sin(2 * math.pi * TONE_HZ * np.arange(round(rate_hz * seconds)) / rate_hz)


def assert_is_the_tone(waveform: torch.Tensor, amplitude: float = 0.5) -> None:
    """Check that the spectrum has one peak, at the frequency of the tone and with its amplitude."""
    assert waveform.shape == DATA.shape
    assert waveform.dtype == torch.float32
    middle = waveform[1000:3000].double() * torch.hann_window(2000, dtype=torch.float64)
    spectrum = torch.fft.rfft(middle).abs() / 500  # 2000 x 1/2 (mean of the window) x 1/2 (a sine)
    assert spectrum.argmax() * 4 == TONE_HZ  # the lines of the spectrum are 4 Hz apart
    assert spectrum.max() == pytest.approx(amplitude, rel=0.02)
    assert spectrum[4:100].max() < 0.01 * amplitude  # starts above 0 Hz, where 8-bit files have an offset
    assert spectrum[120:].max() < 0.01 * amplitude


@pytest.mark.parametrize("rate_hz", [8000, 11025, 16000, 22050, 44100, 44101, 48000, 96000])
@pytest.mark.parametrize("channels", [1, 2, 6])
def test_a_tone_keeps_its_pitch_and_level_from_any_rate_and_channels(rate_hz, channels, tmp_path):
    soundfile.write(tmp_path / "x.wav", np.tile(tone(rate_hz, 1.0)[:, None], channels), rate_hz)
    assert_is_the_tone(DATA.read(tmp_path / "x.wav"))


def test_channels_are_averaged(tmp_path):
    left = tone(44100, 1.0)
    soundfile.write(tmp_path / "x.wav", np.stack([left, np.zeros_like(left)], axis=1), 44100)
    assert_is_the_tone(DATA.read(tmp_path / "x.wav"), amplitude=0.25)


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "MS_ADPCM"])
def test_a_tone_keeps_its_level_in_every_encoding_of_a_wav(subtype, tmp_path):
    soundfile.write(tmp_path / "x.wav", tone(8000, 1.0), 8000, subtype=subtype)
    assert_is_the_tone(DATA.read(tmp_path / "x.wav"))


@pytest.mark.parametrize("suffix", sorted(SUFFIXES))
def test_every_suffix_that_is_promised_can_be_read(suffix, tmp_path):
    formats = {".aif": "AIFF", ".opus": "OGG"}
    subtype = "OPUS" if suffix == ".opus" else None
    path = tmp_path / f"x{suffix}"
    soundfile.write(path, tone(48000, 1.0), 48000, subtype=subtype, format=formats.get(suffix))
    assert_is_the_tone(DATA.read(path))


def test_an_mp3_read_in_parts_has_the_samples_of_the_whole(tmp_path):
    """Its frames share bits with those before: after a seek they would be silent for some tens of milliseconds."""
    time = torch.arange(6 * 48_000) / 48_000
    chirp = (0.6 * torch.sin(2 * torch.pi * (200 + 400 * time) * time) * (time % 0.7 < 0.5)).numpy()
    soundfile.write(tmp_path / "x.mp3", chirp, 48_000, format="MP3")
    once = torch.from_numpy(soundfile.read(tmp_path / "x.mp3", dtype="float32")[0])
    whole, rate_hz = read_sound(tmp_path / "x.mp3")
    part, _ = read_sound(tmp_path / "x.mp3", 2.6, 4.7)
    torch.testing.assert_close(whole, once, atol=1e-5, rtol=0)
    torch.testing.assert_close(part, once[round(2.6 * rate_hz) : round(4.7 * rate_hz)], atol=1e-5, rtol=0)
    for start in (0.0, 1.0, 4.0, 2.0):  # from one handle
        part_in_order, _, damage = read_until_break(tmp_path / "x.mp3", start, start + 1.5, in_order=True)
        expected = once[round(start * rate_hz) : round((start + 1.5) * rate_hz)]
        torch.testing.assert_close(part_in_order, expected, atol=1e-5, rtol=0)
        assert damage is None and sound_files._last.key is not None
    soundfile.write(tmp_path / "x.mp3", chirp[::-1].copy(), 48_000, format="MP3")
    other, *_ = read_until_break(tmp_path / "x.mp3", 2.0, 3.5, in_order=True)
    assert (other - part_in_order).abs().max() > 0.1  # the file is another one
    _, clip = clip_of(tmp_path / "x.mp3", 2.6, 4.7)
    expected, _ = read_sound(tmp_path / "x.mp3", 2.6, 4.7)
    assert torch.equal(torch.from_numpy(soundfile.read(io.BytesIO(clip), dtype="float32")[0]), expected)


def write_in_c(text: str) -> None:
    libc = ctypes.CDLL(None)
    libc.fputs(text.encode(), ctypes.c_void_p.in_dll(libc, "stderr"))


def bursts() -> np.ndarray:
    time = np.arange(16_000 * 10) / 16_000
    return 0.6 * np.sin(2 * np.pi * (200 + 40 * time) * time) * (time % 0.7 < 0.5)


@pytest.mark.parametrize("name", ["x.mp3", "an mp3.wav"])
def test_what_libmpg123_says_is_left_out_and_nothing_else_is(name, tmp_path, capfd):
    path = tmp_path / name
    soundfile.write(path, bursts(), 16_000, format="MP3")
    file = soundfile.SoundFile(path)
    for start in range(9):
        file.seek(16_000 * start + 1000)
        file.read(1000)
    assert "libmpg123" in capfd.readouterr().err  # without the help of sound_files
    with sound_files.opened(path):
        os.write(2, b"a line of another\n")
        subprocess.run(["sh", "-c", "echo of another process >&2"], check=True)
        assert capfd.readouterr().err == "a line of another\nof another process\n"  # at once, not when the file is read
        for start in range(9):
            read_until_break(path, start, start + 0.5, in_order=start % 2 == 0)
        write_in_c("another library\n")
    assert capfd.readouterr().err == f"{path}: another library\n"
    content = path.read_bytes()
    path.write_bytes(content[:4000] + b"\xff\xfb\0\0garbage" * 30 + content[4000:])
    with suppress(DataError):
        read_sound(path)
    assert capfd.readouterr().err == ""
    write_in_c("afterwards\n")
    assert capfd.readouterr().err == "afterwards\n"
    with pytest.raises(DataError, match="no such file"):
        read_sound(tmp_path / "y.mp3")
    os.write(2, b"after an error\n")
    assert capfd.readouterr().err == "after an error\n"


def test_a_process_that_is_forked_while_a_file_is_read_has_its_own_standard_error(tmp_path, capfd):
    soundfile.write(tmp_path / "x.mp3", bursts(), 16_000, format="MP3")
    with sound_files.opened(tmp_path / "x.mp3"):
        child = os.fork()
        if not child:
            write_in_c("of the child\n")
            os._exit(0)
        os.waitpid(child, 0)
        assert capfd.readouterr().err == "of the child\n"


def test_an_mp3_is_read_where_the_standard_error_is_closed(tmp_path, capfd):
    soundfile.write(tmp_path / "x.mp3", np.zeros(48_000), 48_000, format="MP3")
    stderr = os.dup(2)
    os.close(2)
    try:
        heard, _ = read_sound(tmp_path / "x.mp3", 0.5)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
    assert len(heard) == 24_000


@pytest.mark.parametrize("rate_hz", [88_201, 700_000])
def test_a_part_at_a_rate_that_flac_lacks_keeps_its_samples(rate_hz, tmp_path):
    soundfile.write(tmp_path / "x.wav", np.linspace(-0.5, 0.5, 9000), rate_hz, "PCM_16")
    suffix, clip = clip_of(tmp_path / "x.wav", 0.001, 0.01)
    samples, rate = soundfile.read(io.BytesIO(clip), dtype="float32")
    assert (suffix, rate) == (".wav", rate_hz)
    assert np.array_equal(samples, read_sound(tmp_path / "x.wav", 0.001, 0.01)[0].numpy())


def test_an_encoding_without_a_seek_trains_like_others(tmp_path):
    for name in "ab":
        for number in range(4):
            path = tmp_path / name / f"{number}.wav"
            path.parent.mkdir(exist_ok=True)
            coding = "GSM610" if (name, number) == ("a", 0) else "PCM_16"
            soundfile.write(path, np.random.default_rng([ord(name), number]).normal(0, 0.1, 4000), 8000, coding)
    data = AudioFolder(str(tmp_path))
    data.setup()
    assert data.bad_files() == {} and sum(map(len, data.splits().values())) == 8


def test_recordings_of_more_than_192_khz_are_refused_with_a_length_given_too(tmp_path):
    for number, name in enumerate(("a/0", "a/1", "b/0", "b/1")):
        noise(tmp_path / f"{name}.wav", 384_000, 0.05 + 0.001 * number)
    for options in ({}, {"seconds": 0.02}):
        with pytest.raises(ArgumentError, match="sample_rate_hz must be in 1000..192000"):
            AudioFolder(str(tmp_path), **options).setup()


@pytest.mark.needs("codecs")
def test_of_a_phones_recording_a_part_is_decoded_alone(tmp_path, monkeypatch):
    """AAC, which soundfile cannot read."""
    from torchcodec.decoders import AudioDecoder
    from torchcodec.encoders import AudioEncoder

    pitches = np.repeat([300.0, 600.0, 900.0, 1200.0], 16_000 * 5)
    sound = torch.from_numpy(0.4 * np.sin(2 * np.pi * np.cumsum(pitches) / 16_000)).float()
    AudioEncoder(sound.repeat(2, 1), sample_rate=16_000).to_file(str(tmp_path / "a.m4a"))
    monkeypatch.setattr(AudioDecoder, "get_all_samples", None)
    assert seconds_of(tmp_path / "a.m4a") == pytest.approx(20, abs=0.1)
    whole, rate_hz = read_sound(tmp_path / "a.m4a")
    assert rate_hz == 16_000 and abs(len(whole) - 320_000) < 2_000
    for start, end in ((0.0, 1.0), (12.5, 13.5), (6.0, 7.25), (19.0, 20.0)):
        part, _ = read_sound(tmp_path / "a.m4a", start, end)
        assert torch.equal(part, whole[round(16_000 * start) : round(16_000 * end)])
    spectrum = torch.fft.rfft(read_sound(tmp_path / "a.m4a", 11.0, 12.0)[0]).abs()
    assert int(spectrum.argmax()) == pytest.approx(900, abs=1)  # Hz, of a second
    (tmp_path / "broken.m4a").write_bytes((tmp_path / "a.m4a").read_bytes()[:2000])
    with pytest.raises(DataError, match=r"broken\.m4a: \.m4a needs torchcodec and FFmpeg, which are not"):
        read_sound(tmp_path / "broken.m4a")


def test_a_long_sound_is_cut_to_its_middle(tmp_path):
    silence = np.zeros(8000)
    soundfile.write(tmp_path / "x.wav", np.concatenate([silence, np.full(2000, 0.5), silence]), 8000)
    waveform = DATA.read(tmp_path / "x.wav")
    assert (waveform[1001:2999] - 0.5).abs().max() < 1e-4
    assert waveform[:1000].abs().max() == waveform[3000:].abs().max() == 0


def test_a_short_sound_keeps_its_length_and_a_batch_has_zeros_behind_it(tmp_path):
    soundfile.write(tmp_path / "short.wav", np.full(1500, 0.25), 8000)
    soundfile.write(tmp_path / "long.wav", np.full(9000, 0.25), 8000)
    data = FSDD("nowhere", seconds=0.5, batch_size=2)
    data.predict_parts = [(str(tmp_path / name), 0.0, None) for name in ("short.wav", "long.wav")]
    (batch,) = data.predict_dataloader()
    assert batch["lengths"].tolist() == [1500, 4000]
    assert batch["waveforms"].shape == (2, 4000)
    assert (batch["waveforms"][0, :1500] - 0.25).abs().max() < 1e-4
    assert not batch["waveforms"][0, 1500:].any()


def test_a_batch_is_as_long_as_its_longest_clip_and_a_subset_keeps_lengths():
    clips = Clips([torch.zeros(length) for length in (40, 100, 70)], torch.tensor([0, 1, 2]))
    inputs, labels = clips.__getitems__([0, 2])
    assert inputs["waveforms"].shape == (2, 70)
    assert (inputs["lengths"].tolist(), labels.tolist()) == ([40, 70], [0, 2])
    assert clips.subset(torch.tensor([2, 0])).lengths.tolist() == [70, 40]
    assert clips[1][0].shape == (100,)


def test_the_longest_batch_is_of_the_longest_clips():
    data = FSDD("nowhere", batch_size=3)
    lengths = [5, 9, 2, 7, 1, 8]
    data.train_set = Clips([torch.full((n,), n / 10) for n in lengths], torch.arange(6))
    inputs, labels = data.longest_batch()
    assert inputs["lengths"].tolist() == [9, 8, 7] and labels.tolist() == [1, 5, 3]


def loud_tone(path, amplitude=3.9):
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, tone(16_000, 1.0, amplitude), 16_000, subtype="FLOAT")


def third_harmonic(waveform: torch.Tensor) -> float:
    """Of a second of the tone, as a share of its fundamental."""
    spectrum = torch.fft.rfft(waveform.double()).abs()
    assert spectrum.argmax() == TONE_HZ
    return float(spectrum[3 * round(TONE_HZ)] / spectrum.max())


def test_a_tone_above_full_scale_is_heard_without_distortion_from_files_parts_and_shards(tmp_path):
    """Clipped at 1, a sine of amplitude 3.9 has a third harmonic of 30 %."""
    paths = [tmp_path / "data" / name / f"{number}.wav" for name in "ab" for number in range(4)]
    for number, path in enumerate(paths):
        loud_tone(path, 3.9 + number / 1000)
    data = AudioFolder(str(tmp_path / "data"), sample_rate_hz=8000, seconds=1.0)
    data.setup()
    data.write_shards(tmp_path / "shards", 100)
    shards = AudioShards(str(tmp_path / "shards"), sample_rate_hz=8000, seconds=1.0)
    shards.setup()
    part = data.parts(str(paths[0]), 1.0)[0]
    heard = [data.read(paths[0]), data.read_part(part), data.train_set.inputs[0], shards.train_set.inputs[0]]
    for waveform in (*heard, Gain(1.0)(heard[0])):
        assert waveform.abs().max() > 3 and third_harmonic(waveform) < 1e-3
    clipped = heard[0].clamp(-1, 1)
    assert third_harmonic(clipped) > 0.25


def test_check_says_how_many_files_exceed_full_scale_and_the_largest_peak(command, tmp_path):
    for number, amplitude in enumerate([0.5, 3.9, 1.5, 0.9] + [0.7] * 6):
        loud_tone(tmp_path / "ab"[number % 2] / f"{number}.wav", amplitude + number / 1000)
    said = "2 files of 10 have peaks above full scale 1, the largest 3.9 in b/1.wav; the values are kept as they are"
    done = command("check", "--data", "AudioFolder", "--data.root", tmp_path)
    assert done.err == f"{tmp_path}: {said}\n"
    for name in ("b/1.wav", "a/2.wav"):
        (tmp_path / name).unlink()
    assert command("check", "--data", "AudioFolder", "--data.root", tmp_path).err == ""


def test_rates_without_a_common_divisor_take_no_gigabytes():
    assert len(change_rate(torch.zeros(44_101), 44_101, 16_000)) == pytest.approx(16_000, abs=1)
    assert len(change_rate(torch.zeros(44_100), 44_100, 16_001)) == pytest.approx(16_001, abs=1)


@pytest.mark.parametrize("rate_hz", [7997, 8001, 15_995])
def test_what_is_late_in_a_long_recording_stays_there_at_any_rate(rate_hz):
    """A tone in the last of twenty minutes."""
    waveform = torch.zeros(1200 * rate_hz)
    waveform[1150 * rate_hz : 1151 * rate_hz] = (torch.arange(rate_hz) * 2 * torch.pi * 400 / rate_hz).sin()
    heard = change_rate(waveform, rate_hz, 8000)
    places = (heard.abs() > 0.1).nonzero() / 8000
    assert len(heard) == pytest.approx(1200 * 8000, abs=80)
    assert (float(places[0]), float(places[-1])) == pytest.approx((1150.0, 1151.0), abs=0.012)


def wav(frames: bytes, rate_hz: int = 8000) -> bytes:
    chunks = b"WAVEfmt \x10\0\0\0\x01\0\x01\0" + rate_hz.to_bytes(4, "little") + (2 * rate_hz).to_bytes(4, "little")
    chunks += b"\x02\0\x10\0data" + len(frames).to_bytes(4, "little") + frames
    return b"RIFF" + len(chunks).to_bytes(4, "little") + chunks


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("x.wav", b"", "not a readable sound"),
        ("x.wav", b"these are letters", "not a readable sound"),
        ("x.mp3", b"these are letters", "not a readable sound"),
        ("x.raw", bytes(1000), "not a readable sound"),
        ("x.wav", wav(b""), "holds no sound"),
        ("x.wav", wav(bytes(100), rate_hz=3), "says 3 samples a second"),
        ("x.wav", wav(bytes(100), rate_hz=1_000_000_000), "says 1000000000 samples a second"),
    ],
)
def test_a_broken_sound_is_named_on_one_line(name, content, what, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        DATA.read(path)
    assert str(error.value).startswith(f"{path}: {what}")
    assert ";" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_sound_with_values_that_are_not_finite_is_refused(tmp_path):
    soundfile.write(tmp_path / "x.wav", np.array([0.0, np.nan, 0.0] * 1000), 8000, subtype="FLOAT")
    with pytest.raises(DataError, match=r"x\.wav: holds values that are not finite"):
        DATA.read(tmp_path / "x.wav")


def test_a_server_says_once_of_each_broken_file_what_is_wrong_and_remembers_only_the_last_ones(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(audio, "_REMEMBERED", 3)
    data = FSDD("nowhere", seconds=0.5, sample_rate_hz=8000)
    soundfile.write(tmp_path / "whole.wav", tone(8000, 0.4), 8000)
    content = (tmp_path / "whole.wav").read_bytes()
    for number in range(9):
        (tmp_path / f"{number}.wav").write_bytes(content[: len(content) // 2])
        data.parts(str(tmp_path / f"{number}.wav"))
        data.parts(str(tmp_path / f"{number}.wav"))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 9 and all(f"/{number}.wav: cut off, " in line for number, line in enumerate(said))
    assert [path[-5:] for path in data._broken] == ["6.wav", "7.wav", "8.wav"]


def test_an_absent_sound_is_named():
    with pytest.raises(DataError, match=r"^no/such\.wav: no such file; "):
        DATA.read("no/such.wav")


def test_fsdd_has_the_documented_counts_and_the_official_split(real_data):
    data = FSDD(str(real_data))
    data.setup()
    assert len(data.train_set) + len(data.val_set) == 2700  # 6 speakers x 10 digits x 45 takes; 5 more are the test
    assert data.test_set.labels.bincount().tolist() == [30] * 10
    assert data.val_set.labels.bincount().tolist() == [27] * 10
    recordings = real_data / "free-spoken-digit-dataset" / "recordings"
    found = {row.numpy().tobytes() for row in data.test_set.inputs}
    for name, is_test in (("7_jackson_0", True), ("7_jackson_4", True), ("7_jackson_5", False), ("3_theo_49", False)):
        samples, _ = soundfile.read(recordings / f"{name}.wav", dtype="float32")
        assert (samples.tobytes() in found) == is_test
    in_training = {row.numpy().tobytes() for part in (data.train_set, data.val_set) for row in part.inputs}
    assert not found & in_training


def test_speakers_of_the_test_and_the_validation_are_heard_nowhere_else(real_data):
    data = FSDD(str(real_data), test_speakers=["theo"], val_speakers=["lucas"])
    data.setup()
    heard = {split: {name.split("_")[-2] for name in samples.names} for split, samples in data.splits().items()}
    assert heard["test"] == {"theo"} and heard["val"] == {"lucas"}
    assert heard["train"] == {"george", "jackson", "nicolas", "yweweler"}
    assert [len(samples) for samples in data.splits().values()] == [2000, 500, 500]
    alone = FSDD(str(real_data), test_speakers=["theo"])
    alone.setup()
    assert len(alone.val_set) == 250 and not any("theo" in name for name in alone.val_set.names)
    with pytest.raises(DataError, match="no recordings of the speaker nobody; it has george"):
        FSDD(str(real_data), test_speakers=["nobody"]).setup()
    with pytest.raises(ValueError, match="val_speakers must be others than test_speakers, got 'theo'"):
        FSDD(str(real_data), test_speakers=["theo"], val_speakers=["theo"])


def test_fsdd_is_found_from_the_parent_the_folder_and_the_recordings(tmp_path):
    recordings = tmp_path / "free-spoken-digit-dataset" / "recordings"
    recordings.mkdir(parents=True)
    for digit in range(10):
        for index in (0, 4, 5, 6, 7, 31):
            soundfile.write(recordings / f"{digit}_nobody_{index}.wav", np.full(99, (digit * 40 + index) / 500), 8000)
    (recordings / "._0_nobody_0.wav").write_bytes(b"what a Mac leaves behind")
    for root in (tmp_path, recordings.parent, recordings):
        data = FSDD(str(root), seconds=0.01)
        data.setup()
        assert (len(data.train_set), len(data.val_set), len(data.test_set)) == (30, 10, 20)
        assert torch.allclose(
            torch.stack(data.test_set.inputs)[:, 0],
            (data.test_set.labels * 40 + torch.tensor([0, 4] * 10)) / 500,
            atol=1e-4,
        )


def test_an_absent_fsdd_says_what_goes_where(tmp_path):
    with pytest.raises(DataError, match=r": no recordings named DIGIT_SPEAKER_INDEX\.wav; get https://.* root"):
        FSDD(str(tmp_path)).setup()
    with pytest.raises(DataError, match=r"absent: no such folder; set data.root"):
        FSDD(str(tmp_path / "absent")).setup()


def test_an_fsdd_that_was_half_unpacked_is_refused(tmp_path):
    for digit in range(7):
        for index in range(10):
            soundfile.write(tmp_path / f"{digit}_nobody_{index}.wav", np.zeros(99), 8000)
    with pytest.raises(DataError, match="no training recording of digit 7; "):
        FSDD(str(tmp_path)).setup()


def test_a_broken_recording_of_fsdd_is_named(tmp_path):
    for digit in range(10):
        for index in (1, 9):
            soundfile.write(tmp_path / f"{digit}_nobody_{index}.wav", np.zeros(99), 8000)
    shutil.copy(__file__, tmp_path / "4_nobody_9.wav")
    with pytest.raises(DataError, match=r"4_nobody_9\.wav: not a readable sound"):
        FSDD(str(tmp_path)).setup()
