"""What the experiments of configs/ reach, trained in full by the command line on real data."""

import json
from pathlib import Path

import pytest

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


def test_digits_with_every_pixel_a_token(accuracy) -> None:
    linformer, mixed = accuracy(DIGITS), accuracy(DIGITS, "--trainer.precision", "bf16-mixed")
    assert linformer >= 0.96
    assert abs(linformer - mixed) <= 0.015  # a point, and half a point for the 360 images' own rounding
    assert accuracy(DIGITS, *VERMA) >= 0.94


@pytest.mark.parametrize(("flags", "least"), [([], 0.97), (VERMA, 0.95)], ids=["linformer", "verma"])
def test_spoken_digits_with_every_frame_a_token(flags: list[str], least: float, accuracy, real_data: Path) -> None:
    assert accuracy(FSDD, "--data.root", str(real_data), *flags) >= least


def test_vowels_beat_the_nearest_centroid_of_the_mean_spectrum(accuracy) -> None:
    baseline = nearest_centroid_accuracy(Vowels())
    ours = accuracy(VOWELS)
    print(f"vowels: {ours:.3f}, nearest centroid on the mean spectrum {baseline:.3f}")
    assert ours > baseline + 0.05


def test_mnist_learns_from_a_tenth_of_an_epoch(accuracy, real_data: Path) -> None:
    """784 tokens an image: the whole epoch takes too long for a test, and its figures are in the config."""
    short = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "0.1", "--trainer.limit_val_batches", "0.2"]
    assert accuracy(MNIST, "--data.root", str(real_data), *short, "--trainer.limit_test_batches", "0.2") > 0.5
