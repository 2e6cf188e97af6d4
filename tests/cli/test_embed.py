"""The command embed: each file's tokens are what the network gives, written once and whole."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_networks import Small, exported, onnx_of_images, onnx_of_sounds, tflite_of_sounds

import longseq
from longseq.deploy.trained import Trained
from longseq.files.storage import CheckpointError


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    """Three sounds of 1000 Hz, of 20, 3 and 8 samples."""
    for name, length in (("a/one.wav", 20), ("a/b/two.wav", 3), ("three.wav", 8)):
        path = tmp_path / "sounds" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, np.random.default_rng(length).uniform(-1, 1, length), 1000, "FLOAT")
    return tmp_path / "sounds"


def windows(path: Path) -> np.ndarray:
    sound = soundfile.read(path, dtype="float32")[0]
    return np.pad(sound, (0, -len(sound) % 8)).reshape(-1, 8)


def test_every_file_has_its_tokens_times_and_a_note_of_what_they_are_of(command, sounds, tmp_path):
    weights = onnx_of_sounds(tmp_path / "m.onnx", rate_hz=1000)
    done = command("embed", "--network", "m.onnx", "--input", sounds, "--out", "features")
    assert (done.code, done.out) == (0, "embedded: 3 files, 5 tokens of 3 features, in features\n")
    for name, end in (("a/one", 0.020), ("a/b/two", 0.003), ("three", 0.008)):
        tensors = load_file(tmp_path / f"features/{name}.safetensors")
        parts = windows(sounds / f"{name}.wav")
        np.testing.assert_allclose(tensors["features"], np.maximum(parts @ weights, 0), atol=1e-6)
        starts = 0.008 * np.arange(len(parts))
        np.testing.assert_allclose(tensors["times"], np.stack([starts, np.minimum(starts + 0.008, end)], axis=1))
    with safe_open(tmp_path / "features/three.safetensors", "pt") as file:
        notes = file.metadata()
    import hashlib

    assert notes["source_sha256"] == hashlib.sha256((sounds / "three.wav").read_bytes()).hexdigest()
    assert notes["network_sha256"] == hashlib.sha256((tmp_path / "m.onnx").read_bytes()).hexdigest()
    assert float(notes["token_seconds"]) == 0.008


def test_only_what_is_missing_or_of_another_network_or_source_is_made(command, sounds, tmp_path):
    onnx_of_sounds(tmp_path / "m.onnx", rate_hz=1000)

    def written(*flags: str) -> str:
        return command("embed", "--network", "m.onnx", *flags, "--input", sounds, "--out", "features").out

    written()
    assert written().startswith("embedded: 0 files") and written().endswith("3 were there already\n")
    (tmp_path / "features/three.safetensors").unlink()
    assert written().startswith("embedded: 1 files, 1 tokens") and written().endswith("3 were there already\n")
    soundfile.write(sounds / "three.wav", np.zeros(30), 1000)
    assert written().startswith("embedded: 1 files, 4 tokens")
    assert written("--network.hop_seconds", "0.004").startswith("embedded: 3 files")


def test_the_suffix_of_a_file_chooses_the_class(command, sounds, tmp_path):
    tflite_of_sounds(tmp_path / "m.tflite")
    exported(tmp_path / "m.pt2", Small(), torch.randn(3, 8))
    for name, width in (("m.tflite", 3), ("m.pt2", 2)):
        flags = ["--network.rate_hz", "1000", "--input", sounds / "three.wav", "--out", name[2:]]
        assert command("embed", f"--network={name}", *flags).out.startswith(f"embedded: 1 files, 1 tokens of {width} f")
        assert command("embed", "--network", name, *flags).out.endswith("1 were there already\n")
        flags += ["--network.file", name]
        kind = {"m.tflite": "TFLite", "m.pt2": "Exported"}[name]
        assert command("embed", f"--network={kind}", *flags).out.endswith("1 were there already\n")


def test_a_recording_in_blocks_has_the_tokens_of_the_whole(command, sounds, tmp_path, monkeypatch):
    onnx_of_sounds(tmp_path / "m.onnx", rate_hz=1000)
    soundfile.write(sounds / "one.wav", np.random.default_rng(0).uniform(-1, 1, 1003), 1000, "FLOAT")
    flags = ["--network", "m.onnx", "--network.hop_seconds", "0.003", "--input", sounds / "one.wav"]
    command("embed", *flags, "--out", "whole")
    monkeypatch.setattr("datamodules.embedding._BLOCK_SECONDS", 0.05)
    command("embed", *flags, "--out", "blocks")
    whole, blocks = (load_file(tmp_path / name / "one.safetensors") for name in ("whole", "blocks"))
    assert len(whole["features"]) == 333
    for name in ("features", "times"):
        torch.testing.assert_close(blocks[name], whole[name], atol=1e-6, rtol=0)


def test_images_are_embedded_at_their_own_size_with_places(command, tmp_path):
    onnx_of_images(tmp_path / "m.onnx", value_range=[0, 255])
    pixels = np.random.default_rng(0).integers(0, 256, (8, 7, 3), np.uint8)
    (tmp_path / "images").mkdir()
    Image.fromarray(pixels).save(tmp_path / "images/one.png")
    assert command("embed", "--network", "m.onnx", "--input", "images", "--out", "features").code == 0
    tensors = load_file(tmp_path / "features/one.safetensors")
    corners = [(0, 0), (0, 1), (4, 0), (4, 1)]  # tiles of 4 x 6
    expected = [pixels[top : top + 4, left : left + 6].mean((0, 1)) for top, left in corners]
    np.testing.assert_allclose(tensors["features"], np.stack(expected), rtol=1e-6)
    np.testing.assert_allclose(tensors["coords"], [[left + 3, top + 2] for top, left in corners])


def test_files_whose_names_differ_in_the_suffix_alone_keep_both(command, sounds, tmp_path):
    onnx_of_sounds(tmp_path / "m.onnx", rate_hz=1000)
    soundfile.write(sounds / "three.flac", np.zeros(8), 1000)
    command("embed", "--network", "m.onnx", "--input", sounds, "--out", "features")
    names = {path.name for path in (tmp_path / "features").glob("*.safetensors")}
    assert names == {"three.wav.safetensors", "three.flac.safetensors"}


def test_a_broken_file_ends_the_command_or_is_left_out(command, sounds, tmp_path):
    onnx_of_sounds(tmp_path / "m.onnx", rate_hz=1000)
    (sounds / "broken.wav").write_bytes(b"RIFF")
    flags = ["embed", "--network", "m.onnx", "--input", sounds, "--out", "features"]
    done = command(*flags)
    assert done.code == 3 and "broken.wav" in done.error
    done = command(*flags, "--on_error", "skip")
    assert done.code == 0 and done.err.startswith("left out: ") and "broken.wav" in done.err
    assert len([*(tmp_path / "features").rglob("*.safetensors")]) == 3


def test_a_recording_of_which_nothing_can_be_read_is_left_out(command, sounds, tmp_path):
    onnx_of_sounds(tmp_path / "m.onnx", rate_hz=1000)
    soundfile.write(sounds / "nan.wav", np.full(20, np.nan), 1000, "FLOAT")
    done = command("embed", "--network", "m.onnx", "--input", sounds, "--out", "features", "--on_error", "skip")
    assert done.code == 0 and "left out: " in done.err and "nan.wav" in done.err
    assert len([*(tmp_path / "features").rglob("*.safetensors")]) == 3


def test_a_trained_model_gives_the_features_of_its_windows(command, checkpoint, recording, tmp_path):
    """The recording of 1.1 s has five windows of 0.2 s and one of 0.1 s."""
    out = command("embed", "--network", checkpoint, "--input", recording, "--out", "features").out
    assert out.startswith("embedded: 1 files, 6 tokens of ")
    tokens = load_file(tmp_path / "features/long.safetensors")["features"]
    model = longseq.load(checkpoint)
    waveform = model.data.read_part((str(recording), 0.0, 1.1))
    window = Trained(str(checkpoint)).window
    for token, part in zip(tokens, waveform.split(window), strict=True):
        torch.testing.assert_close(token, model.embed(part)[0], atol=1e-4, rtol=1e-4)


def test_a_trained_model_of_several_channels_is_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = SimpleNamespace(kind="sounds", rate_hz=8000)
    data = SimpleNamespace(inputs=inputs, shape=(2, 1600))
    monkeypatch.setattr("longseq.deploy.trained.load", lambda file: SimpleNamespace(data=data))
    with pytest.raises(
        CheckpointError, match=r"x.ckpt: hears 2 channels, and a frozen network of sounds hears one; give"
    ):
        Trained("x.ckpt").window  # noqa: B018 its value is asked for
    data.shape = (1600,)
    assert Trained("x.ckpt").window == 1600


@pytest.mark.parametrize(
    ("flags", "exit_code", "message"),
    [
        (["--network", "n.onnx"], 3, "network.file: n.onnx: no such file; give the file of the network"),
        (["--network", "m.onnx"], 2, "network.rate_hz: is not in m.onnx; give it, 48000 for sounds of 48 kHz"),
        (["--network", "m.onnx", "--network.rate_hz", "-3"], 2, "network.rate_hz: must be positive, got -3; 48000 is"),
        (["--network", "m.onnx", "--network.rate", "8000"], 2, "network.rate: no such option; did you mean"),
        (["--network", "Onnnx"], 2, "network: "),
        ([], 2, "network: missing"),
    ],
)
def test_mistakes_are_one_line(flags, exit_code, message, command, sounds, tmp_path):
    onnx_of_sounds(tmp_path / "m.onnx")
    done = command("embed", *flags, "--input", sounds, "--out", "features")
    assert done.code == exit_code and done.error.startswith(f"error: {message}"), done.err


def test_files_of_others_are_not_replaced(command, sounds, tmp_path):
    onnx_of_sounds(tmp_path / "m.onnx", rate_hz=1000)
    (tmp_path / "features").mkdir()
    save_file({"x": torch.zeros(1)}, tmp_path / "features/three.safetensors")
    done = command("embed", "--network", "m.onnx", "--input", sounds / "three.wav", "--out", "features")
    message = "error: out: features/three.safetensors is not a file of longseq embed; give another folder"
    assert (done.code, done.error) == (2, message)
