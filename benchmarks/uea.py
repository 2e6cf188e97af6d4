"""BasicMotions and JapaneseVowels of the UEA archive: signals with 6 and 12 channels, at their own lengths.

    pip install --no-deps aeon
    python benchmarks/uea.py

The sets are read from the wheel aeon, and are written to RUNS/sets as class folders. The test is the official one; a
fifth of each class of the official training split, another for each seed, is the validation. longseq trains with
configs/signal/folder.yaml, with the mechanism that the name of the system says, and keeps the epoch that is best on the
validation. The simple models are fitted to statistics of each channel: mean, deviation, lowest, highest, and three
quantiles of the signal and of its differences. The settings of a system are tried with seed 0, and the best on the
validation is used for the other seeds. A row is written to docs/results/runs.csv for each training.

BasicMotions is of a student project of the University of East Anglia, JapaneseVowels of Kudo, Toyama and Shimbo (1999).
"""

import argparse
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jsonargparse.typing import PositiveInt
from run_table import RUNS, measure_all, print_tables
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from trainings import fit_simple, folder_of, train_longseq


class Set(NamedTuple):
    """The rate of a set's samples in Hz, and how longseq trains on it."""

    rate_hz: int
    epochs: int
    patch_sizes: tuple[str, ...]


SETS = {
    "BasicMotions": Set(10, 60, ("2", "4")),
    "JapaneseVowels": Set(156, 40, ("1", "2")),  # 156.25: a sample every 6.4 ms; longseq takes whole rates
}
MECHANISMS = {"Verma": [], "no attention": ["None"], "softmax": ["Softmax"]}


def read_ts(path: Path) -> tuple[list[np.ndarray], list[str]]:
    """The signals (channels, samples) and the labels of a .ts file: a line for each, channels divided by colons."""
    _, _, data = path.read_text().partition("@data")
    signals, labels = [], []
    for line in data.split():
        *channels, label = line.split(":")
        signals.append(np.array([channel.split(",") for channel in channels], np.float32))
        labels.append(label)
    return signals, labels


def written(name: str, seed: int, wheel: Path, runs: Path) -> Path:
    """Write a set as class folders in train/, val/ and test/, and return its folder."""
    folder = runs / "sets" / f"{name}-{seed}"
    if folder.exists():
        return folder
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    for official in ("TRAIN", "TEST"):
        signals, labels = read_ts(wheel / name / f"{name}_{official}.ts")
        numbers, val = range(len(labels)), set()
        if official == "TRAIN":
            val = {*train_test_split(numbers, test_size=0.2, random_state=seed, stratify=labels)[1]}
        for number in numbers:
            split = "val" if number in val else official.lower()
            (target := part / split / labels[number]).mkdir(parents=True, exist_ok=True)
            np.savez(target / f"{number:04}.npz", signal=signals[number], fs=SETS[name].rate_hz)
    return part.rename(folder)


def statistics_of(signal: np.ndarray) -> np.ndarray:
    """14 numbers of each channel of a signal (channels, samples)."""
    numbers = []
    for x in (signal, np.diff(signal)):
        numbers += [x.mean(1), x.std(1), *np.quantile(x, (0, 0.25, 0.5, 0.75, 1), axis=1)]
    return np.concatenate(numbers)


def vectors(folder: Path) -> dict[str, tuple[np.ndarray, list[str]]]:
    """The statistics and the labels of each split."""
    splits = {}
    for split in ("train", "val", "test"):
        files = sorted((folder / split).glob("*/*.npz"))
        features = np.stack([statistics_of(np.load(file)["signal"]) for file in files])
        splits[split] = features, [file.parent.name for file in files]
    return splits


SIMPLE = {
    "logistic regression": ("C 0.01", "C 0.1", "C 1", "C 10"),
    "random forest": ("500 trees", "500 trees, a third of the statistics"),
}


def simple_model(system: str, setting: str, seed: int) -> Any:
    if system == "logistic regression":
        return make_pipeline(StandardScaler(), LogisticRegression(C=float(setting.split()[1]), max_iter=5000))
    share: Any = 1 / 3 if "third" in setting else "sqrt"
    return RandomForestClassifier(500, max_features=share, random_state=seed)


def train(name: str, wheel: Path, options: argparse.Namespace) -> None:
    """Train every combination of a set that has no row yet."""
    runs, epochs = options.runs, options.epochs or SETS[name].epochs

    def measure(system: str, setting: str, seed: int) -> dict[str, object]:
        folder = written(name, seed, wheel, runs)
        if system in SIMPLE:
            return fit_simple(simple_model(system, setting, seed), vectors(folder))
        flags = ["--config", "signal/folder", "--data.root", str(folder), "--seed_everything", str(seed)]
        for mechanism in MECHANISMS[system]:
            flags += ["--model.encoder.attention", mechanism]
        flags += ["--model.encoder.patch_size", setting.split()[-1]]
        flags += ["--trainer.max_epochs", str(epochs)]
        return train_longseq(runs / f"{name}-{system}-{setting}-{seed}".replace(" ", "-"), *flags)

    patches = [f"patch size {size}" for size in SETS[name].patch_sizes]
    settings = {**dict.fromkeys(MECHANISMS, patches), **SIMPLE}
    asked = {system: settings[system] for system in options.systems}
    measure_all(options.table, f"uea/{name}", asked, options.seeds, measure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    systems = [*MECHANISMS, *SIMPLE]
    parser.add_argument("--systems", nargs="+", choices=systems, default=systems)
    parser.add_argument("--seeds", type=PositiveInt, default=3)
    parser.add_argument("--epochs", type=PositiveInt, help="fewer, for a shorter try")
    parser.add_argument("--wheel", type=Path, help="the folder aeon/datasets/data, if aeon is not installed")
    parser.add_argument("--runs", type=Path, default=Path("runs/uea"), help="the folder of sets and trainings")
    parser.add_argument("--table", type=Path, default=RUNS, help="the table of runs")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # for longseq
    wheel = options.wheel or folder_of("aeon") / "datasets/data"
    for name in options.sets:
        train(name, wheel, options)
        print_tables(options.table, f"uea/{name}")


if __name__ == "__main__":
    main()
