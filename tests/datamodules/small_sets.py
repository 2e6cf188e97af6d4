"""A small version of every data set: random inputs in the layout that its loader reads.

For a new data set, add a function here; test_data_contract.py fails and names the class if it is missing.
"""

import csv
import hashlib
import io
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import soundfile
from PIL import Image

from datamodules import (
    CIFAR10,
    CIFAR100,
    ESC50,
    FSDD,
    MNIST,
    AudioFolder,
    AudioShards,
    DataModule,
    Digits,
    FashionMNIST,
    FeatureFolder,
    ImageFolder,
    ImageShards,
    Needles,
    Pathfinder,
    SignalFolder,
    SpeechCommands,
    TinyImageNet,
    Vowels,
)
from datamodules.sets.speech_commands import TEN

SMALL: dict[type[DataModule], Callable[[Path, pytest.MonkeyPatch], DataModule]] = {}


def of(kind: type[DataModule]) -> Callable:
    def add(make: Callable) -> Callable:
        SMALL[kind] = make
        return make

    return add


def noise(path: Path, rate_hz: int, seconds: float) -> None:
    """Write random noise whose seed is the file name: one name always gives the same sound."""
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng([*path.name.encode()])
    soundfile.write(path, generator.uniform(-0.5, 0.5, int(seconds * rate_hz)), rate_hz)


def picture(path: Path, side: int = 8) -> None:
    """Write a random colour image whose seed is the path: one path always gives the same image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng([*str(path).encode()])
    Image.fromarray(generator.integers(0, 255, (side, side, 3), np.uint8)).save(path)


@of(Digits)
def digits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Digits:
    return Digits(size=10)


@of(Vowels)
def vowels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Vowels:
    return Vowels(num_train=180, num_test=60)


@of(Pathfinder)
def pathfinder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Pathfinder:
    monkeypatch.setenv("LONGSEQ_CACHE", str(folder))
    return Pathfinder(size=32, num_train=30, num_test=10)


def _idx(path: Path, values: np.ndarray) -> None:
    """Yann LeCun's format: the type, the number of axes, the lengths, and the bytes."""
    path.write_bytes(struct.pack(f">I{values.ndim}I", 0x800 | values.ndim, *values.shape) + values.tobytes())


@of(MNIST)
def mnist(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: type[MNIST] = MNIST) -> MNIST:
    raw = folder / kind.__name__ / "raw"
    raw.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for split, count in (("train", 40), ("t10k", 20)):
        _idx(raw / f"{split}-images-idx3-ubyte", generator.integers(0, 255, (count, 28, 28), np.uint8))
        _idx(raw / f"{split}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) % 10)
    return kind(str(folder))


@of(FashionMNIST)
def fashion_mnist(folder: Path, monkeypatch: pytest.MonkeyPatch) -> MNIST:
    return mnist(folder, monkeypatch, FashionMNIST)


@of(CIFAR10)
def cifar10(folder: Path, monkeypatch: pytest.MonkeyPatch) -> CIFAR10:
    batches = {"data_batch_1": 20, "data_batch_2": 20, "test_batch": 20}
    return _cifar(CIFAR10, batches, "labels", {"label_names": CIFAR10.names}, folder, monkeypatch)


@of(CIFAR100)
def cifar100(folder: Path, monkeypatch: pytest.MonkeyPatch) -> CIFAR10:
    names = {"fine_label_names": CIFAR100.names}
    return _cifar(CIFAR100, {"train": 200, "test": 100}, "fine_labels", names, folder, monkeypatch)


def _cifar(
    kind: type[CIFAR10],
    batches: dict[str, int],
    label_key: str,
    names: dict[str, object],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> CIFAR10:
    """A random archive in the format of CIFAR; the checksums are replaced to match it."""
    generator = np.random.default_rng(0)
    files = {
        name: pickle.dumps(
            {
                "data": generator.integers(0, 255, (count, 3072), np.uint8),
                label_key: [number % len(kind.names) for number in range(count)],
            }
        )
        for name, count in batches.items()
    }
    source = kind.source
    files[source.meta["filename"]] = pickle.dumps(names)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as packed:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{source.base_folder}/{name}")
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    sums = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    *train, test = batches
    monkeypatch.setattr(source, "train_list", [[name, sums[name]] for name in train])
    monkeypatch.setattr(source, "test_list", [[test, sums[test]]])
    monkeypatch.setattr(source, "meta", {**source.meta, "md5": sums[source.meta["filename"]]})
    monkeypatch.setattr(source, "tgz_md5", hashlib.md5(archive.getvalue()).hexdigest())
    (folder / source.filename).write_bytes(archive.getvalue())
    return kind(str(folder))


@of(ImageFolder)
def image_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ImageFolder:
    for number in range(20):
        picture(folder / f"{('cats', 'dogs')[number % 2]}/{number}.png")
    return ImageFolder(str(folder), size=8)


@of(TinyImageNet)
def tiny_imagenet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> TinyImageNet:
    base = folder / "tiny-imagenet-200"
    for number in range(20):
        word = ("n01443537", "n01629819")[number % 2]
        picture(base / f"train/{word}/images/{word}_{number}.JPEG", 64)
    lines = []
    for number in range(6):
        picture(base / f"val/images/val_{number}.JPEG", 64)
        lines.append(f"val_{number}.JPEG\t{('n01443537', 'n01629819')[number % 2]}\t0\t0\t63\t63\n")
    (base / "val/val_annotations.txt").write_text("".join(lines))
    (base / "words.txt").write_text("n01443537\tgoldfish, Carassius auratus\nn01629819\tEuropean fire salamander\n")
    return TinyImageNet(str(folder))


@of(AudioFolder)
def audio_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AudioFolder:
    for number in range(20):
        noise(folder / f"{('bells', 'horns')[number % 2]}/{number}.wav", 8000, 0.05 + 0.005 * number)
    return AudioFolder(str(folder), sample_rate_hz=8000, seconds=0.1)


def bag(path: Path, num_tokens: int, num_features: int = 6, has_coordinates: bool = True) -> None:
    """Write random features of tiles on a grid, as TRIDENT does; one path always gives the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng([*str(path).encode()])
    with h5py.File(path, "w") as file:
        file["features"] = generator.normal(size=(num_tokens, num_features)).astype(np.float32)
        if has_coordinates:
            file["coords"] = 512 * np.stack(np.divmod(np.arange(num_tokens), 5), 1)
            file["coords"].attrs["patch_size_level0"] = 512


@of(FeatureFolder)
def feature_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FeatureFolder:
    for number in range(20):
        bag(folder / f"{('normal', 'tumor')[number % 2]}/{number}.h5", 1 + number)
    return FeatureFolder(str(folder))


@of(SignalFolder)
def signal_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> SignalFolder:
    for number in range(20):
        path = folder / ("calm", "fast")[number % 2] / f"{number}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        signal = np.random.default_rng(number).standard_normal((2, 50 + number))
        signal[:, 20:23] = np.nan
        np.savez(path, signal=signal, fs=100)
    return SignalFolder(str(folder), channels=1)  # the foreign files of the tests have one


@of(ImageShards)
def image_shards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ImageShards:
    data = image_folder(folder / "files", monkeypatch)
    data.setup()
    data.write_shards(folder / "shards", 6)
    return ImageShards(str(folder / "shards"), size=8)


@of(AudioShards)
def audio_shards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AudioShards:
    data = audio_folder(folder / "files", monkeypatch)
    data.setup()
    data.write_shards(folder / "shards", 6)
    return AudioShards(str(folder / "shards"), sample_rate_hz=8000, seconds=0.1)


@of(FSDD)
def fsdd(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FSDD:
    for digit in range(10):
        for index in range(9):
            noise(
                folder / f"free-spoken-digit-dataset/recordings/{digit}_jackson_{index}.wav", 8000, 0.05 + 0.01 * index
            )
    return FSDD(str(folder))


@of(SpeechCommands)
def speech_commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> SpeechCommands:
    """The ten words, two other words, and noise."""
    base = folder / "SpeechCommands/speech_commands_v0.02"
    lists: dict[str, list[str]] = {"validation_list.txt": [], "testing_list.txt": []}
    for word in (*TEN, "bed", "cat"):
        for number in range(10):
            noise(base / word / f"{number}.wav", 16000, 0.05)
        lists["validation_list.txt"].append(f"{word}/8.wav")
        lists["testing_list.txt"].append(f"{word}/9.wav")
    noise(base / "_background_noise_/hum.wav", 16000, 30)
    for name, paths in lists.items():
        (base / name).write_text("\n".join(paths) + "\n")
    return SpeechCommands(str(folder))


@of(ESC50)
def esc50(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ESC50:
    base = folder / "ESC-50-master"
    names = [
        (fold, kind, f"{fold}-{kind}-{take}.wav")
        for fold in range(1, 6)
        for kind in ("rain", "wind")
        for take in range(3)
    ]
    for _, _, name in names:
        noise(base / "audio" / name, 8000, 0.5)
    (base / "meta").mkdir()
    with open(base / "meta/esc50.csv", "w", newline="") as file:
        csv.writer(file).writerows(
            [["filename", "fold", "target", "category"], *([name, fold, 0, kind] for fold, kind, name in names)]
        )
    return ESC50(str(folder))


@of(Needles)
def needles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Needles:
    fsdd(folder, monkeypatch)
    esc50(folder, monkeypatch)
    return Needles(str(folder), num_train=60, num_test=20, seconds=1.5, shortest=1.1)
