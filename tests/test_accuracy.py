"""What the experiments of configs/ reach, trained in full by the command line on real data."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from datamodules import Vowels
from datamodules.baseline import nearest_centroid_accuracy

ROOT = Path(__file__).parents[1]
DIGITS = str(ROOT / "configs/image/digits.yaml")
FSDD = str(ROOT / "configs/audio/fsdd.yaml")
VOWELS = str(ROOT / "configs/audio/vowels.yaml")
MNIST = str(ROOT / "configs/image/mnist.yaml")
VERMA = ["--model.encoder.attention", "Verma"]


@pytest.fixture
def accuracy(train_py, tmp_path: Path):
    """Train and return the test accuracy."""

    def train(config: str, *flags: str) -> float:
        folder = tmp_path / "-".join([Path(config).stem, *flags]).replace("/", "_")
        train_py("fit", "--config", config, "--trainer.default_root_dir", str(folder), *flags)
        (metrics,) = folder.glob("runs/*/0/metrics.json")
        return json.loads(metrics.read_text())["test/accuracy"]

    return train


@pytest.mark.parametrize(
    ("flags", "least"),
    [([], 0.96), (["--trainer.precision", "bf16-mixed"], 0.95), (VERMA, 0.94)],
    ids=["linformer", "linformer in bf16-mixed", "verma"],
)
def test_digits_with_every_pixel_a_token(flags: list[str], least: float, accuracy) -> None:
    assert accuracy(DIGITS, *flags) >= least


@pytest.mark.parametrize(("flags", "least"), [([], 0.97), (VERMA, 0.95)], ids=["linformer", "verma"])
def test_spoken_digits_with_every_frame_a_token(flags: list[str], least: float, accuracy, real_data: Path) -> None:
    assert accuracy(FSDD, "--data.root", str(real_data), *flags) >= least


def test_vowels_beat_the_nearest_centroid_of_the_mean_spectrum(accuracy) -> None:
    baseline = nearest_centroid_accuracy(Vowels())
    ours = accuracy(VOWELS)
    print(f"vowels: {ours:.3f}, nearest centroid on the mean spectrum {baseline:.3f}")
    assert ours > baseline + 0.05


def test_mnist_trains_on_784_tokens_and_logs_its_throughput(train_py, tmp_path: Path, real_data: Path) -> None:
    """A part of an epoch: the whole takes too long for a test, and its figures are in the config."""
    part = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "24", "--trainer.limit_val_batches", "2"]
    train_py("fit", "--config", MNIST, "--data.root", str(real_data), *part, "--trainer.limit_test_batches", "2")
    events = EventAccumulator(str(tmp_path / "runs/mnist/0")).Reload()
    samples, tokens = (events.Scalars(f"throughput/{name}_per_second")[-1].value for name in ("samples", "tokens"))
    assert samples > 0
    assert tokens == pytest.approx(784 * samples)
    losses = [point.value for point in events.Scalars("train/loss")]
    assert losses[-1] < losses[0]
