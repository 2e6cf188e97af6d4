"""Data whose inputs are the tokens of a frozen network: made once and cached, or made of files as they are read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from torch import Tensor

from datamodules import AudioFolder, ImageFolder
from datamodules import embedding as module
from datamodules.augment import TimeShift
from datamodules.errors import DataError
from datamodules.networks import Network

RATE = 4000


class Powers(Network):
    """Mean and power of each second, or of each half of an image: a network that a test can compute itself."""

    calls = 0

    def __init__(self, of: str = "sounds", factor: float = 1.0) -> None:
        super().__init__()
        self.of, self.factor = of, factor

    kind = property(lambda self: self.of)
    num_features, window, digest = 2, RATE, "0"
    size = (16, 16)

    @property
    def rate_hz(self) -> int | None:  # type: ignore[override]
        return RATE if self.of == "sounds" else None

    @property
    def token_seconds(self) -> float | None:  # type: ignore[override]
        return 1.0 if self.of == "sounds" else None

    def num_tokens(self, size: Any) -> int:
        return max(-(-size // RATE), 1) if self.of == "sounds" else 2

    def _open(self, path: Path) -> Any:
        raise AssertionError

    def __call__(self, values: Tensor) -> Tensor:
        type(self).calls += 1
        if self.of == "images":
            halves = values.float().mean(0).chunk(2, dim=1)
            centres = [(values.shape[2] / 4, values.shape[1] / 2), (3 * values.shape[2] / 4, values.shape[1] / 2)]
            return torch.tensor([[float(half.mean()), 0.0, *at] for half, at in zip(halves, centres, strict=True)])
        filled = torch.nn.functional.pad(values, (0, -len(values) % RATE)).unflatten(0, (-1, RATE))
        return self.factor * torch.stack([filled.mean(1), filled.square().mean(1)], dim=1)


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Ten recordings of each of two classes, of 1.5 to 6 seconds."""
    random = np.random.default_rng(0)
    for name, level in (("loud", 0.5), ("soft", 0.1)):
        (tmp_path / name).mkdir()
        for number in range(10):
            sound = level * random.uniform(-1, 1, int(RATE * (1.5 + number / 2)))
            soundfile.write(tmp_path / name / f"{number}.wav", sound, RATE)
    return tmp_path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSEQ_CACHE", str(tmp_path_factory.mktemp("cache")))


def test_every_sample_is_the_tokens_of_its_whole_file_in_the_splits_of_the_files(recordings: Path) -> None:
    data, plain = AudioFolder(str(recordings), network=Powers()), AudioFolder(str(recordings), seconds=6.0)
    data.setup()
    plain.setup()
    for split, samples in data.splits().items():
        assert samples.names == plain.splits()[split].names
        assert samples.labels.tolist() == plain.splits()[split].labels.tolist()
        for name, tokens in zip(samples.names, samples.inputs, strict=True):
            sound, _ = soundfile.read(recordings / name, dtype="float32")
            torch.testing.assert_close(tokens, Powers()(torch.tensor(sound)))
    assert (data.num_features, data.num_coordinates, data.most_tokens, data.token_seconds) == (2, 0, 6, 1.0)
    assert data.inputs.shape == (None, 2) and data.inputs.kind == "features" and data.raw_inputs.kind == "sounds"
    inputs, _ = next(iter(data.val_dataloader()))
    assert inputs["features"].shape == (len(inputs["lengths"]), int(inputs["lengths"].max()), 2)
    assert data.statistics()["features of a token"] == 2 and not hasattr(plain, "num_features")


def test_tokens_are_made_once_for_all_folds_and_anew_for_another_network_or_file(recordings: Path) -> None:
    def calls(**options: Any) -> int:
        before = Powers.calls
        AudioFolder(str(recordings), **{"network": Powers(), **options}).setup()
        return Powers.calls - before

    assert [calls(folds=4, fold=fold) for fold in (1, 2, 3)] == [20, 0, 0]
    assert (calls(), calls(val_fraction=0.3), calls(network=Powers(factor=2.0)), calls()) == (0, 0, 20, 0)
    sound, _ = soundfile.read(recordings / "loud/0.wav")
    soundfile.write(recordings / "loud/0.wav", 0.9 * sound, RATE)
    assert calls() == 20


def test_a_training_is_resumed_with_the_same_network_alone(recordings: Path) -> None:
    identities = []
    for factor in (1.0, 2.0, 1.0):
        data = AudioFolder(str(recordings), network=Powers(factor=factor))
        data.setup()
        identities.append(data.identity)
    assert identities[0] == identities[2] != identities[1]


def test_a_foreign_recording_becomes_tokens_in_blocks_as_in_one_piece(
    recordings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = np.random.default_rng(1).uniform(-1, 1, int(11.3 * RATE)).astype(np.float32)
    soundfile.write(recordings / "long.wav", sound, RATE, subtype="FLOAT")
    data = AudioFolder(str(recordings), network=Powers())
    data.setup("predict")
    data.predict_parts = data.parts(str(recordings / "long.wav"), any_length=True)
    (whole,) = data.predict_dataloader()
    assert whole["lengths"].tolist() == [12]
    torch.testing.assert_close(whole["features"][0], Powers()(torch.tensor(sound)))
    monkeypatch.setattr(module, "_BLOCK_SECONDS", 4.0)
    before = Powers.calls
    (in_blocks,) = data.predict_dataloader()
    assert torch.equal(in_blocks["features"], whole["features"]) and Powers.calls - before == 3


@pytest.mark.parametrize("seconds", [4, 5])
def test_tokens_end_where_a_recording_breaks_off(
    seconds: int, recordings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a block, or at its start."""
    sound = np.random.default_rng(1).uniform(-1, 1, 11 * RATE).astype(np.float32)
    sound[seconds * RATE : (seconds + 1) * RATE] = np.nan
    soundfile.write(recordings / "long.wav", sound, RATE, subtype="FLOAT")
    data = AudioFolder(str(recordings), network=Powers(), on_error="skip")
    data.setup("predict")
    data.predict_parts = data.parts(str(recordings / "long.wav"), any_length=True)
    monkeypatch.setattr(module, "_BLOCK_SECONDS", 4.0)
    (tokens,) = data.predict_dataloader()
    assert tokens["lengths"].tolist() == [seconds]
    torch.testing.assert_close(tokens["features"][0], Powers()(torch.tensor(sound[: seconds * RATE])))


def test_images_are_read_at_the_size_of_the_network_and_keep_the_places_of_their_tokens(tmp_path: Path) -> None:
    for name, grey in (("dark", 30), ("light", 220)):
        (tmp_path / name).mkdir()
        for number in range(8):
            Image.new("RGB", (40, 20), (grey + number,) * 3).save(tmp_path / name / f"{number}.png")
    data = ImageFolder(str(tmp_path), network=Powers("images"))
    data.setup()
    assert data.size == [16, 16] and (data.num_features, data.num_coordinates, data.token_seconds) == (2, 2, None)
    grey = float(data.train_set.inputs[0][0, 0])
    assert data.train_set.inputs[0].tolist() == [[grey, 0, 4, 8], [grey, 0, 12, 8]]
    assert data.inputs.shape == (None, 4) and data.inputs.rate_hz is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": Powers("images")}, "data.network: Powers takes images, and AudioFolder has sounds"),
        ({"network": Powers(), "augment": [TimeShift()]}, "augment must be left out with data.network"),
    ],
)
def test_what_does_not_suit_a_network_is_refused_in_a_line(recordings: Path, options: Any, message: str) -> None:
    with pytest.raises((DataError, ValueError), match=message):
        AudioFolder(str(recordings), **options).setup()


def test_shards_hold_files_and_no_tokens(recordings: Path, tmp_path: Path) -> None:
    data = AudioFolder(str(recordings), network=Powers())
    data.setup()
    with pytest.raises(ValueError, match="network must be left out, because shards hold files"):
        data.write_shards(tmp_path / "shards", 100)
