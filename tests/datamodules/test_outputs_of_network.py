"""What a frozen network gives of each training sample: the mean over its windows, and found by the sample's number."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_networks
import soundfile
import torch
from PIL import Image
from torch import Tensor

from datamodules import AudioFolder, Digits, FeatureFolder, ImageFolder
from datamodules.audio import AudioDataModule
from datamodules.augment import Gain
from datamodules.base import DataModule
from datamodules.batch_augment import Flip
from datamodules.errors import DataError
from datamodules.networks import Onnx
from datamodules.samples import Unfinished


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSEQ_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Ten stereo recordings of each of two classes, at 1000 Hz, of 10 to 28 samples."""
    random = np.random.default_rng(0)
    for name, level in (("loud", 0.5), ("soft", 0.1)):
        (tmp_path / "sounds" / name).mkdir(parents=True)
        for number in range(10):
            sound = level * random.uniform(-1, 1, (10 + 2 * number, 2))
            soundfile.write(tmp_path / "sounds" / name / f"{number}.wav", sound, 1000, subtype="FLOAT")
    return tmp_path / "sounds"


@pytest.fixture
def network(tmp_path: Path) -> Onnx:
    """A network of windows of 8 samples at 1000 Hz."""
    small_networks.onnx_of_sounds(tmp_path / "m.onnx", rate_hz=1000)
    return Onnx(str(tmp_path / "m.onnx"))


def ready(data: DataModule) -> DataModule:
    data.setup()
    return data


def test_each_recording_is_taught_the_mean_over_the_windows_of_its_middle(recordings: Path, network: Onnx) -> None:
    weights = small_networks.onnx_of_sounds(recordings / "other.onnx", rate_hz=1000)
    data = ready(AudioFolder(str(recordings), channels="all", seconds=0.02, augment=[Gain()]))
    outputs = data.outputs_of(network)
    for name, of_sample in zip(data.train_set.names, outputs, strict=True):
        sound = soundfile.read(recordings / name, dtype="float32")[0].mean(1)
        start = max(len(sound) - 20, 0) // 2
        middle = sound[start : start + 20]
        windows = np.pad(middle, (0, -len(middle) % 8)).reshape(-1, 8)
        np.testing.assert_allclose(of_sample, np.maximum(windows @ weights, 0).mean(0), atol=1e-6)
    assert data.inputs.shape == (2, None) and data.inputs.rate_hz == 1000  # the data itself is as before


def test_sounds_are_read_at_the_rate_of_the_network(recordings: Path, network: Onnx) -> None:
    data, same = ready(AudioFolder(str(recordings), sample_rate_hz=2000)), ready(AudioFolder(str(recordings)))
    torch.testing.assert_close(data.outputs_of(network), same.outputs_of(network))


def test_a_network_runs_once_for_all_folds_and_again_for_other_files_or_settings(
    recordings: Path, network: Onnx, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    plain = Onnx.mean_of
    monkeypatch.setattr(Onnx, "mean_of", lambda self, values: calls.append(1) or plain(self, values))

    def count(of: Onnx = network, **options: Any) -> int:
        before = len(calls)
        ready(AudioFolder(str(recordings), **options)).outputs_of(of)
        return len(calls) - before

    assert [count(folds=4, fold=fold) for fold in (1, 2, 3)] == [20, 0, 0]
    assert (count(), count(val_fraction=0.3), count(seconds=0.01)) == (0, 0, 20)
    assert count(Onnx(network.file or "", hop_seconds=0.004)) == 20
    sound, _ = soundfile.read(recordings / "loud/0.wav")
    soundfile.write(recordings / "loud/0.wav", 0.9 * sound, 1000, subtype="FLOAT")
    assert count() == 20


def test_images_in_files_are_read_at_the_size_of_the_network_and_in_its_colours(tmp_path: Path) -> None:
    for name, grey in (("dark", 30), ("light", 220)):
        (tmp_path / name).mkdir()
        for number in range(8):
            Image.new("RGB", (60, 40), (grey + number, 0, 0)).save(tmp_path / name / f"{number}.png")
    small_networks.onnx_of_images(tmp_path / "m.onnx")
    data = ready(ImageFolder(str(tmp_path), size=[2, 3], grayscale=True))
    outputs = data.outputs_of(Onnx(str(tmp_path / "m.onnx"), value_range=[0.0, 255.0]))
    for name, (red, green, blue) in zip(data.train_set.names, outputs.tolist(), strict=True):
        value = {"dark": 30, "light": 220}[name.partition("/")[0]] + int(Path(name).stem)
        assert (red, green, blue) == (pytest.approx(value), 0, 0)
    assert data.shape == (1, 2, 3)


def test_images_in_memory_get_the_size_of_the_network(tmp_path: Path) -> None:
    small_networks.onnx_of_images(tmp_path / "m.onnx")
    digits = ready(Digits())
    outputs = digits.outputs_of(Onnx(str(tmp_path / "m.onnx"), value_range=[0.0, 255.0]))
    for number in range(20):
        image = Image.fromarray(digits.train_set.sample(number)[0].numpy()).resize((6, 4), Image.Resampling.BILINEAR)
        np.testing.assert_allclose(outputs[number], np.full(3, np.asarray(image).mean()), atol=0.2)


@pytest.mark.parametrize("options", [{}, {"augment": [Flip(-1, 0.5)]}])
def test_a_training_batch_carries_the_rows_of_its_samples_in_every_epoch(options: dict[str, Any]) -> None:
    data = ready(Digits(batch_size=100, **options))
    (inputs, labels) = next(iter(data.train_dataloader()))
    data.taught = torch.arange(len(data.train_set))[:, None].repeat(1, 2).float()
    loader = data.train_dataloader()
    for epoch in (0, 3):
        loader.sampler.set_epoch(epoch)  # type: ignore[union-attr]
        seen = []
        for inputs, labels, taught in loader:
            numbers = taught[:, 0].long()
            seen += numbers.tolist()
            plain, truth = data.train_set.__getitems__(numbers.tolist())
            assert torch.equal(labels, truth) and taught.shape == (len(labels), 2)
            same = (inputs == plain).flatten(1).all(1) | (inputs == plain.flip(-1)).flatten(1).all(1)
            assert bool(same.all())
        assert sorted(seen) == list(range(len(data.train_set)))
    assert len(next(iter(data.val_dataloader()))) == 2
    data.setup()
    assert data.taught is None  # of another training


def test_a_batch_that_a_gpu_finishes_carries_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    data = ready(Digits(batch_size=8))
    data.taught = torch.arange(len(data.train_set))[:, None].float()
    monkeypatch.setattr(Digits, "_gpu", lambda self: torch.device("cpu"))
    monkeypatch.setattr(Digits, "_free_bytes", lambda self, gpu: 2**40)
    batch = next(iter(data.train_dataloader()))
    assert isinstance(batch, Unfinished)
    inputs, labels, taught = data.on_after_batch_transfer(batch, 0)
    expected: Callable[..., tuple[Tensor, Tensor]] = data.train_set.__getitems__
    plain, truth = expected(taught[:, 0].long().tolist())
    assert torch.equal(inputs, plain) and torch.equal(labels, truth)


def test_a_network_of_another_kind_is_refused_in_a_line(tmp_path: Path, network: Onnx) -> None:
    with pytest.raises(DataError, match=r"^data.network: Onnx takes sounds, and Digits has images; choose a network"):
        ready(Digits()).outputs_of(network)
    for name in ("a", "b"):
        (tmp_path / "bags" / name).mkdir(parents=True)
        for number in range(4):
            np.save(tmp_path / "bags" / name / f"{number}.npy", np.random.randn(3, 2).astype(np.float32))
    with pytest.raises(DataError, match="Onnx takes sounds, and FeatureFolder has features"):
        ready(FeatureFolder(str(tmp_path / "bags"))).outputs_of(network)


class Sounds(AudioDataModule):
    """Stereo sounds in memory, at 500 Hz."""

    class_names = ["a", "b"]  # noqa: RUF012
    num_channels = 2

    def load(self) -> Any:
        parts = [self.samples_of(torch.rand(4, 2, 10), torch.tensor([0, 1, 0, 1])) for _ in range(3)]
        return tuple(parts)


def test_sounds_in_memory_become_one_channel_at_the_rate_of_the_network(network: Onnx, recordings: Path) -> None:
    weights = small_networks.onnx_of_sounds(recordings / "same.onnx", rate_hz=1000)
    data = ready(Sounds(1000, 0.01))
    windows = np.pad(data.train_set.sample(2).mean(0).numpy(), (0, 6)).reshape(2, 8)
    outputs = data.outputs_of(network)
    np.testing.assert_allclose(outputs[2], np.maximum(windows @ weights, 0).mean(0), atol=1e-6)
    slower = ready(Sounds(2000, 0.005))
    slower.train_set.inputs = data.train_set.inputs
    assert not torch.allclose(slower.outputs_of(network), outputs)
