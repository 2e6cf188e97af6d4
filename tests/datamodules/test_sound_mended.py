"""Sound files whose length libsndfile gets wrong, or of which it finds no part."""

import io
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from datamodules import AudioFolder, DataError
from datamodules.decoding import _sound_mended as sound_mended
from datamodules.decoding.packed import Packed
from datamodules.decoding.sound_files import examine_sound, read_sound, read_until_break, seconds_of

RATE = 16_000


def sweep(seconds: float, hertz: float = 200.0, seed: int = 0) -> np.ndarray:
    """A rising tone with a little noise, so that no two places sound the same."""
    time = np.arange(round(RATE * seconds)) / RATE
    noise = np.random.default_rng(seed).normal(0, 0.01, len(time))
    return 0.4 * np.sin(2 * np.pi * (hertz + 150 * time) * time) + noise


def encoded(sound: np.ndarray, format: str, subtype: str | None = None, **options) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, sound, RATE, subtype, format=format, **options)
    return file.getvalue()


def variable_mp3(sound: np.ndarray) -> bytes:
    """An MP3 of a variable rate, without the frame that says how many there are."""
    content = encoded(sound, "MP3", bitrate_mode="VARIABLE", compression_level=0.5)
    return content[content.index(content[:2], 150) :]


def once(content: bytes) -> np.ndarray:
    """What soundfile reads of a file in one go."""
    return soundfile.read(io.BytesIO(content), dtype="float32")[0]


def without_length(flac: bytes) -> bytes:
    return flac[:21] + bytes([flac[21] & 0xF0]) + bytes(4) + flac[26:]


def of_zero_bytes(wav: bytes) -> bytes:
    """What a recorder leaves that stopped before it wrote the sizes into the header."""
    at = wav.index(b"data")
    return wav[:4] + bytes(4) + wav[8 : at + 4] + bytes(4) + wav[at + 8 :]


LOUD, QUIET = sweep(2.5, 900, 1), 0.002 * sweep(4.5)
FLAC, WAV = encoded(sweep(6), "FLAC", "PCM_24"), encoded(sweep(6), "WAV", "PCM_16")
MP3S = [encoded(sweep(3), "MP3"), encoded(sweep(3.2, 700, 1), "MP3")]
OGGS = [encoded(sweep(3), "OGG"), encoded(sweep(3.2, 700, 1), "OGG")]
OPUSES = [encoded(sweep(3), "OGG", "OPUS"), encoded(sweep(3.2, 700, 1), "OGG", "OPUS")]
CASES: dict[str, Callable[[], tuple[bytes, np.ndarray]]] = {  # a file, and what it holds
    "unknown length.flac": lambda: (without_length(FLAC), once(FLAC)),
    "size 0.wav": lambda: (of_zero_bytes(WAV), once(WAV)),
    "chained.ogg": lambda: (b"".join(OGGS), np.concatenate([*map(once, OGGS)])),
    "the same twice.ogg": lambda: (2 * OGGS[0], np.concatenate(2 * [once(OGGS[0])])),
    "chained.opus": lambda: (b"".join(OPUSES), np.concatenate([*map(once, OPUSES)])),
    "joined.mp3": lambda: (b"".join(MP3S), np.concatenate([*map(once, MP3S)])),
    "with a picture between.mp3": lambda: (
        MP3S[0] + b"ID3\x03\0\0\0\x02\x4e\x20" + b"\xff\xfb" * 20_000 + MP3S[1],
        np.concatenate([*map(once, MP3S)]),
    ),
    "gsm.wav": lambda: (content := encoded(sweep(6), "WAV", "GSM610"), once(content)),
    "g721.wav": lambda: (content := encoded(sweep(6), "WAV", "G721_32"), once(content)),
    "nms.wav": lambda: (content := encoded(sweep(6), "WAV", "NMS_ADPCM_16"), once(content)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_sample_is_read_and_a_part_is_that_part_of_the_whole(name, tmp_path):
    content, expected = CASES[name]()
    path = tmp_path / name
    path.write_bytes(content)
    assert examine_sound(path)["frames"] == len(expected)
    assert seconds_of(path) == len(expected) / RATE
    assert_parts_are_those_of(expected, path)
    whole, _ = read_sound(Packed(f"train-0.tar/{name}", content))
    assert np.abs(whole.numpy() - expected).max() < 1e-6


def assert_parts_are_those_of(whole: np.ndarray, path: Path) -> None:
    error = 1e-4 if path.suffix == ".opus" else 1e-6  # an Opus decoder forgets what it read before by and by
    read, rate_hz = read_sound(path)
    assert rate_hz == RATE and read.shape == whole.shape
    assert np.abs(read.numpy() - whole).max() < 1e-6
    for start, end in ((4.2, 5.3), (0.0, 0.7), (2.9, 3.1), (2.5, 4.0), (1.3, 2.2), (3.01, 3.02), (5.5, None)):
        expected = whole[round(start * RATE) : None if end is None else round(end * RATE)]
        for in_order in (False, True):
            part, _, damage = read_until_break(path, start, end, in_order)
            assert damage is None and len(part) == len(expected), (start, end)
            assert np.abs(part.numpy() - expected).max() < error, (start, end)


@pytest.mark.parametrize("sounds", [(LOUD, QUIET), (QUIET, LOUD)], ids=["loud then quiet", "quiet then loud"])
def test_an_mp3_without_a_header_is_as_long_as_what_is_in_it(sounds, tmp_path):
    """libsndfile takes all frames to be as large as the first one."""
    sound = np.concatenate(sounds)
    whole = encoded(sound, "MP3", bitrate_mode="VARIABLE", compression_level=0.5)
    (tmp_path / "x.mp3").write_bytes(variable_mp3(sound))
    guessed = soundfile.info(tmp_path / "x.mp3").frames
    assert abs(guessed - len(sound)) > RATE
    read, _ = read_sound(tmp_path / "x.mp3")
    begin = 576 + 529  # the encoder's delay and the decoder's, which the header lets leave out
    assert len(sound) + begin <= len(read) <= len(sound) + begin + 2 * 1152
    assert np.abs(read.numpy()[begin:][: len(sound)] - once(whole)).max() < 1e-6
    assert_parts_are_those_of(read.numpy(), tmp_path / "x.mp3")


@pytest.mark.needs("ffmpeg")
@pytest.mark.parametrize("name", ["variable", "constant", "joined", "layer 2"])
def test_an_mp3_without_a_header_holds_what_ffmpeg_decodes(name, tmp_path):
    contents = {
        "variable": lambda: variable_mp3(np.concatenate([QUIET, LOUD])),
        "constant": lambda: (whole := encoded(sweep(5), "MP3", bitrate_mode="CONSTANT"))[whole.index(whole[:2], 99) :],
        "joined": lambda: variable_mp3(np.concatenate([LOUD, QUIET])) + variable_mp3(sweep(2)),
        "layer 2": lambda: by_ffmpeg("-f", "wav", "-i", "-", "-f", "mp2", "-", given=encoded(sweep(5), "WAV")),
    }  # fmt: skip
    path = tmp_path / "x.mp3"
    path.write_bytes(contents[name]())
    decoded = np.frombuffer(by_ffmpeg("-i", path, "-f", "f32le", "-"), np.float32)
    assert len(decoded) > 5 * RATE
    assert_parts_are_like(decoded, path)


def by_ffmpeg(*flags: object, given: bytes = b"") -> bytes:
    done = subprocess.run(["ffmpeg", "-v", "error", *map(str, flags)], input=given, capture_output=True, check=True)
    return done.stdout


def assert_parts_are_like(decoded: np.ndarray, path: Path) -> None:
    """As another decoder has them, whose rounding is its own."""
    read, _ = read_sound(path)
    assert len(read) == len(decoded)
    for start in (0.0, 1.7, 3.3, 4.1):
        part, *_ = read_until_break(path, start, start + 0.6, in_order=True)
        expected = decoded[round(start * RATE) : round((start + 0.6) * RATE)]
        assert np.abs(part.numpy() - expected).max() < 1e-4


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
@pytest.mark.parametrize(("level", "seconds"), [(1.0, 5.0), (0.0, 10.3)], ids=["sound", "silence with long pages"])
def test_a_part_of_an_ogg_file_is_that_part_of_the_whole_up_to_its_end(subtype, level, seconds, tmp_path):
    """libsndfile finds other samples of Vorbis after a seek into the last page, which may last many seconds."""
    sound = level * sweep(seconds)
    sound[-RATE // 2 :] = sweep(0.5, 900)
    (tmp_path / "x.ogg").write_bytes(encoded(sound, "OGG", subtype))
    whole = once((tmp_path / "x.ogg").read_bytes())
    for start in (0.0, 2.3, seconds - 0.6, seconds - 0.3, seconds - 0.1):
        for in_order in (False, True):
            part, *_ = read_until_break(tmp_path / "x.ogg", start, start + 0.25, in_order)
            expected = whole[round(start * RATE) : round((start + 0.25) * RATE)]
            assert np.abs(part.numpy() - expected).max() < 1e-4, (start, in_order)


def test_sounds_of_two_rates_in_one_file_are_refused_on_one_line(tmp_path):
    other = io.BytesIO()
    soundfile.write(other, sweep(1), 44_100, format="OGG")
    (tmp_path / "x.ogg").write_bytes(OGGS[0] + other.getvalue())
    for read in (examine_sound, read_sound, seconds_of):
        with pytest.raises(DataError, match="x.ogg: sounds follow each other, one of 16000 samples a second and 1 "):
            read(tmp_path / "x.ogg")


def test_a_flac_of_unknown_length_is_heard_in_windows(tmp_path):
    (tmp_path / "x.flac").write_bytes(without_length(FLAC))
    data = AudioFolder(str(tmp_path), sample_rate_hz=RATE, seconds=1.0)
    parts = data.parts(str(tmp_path / "x.flac"), 1.0, 0.5)
    assert [start for _, start, _ in parts] == pytest.approx(np.arange(11) / 2)
    heard = torch.stack([data.read_part(part) for part in parts])
    expected = torch.from_numpy(once(FLAC)).unfold(0, RATE, RATE // 2)
    torch.testing.assert_close(heard, expected, atol=1e-6, rtol=0)


def test_files_that_are_read_in_part_are_decoded_once_to_count_them_and_others_never(tmp_path, monkeypatch):
    usual = {"a.wav": WAV, "a.flac": FLAC, "a.mp3": MP3S[0], "a.ogg": OGGS[0], "a.opus": OPUSES[0]}
    odd = {name: CASES[name]()[0] for name in ("unknown length.flac", "chained.ogg", "joined.mp3")}
    odd["x.mp3"] = variable_mp3(LOUD)
    for name, content in {**usual, **odd}.items():
        (tmp_path / name).write_bytes(content)
    decoded = []
    count = sound_mended._blocks
    monkeypatch.setattr(sound_mended, "_blocks", lambda file: decoded.append(file) or count(file))
    for name in usual:
        read_sound(tmp_path / name, 0.1, 0.2)
    assert decoded == []
    for name in odd:
        read_sound(tmp_path / name, 0.1, 0.2)
    assert len(decoded) == 6  # two of them have two parts
    for name in odd:
        read_sound(tmp_path / name, 0.3, 0.4)
    assert len(decoded) == 6


def test_what_follows_an_mp3_and_is_no_sound_is_not_heard(tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, 50_000, np.uint8).tobytes()
    (tmp_path / "x.mp3").write_bytes(MP3S[0] + b"APETAGEX" + picture + b"TAG" + bytes(125))
    assert np.abs(read_sound(tmp_path / "x.mp3")[0].numpy() - once(MP3S[0])).max() < 1e-6


def test_a_wav_that_holds_nothing_but_notes_holds_no_sound(tmp_path):
    empty = encoded(np.zeros(0), "WAV", "PCM_16")
    (tmp_path / "x.wav").write_bytes(empty + b"LIST\x0e\0\0\0INFOICMT\x02\0\0\0a\0")
    with pytest.raises(DataError, match=r"x\.wav: holds no sound"):
        read_sound(tmp_path / "x.wav")
