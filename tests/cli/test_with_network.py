"""Raw recordings and a frozen network: fit embeds them, and everything that takes recordings still takes them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import small_networks
import soundfile
import torch

import longseq

RATE = 1000


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Ten recordings of each of two classes, of which one is louder."""
    random = np.random.default_rng(0)
    for name, level in (("loud", 0.8), ("soft", 0.05)):
        (tmp_path / "sounds" / name).mkdir(parents=True)
        for number in range(10):
            sound = level * random.uniform(-1, 1, 240 + 8 * number)
            soundfile.write(tmp_path / "sounds" / name / f"{number}.wav", sound, RATE, subtype="FLOAT")
    return tmp_path / "sounds"


def flags_of(recordings: Path, network: Path) -> list[object]:
    data = ["--data", "AudioFolder", "--data.root", recordings, "--data.network", "Onnx"]
    return [*data, "--data.network.file", network, "--data.network.output", "scores"]


def test_a_model_with_a_network_takes_recordings_and_arrays_and_knows_its_network(
    recordings: Path, tmp_path: Path, command: Callable, exports: None
) -> None:
    network = tmp_path / "m.onnx"
    small_networks.onnx_of_sounds(network, rate_hz=RATE)
    flags = flags_of(recordings, tmp_path / "m.onnx")
    flags += ["--data.batch_size", "4"]
    encoder = ["FeatureEncoder", "--model.encoder.attention", "Verma", "--model.encoder.dim", "8"]
    runs = ["--experiment", "x", "--trainer.max_epochs", "20"]
    done = command("fit", *flags, "--model.encoder", *encoder, *runs, "--trainer.accelerator", "cpu")
    assert done.code == 0, done.err
    checkpoint = tmp_path / "runs/x/0/best.ckpt"

    loud = recordings / "loud/3.wav"
    predicted = command("predict", "--ckpt_path", checkpoint, "--input", loud)
    assert predicted.code == 0 and predicted.out.split("\t")[1] == "loud", predicted.out + predicted.err
    model = longseq.load(checkpoint)
    (of_file,) = model.predict(loud)
    sound, _ = soundfile.read(loud, dtype="float32")
    (of_array,) = model.predict(sound)
    assert torch.equal(of_file.probabilities, of_array.probabilities)
    assert len(model.predict(loud, window=0.1)) == 3
    assert model.events(loud, threshold=0.2)[-1].end <= len(sound) / RATE
    with pytest.raises(ValueError, match="must be"):
        model.predict(np.zeros((3, 8, 8), np.uint8))

    done = command("export", "--ckpt_path", checkpoint, "--out", "m2.onnx", "--input", loud)
    assert done.code == 0 and "inputs: features, float32 (batch, tokens, 3)" in done.out, done.err
    session = onnxruntime.InferenceSession(tmp_path / "m2.onnx")
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["network"]) == "Onnx" and json.loads(facts["network_sha256"]) == model.data.network.sha256
    tokens = model.data.network(torch.tensor(sound))
    given = {"features": tokens[None].numpy(), "lengths": np.array([len(tokens)])}
    np.testing.assert_allclose(session.run(None, given)[0][0], of_file.probabilities, atol=1e-5)

    small_networks.onnx_of_sounds(network, rate_hz=RATE, window=16)
    refused = command("predict", "--ckpt_path", checkpoint, "--input", loud)
    assert refused.code == 2 and "is another network than the model was trained with" in refused.error
    network.unlink()
    refused = command("predict", "--ckpt_path", checkpoint, "--input", loud)
    assert f"data.network.file: {network}: no such file" in refused.error


def test_other_encoders_and_augmentations_are_refused_in_a_line(
    recordings: Path, tmp_path: Path, command: Callable
) -> None:
    small_networks.onnx_of_sounds(tmp_path / "m.onnx", rate_hz=RATE)
    flags = flags_of(recordings, tmp_path / "m.onnx")
    flags += ["--trainer.accelerator", "cpu"]
    verma = ["--model.encoder.attention", "Verma"]
    wrong = command("fit", *flags, "--model.encoder", "SpectrogramEncoder", *verma)
    assert wrong.code == 2 and "FeatureEncoder" in wrong.error, wrong.error
    mixed = command("fit", *flags, "--model.encoder", "FeatureEncoder", *verma, "--model.mix", "MixUp")
    assert mixed.code == 2 and "mix: must suit features, got MixUp; leave it out" in mixed.error, mixed.error
    raw = ["--data", "AudioFolder", "--data.root", recordings, "--trainer.accelerator", "cpu"]
    without = command("fit", *raw, "--model.encoder", "FeatureEncoder", *verma)
    assert without.code == 2 and "network" in without.error, without.error
