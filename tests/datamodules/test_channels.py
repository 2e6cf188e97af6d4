"""Recordings with several channels: their mean, one of them, or all of them, from the file to the answer."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torchaudio.functional import resample

import longseq
from datamodules import AudioFolder, AudioShards, DataError, Gain, Noise, TimeShift
from datamodules.errors import ArgumentError
from longseq import Verma
from longseq.encoders import ASTEncoder, SpecAugment, SpectrogramEncoder, WaveformEncoder

RATE = 8000
FIT = ["fit", "--experiment", "sides", "--data", "AudioFolder", "--model.encoder"]
SMALL = ["--model.encoder.attention", "Verma", "--model.encoder.dim", "16", "--model.encoder.depth", "1",
         "--model.encoder.heads", "1", "--model.learning_rate", "1e-2", "--trainer.enable_progress_bar", "false",
         "--trainer.accelerator", "cpu", "--trainer.devices", "1"]  # fmt: skip
SPECTROGRAM = ["SpectrogramEncoder", "--model.encoder.num_mels", "16", *SMALL]
WAVEFORM = ["WaveformEncoder", "--model.encoder.patch_size", "16", *SMALL]


def tone(seed: int, seconds: float = 0.2) -> np.ndarray:
    time = np.arange(round(seconds * RATE)) / RATE
    noise = np.random.default_rng(seed).standard_normal(len(time))
    return 0.4 * np.sin(2 * np.pi * (500 + 20 * seed) * time) + 0.01 * noise


@pytest.fixture
def sides(tmp_path: Path) -> Path:
    """Two classes: the same tones, in the left channel and in the right one. Their means are alike."""
    for side, name in enumerate(("left", "right")):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(16):
            frames = np.zeros((round(0.2 * RATE), 2))
            frames[:, side] = tone(number)
            soundfile.write(tmp_path / "data" / name / f"{number:02}.wav", frames, RATE, "FLOAT")
    return tmp_path / "data"


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """Two classes of files with four channels of noise; all have 0.1 s."""
    generator = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "four" / name).mkdir(parents=True)
        for number in range(6):
            frames = generator.uniform(-0.5, 0.5, (800, 4))
            soundfile.write(tmp_path / "four" / name / f"{number}.wav", frames, RATE, "FLOAT")
    return tmp_path / "four"


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("rate_hz", [RATE, 5000])
@pytest.mark.parametrize(
    ("channels", "wanted"), [("mean", None), ("all", [0, 1, 2, 3]), (2, [1]), ([1, 3], [0, 2]), ([4, 1], [3, 0])]
)
def test_what_is_read_is_what_the_file_has(channels, wanted, rate_hz, in_memory, four) -> None:
    data = AudioFolder(str(four), channels=channels, sample_rate_hz=rate_hz, in_memory=in_memory, batch_size=4)
    data.setup("fit")
    for name, waveform in zip(data.train_set.names, data.train_set.inputs, strict=True):
        frames = torch.from_numpy(soundfile.read(four / name, dtype="float32")[0].T)
        expected = frames.mean(0) if wanted is None else frames[wanted]
        expected = resample(expected, RATE, rate_hz)
        torch.testing.assert_close(waveform, expected[0] if wanted == [1] else expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(data.read(four / name), waveform, atol=1e-6, rtol=0)
    inputs, _ = next(iter(data.train_dataloader()))
    number = 1 if wanted is None else len(wanted)
    assert data.num_channels == number
    assert inputs["waveforms"].shape == (4, *((number,) if number > 1 else ()), rate_hz // 10)
    assert tuple(data.shape) == inputs["waveforms"].shape[1:]
    assert data.inputs.shape == ((number, None) if number > 1 else (None,))


def test_the_mean_is_what_it_was_before_there_was_a_choice(four) -> None:
    plain, mean = AudioFolder(str(four)), AudioFolder(str(four), channels="mean", num_channels=1)
    for data in (plain, mean):
        data.setup("fit")
    assert plain.identity == mean.identity
    assert plain.settings_of_reading() == [RATE, 0.1]  # a new setting would change the digests of old trainings


@pytest.mark.parametrize("channels", [0, [], [1, 1], [0, 1], [1, -2]])
def test_channels_that_are_no_numbers_from_1_are_refused(channels) -> None:
    with pytest.raises(ArgumentError, match="channels must be mean, all, or numbers from 1"):
        AudioFolder("x", channels=channels)


def test_a_clip_of_channels_is_padded_and_cropped_in_time() -> None:
    generator = torch.Generator().manual_seed(0)
    clips = [torch.randn(3, length, generator=generator) for length in (50, 20, 31)]
    samples = AudioFolder("x", channels=[1, 2, 3], seconds=0.005, sample_rate_hz=RATE).samples_of(
        clips, torch.tensor([0, 1, 0])
    )
    assert samples.lengths is not None and samples.lengths.tolist() == [40, 20, 31]
    batch, _ = samples.__getitems__([0, 1, 2])
    assert batch["lengths"].tolist() == [40, 20, 31]
    assert torch.equal(batch["waveforms"][0], clips[0][:, 5:45])
    assert torch.equal(batch["waveforms"][1, :, :20], clips[1])
    assert not batch["waveforms"][1, :, 20:].any()


def test_a_file_with_other_channels_is_named_before_training_with_the_remedy(sides, command) -> None:
    soundfile.write(sides / "left" / "mono.wav", tone(1), RATE)
    line = "left/mono.wav: has one channel, and the data has 2; leave it out, or train with --data.channels mean"
    done = command("check", "--data", "AudioFolder", "--data.root", sides, "--data.channels", "all")
    assert done.code == 3
    assert line in done.out
    done = command(*FIT, *SPECTROGRAM, "--data.root", sides, "--data.channels", "all")
    assert done.code == 3
    assert line in done.err
    assert "Traceback" not in done.err
    done = command("check", "--data", "AudioFolder", "--data.root", sides, "--data.channels", "[1, 2]")
    assert "left/mono.wav: has one channel, and data.channels asks for channel 2; " in done.out
    data = AudioFolder(str(sides), channels="all", on_error="skip")
    data.setup("fit")
    assert sum(map(len, data.splits().values())) == 32
    AudioFolder(str(sides), channels=1).setup("fit")  # one channel is there


def test_what_averaging_loses_is_reported(sides, command) -> None:
    wave = tone(3)
    soundfile.write(sides / "left" / "same.wav", np.stack([wave, 0.9 * wave], 1), RATE)
    soundfile.write(sides / "right" / "opposite.wav", np.stack([wave, -wave], 1), RATE)
    done = command("check", "--data", "AudioFolder", "--data.root", sides)
    assert done.code == 0, done.err
    assert "32 files of 34 have channels that differ, such as left/00.wav; they are averaged" in done.err
    assert "; --data.channels all keeps them\n" in done.err
    assert "1 file of 34 has channels that cancel each other when they are averaged, such as right/opp" in done.err
    done = command("check", "--data", "AudioFolder", "--data.root", sides, "--data.channels", "all")
    assert "averaged" not in done.err


@pytest.mark.parametrize("encoder", [SPECTROGRAM, WAVEFORM], ids=["spectrogram", "waveform"])
def test_a_model_of_all_channels_tells_left_from_right_in_files_arrays_and_exports(
    encoder, sides, command, tmp_path
) -> None:
    done = command(*FIT, *encoder, "--data.root", sides, "--data.channels", "all", "--trainer.max_epochs", "12",
                   "--data.batch_size", "8")  # fmt: skip
    assert done.code == 0, done.err
    checkpoint = tmp_path / "runs/sides/0/best.ckpt"
    model = longseq.load(checkpoint)
    sides.rename(tmp_path / "moved")  # a prediction needs no data set
    assert model.model.encoder.channels == 2
    files = [str(tmp_path / "moved" / name / "03.wav") for name in ("left", "right")]
    arrays = [soundfile.read(path, dtype="float32")[0].T for path in files]
    of_files, of_arrays = model.predict(files), model.predict(arrays)
    assert [prediction.answers[0].class_name for prediction in of_files] == ["left", "right"]
    for one, other in zip(of_files, of_arrays, strict=True):
        torch.testing.assert_close(one.probabilities, other.probabilities)
    with pytest.raises(longseq.arguments.ArgumentError, match=r"must be \(2 channels, samples\), got \(1600,\)"):
        model.predict(arrays[0][0])
    soundfile.write(tmp_path / "mono.wav", tone(1), RATE)
    with pytest.raises(DataError, match=r"mono.wav: has one channel, and the data has 2; "):
        model.predict(str(tmp_path / "mono.wav"))
    done = command("predict", "--ckpt_path", checkpoint, "--input", files[0], "--events", "events.csv", "--window",
                   "0.1", "--picture", "heard.png")  # fmt: skip
    assert done.code == 0, done.err
    assert command("explain", "--ckpt_path", checkpoint, "--input", files[1]).code == 0
    done = command("export", "--ckpt_path", checkpoint, "--format", "torch", "--input", files[0])
    assert done.code == 0, done.err
    assert "float32 (batch, 2, samples)" in done.out


def test_shards_keep_the_channels_and_say_how_to_read_them(sides, command, tmp_path) -> None:
    done = command("shard", "--data", "AudioFolder", "--data.root", sides, "--data.channels", "all", "--out", "shards")
    assert done.code == 0, done.err
    assert "--data.channels all --data.num_channels 2" in done.out
    data = AudioShards("shards", channels="all", num_channels=2)
    data.setup("fit")
    own = AudioFolder(str(sides), channels="all")
    own.setup("fit")
    stems = {name.replace("/", "").removesuffix(".wav"): waveform
             for name, waveform in zip(own.train_set.names, own.train_set.inputs, strict=True)}  # fmt: skip
    for name, waveform in zip(data.train_set.names, data.train_set.inputs, strict=True):
        stem = name.partition(".tar/")[2].replace("/", "").removesuffix(".wav")
        assert torch.equal(waveform, stems[stem])
    with pytest.raises(DataError, match="has 2 channels, and the data has 4"):
        AudioShards("shards", channels="all", num_channels=4).setup("fit")
    with pytest.raises(DataError, match="give --data.num_channels"):
        AudioShards("shards", channels="all").setup("fit")


def test_an_encoder_without_channels_refuses_them_in_one_line(sides, command) -> None:
    done = command(*FIT, "ASTEncoder", *SMALL, "--data.root", sides, "--data.channels", "all")
    assert done.code == 2, done.err
    assert "channels must have 1 for ASTEncoder, got inputs of (2, 1600); choose them" in done.err.replace(": ", " ")
    assert ASTEncoder.channels == 1


def test_changes_of_a_sound_keep_the_relation_of_its_channels() -> None:
    torch.manual_seed(0)
    sound = torch.randn(2, 4000)
    sound[1] *= 0.01
    louder = Gain(6)(sound)
    torch.testing.assert_close(louder / sound, (louder / sound)[0, 0].expand(2, 4000))
    shifted = TimeShift(0.5)(sound)
    shift = next(shift for shift in range(-2000, 2001) if torch.equal(sound[0].roll(shift), shifted[0]))
    assert torch.equal(sound[1].roll(shift), shifted[1])
    added = Noise((20, 20), probability=1.0)(sound) - sound
    ratios = sound.square().mean(1) / added.square().mean(1)
    torch.testing.assert_close(10 * ratios.log10(), torch.tensor([20.0, 20.0]), atol=0.3, rtol=0)
    assert abs(float(torch.corrcoef(added)[0, 1])) < 0.1


def test_the_front_end_treats_each_channel_as_alone() -> None:
    torch.manual_seed(0)
    clips = {"waveforms": torch.randn(2, 3, 2000), "lengths": torch.tensor([2000, 900])}
    options = {"sample_rate_hz": RATE, "seconds": 0.25, "attention": Verma(), "dim": 16, "depth": 1, "heads": 2}
    for subtract_mean in (None, "level", "bands"):
        small = {**options, "num_mels": 16, "subtract_mean": subtract_mean}
        all_three, one = SpectrogramEncoder(channels=3, **small), SpectrogramEncoder(**small)
        picture = all_three.front_end(clips)
        for channel in range(3):
            alone = one.front_end({**clips, "waveforms": clips["waveforms"][:, channel]})
            torch.testing.assert_close(picture[:, channel : channel + 1], alone)
    encoder = WaveformEncoder(channels=3, patch_size=4, **options)
    encoder.measure([clips])
    for channel in range(3):
        own = torch.cat([clips["waveforms"][0, channel], clips["waveforms"][1, channel, :900]])
        assert float(encoder.mean[channel, 0, 0]) == pytest.approx(float(own.mean()), abs=1e-6)
        assert float(encoder.std[channel, 0, 0]) == pytest.approx(float(own.std(correction=0)), rel=1e-5)


def test_spec_augment_hides_the_same_of_all_channels() -> None:
    torch.manual_seed(0)
    hidden = SpecAugment(2, 8, 2, 20, 0.5)(torch.ones(5, 3, 60, 16)) == 0
    assert torch.equal(hidden, hidden[:, :1].expand(-1, 3, -1, -1))
    assert len({tuple(sample.flatten().tolist()) for sample in hidden}) == 5
