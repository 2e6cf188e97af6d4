"""What a new user gets in minutes on one core: image/folder and audio/folder against a CNN, on small data sets.

    python benchmarks/front_door.py --data DIR --sets things --minutes 2 10 --seeds 3

DIR holds CIFAR-10-images, tiny-imagenet-200, MNIST, free-spoken-digit-dataset, SpeechCommands and ESC-50-master; the
sets are written to RUNS/sets as class folders. Each system has the same minutes on one core, and the same training and
validation samples. longseq runs from its command line, and its minutes include its start; the CNN's minutes include
only its training. The CNN tries three learning rates, with seed 0 and the first value of --minutes, and further ones
while the best is at their edge. The one with the best validation is used for its other trainings; all rows are kept.

A row is written to docs/results/runs.csv as soon as it is measured, and is not measured again. Two processes with
different --sets may run at the same time, each on a core of its own. When the trainings of a set are done, its systems
are compared, and the differences are written to comparisons.csv beside the table.
"""

import argparse
import csv
import itertools
import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
import torch
import torch.nn.functional as F
import torchaudio
from jsonargparse.typing import PositiveFloat, PositiveInt
from judge import compare
from paired import Tested, answers_of
from PIL import Image
from run_table import RUNS, Row, best_rate, chosen, measured, print_tables, read
from torch import Tensor, nn
from torchvision import datasets

from longseq.reports.processes import run_python

RATES = 1e-3, 2e-3, 4e-3  # of the CNN, tried first
# The flags of each system, after --config image/folder or audio/folder.
SYSTEMS = {
    "longseq": [],
    "longseq, Verma": ["--model.encoder.depth", "1"],
    "longseq, softmax": ["--model.encoder.depth", "1", "--model.encoder.attention", "Softmax"],
}
LEVEL = "CNN, level subtracted"  # of sounds only
CNNS = "CNN", LEVEL
ANSWERS = "answers.json"  # of a training, to the test


# (split, class, file or pixels) of each sample of a set.
Content = Iterator[tuple[str, str, Path | np.ndarray]]


def things(data: Path) -> Content:
    """The first 400 images, except 80, of each of eight classes of CIFAR-10; the test is the official one."""
    names = sorted(path.name for path in (data / "CIFAR-10-images/train").iterdir())[:8]
    for name in names:
        files = sorted((data / "CIFAR-10-images/train" / name).iterdir())[:400]
        random.Random(f"{name}0").shuffle(files)
        yield from (("val" if i < 112 else "train", name, file) for i, file in enumerate(files) if i >= 80)
        yield from (("test", name, file) for file in sorted((data / "CIFAR-10-images/test" / name).iterdir()))


def tiny(count: int) -> Callable[[Path], Content]:
    """The first ``count`` images of each class of Tiny ImageNet, a tenth for validation; its val split is the test."""

    def content(data: Path) -> Content:
        folder = data / "tiny-imagenet-200"
        for name in sorted(path.name for path in (folder / "train").iterdir()):
            for i, file in enumerate(sorted((folder / "train" / name / "images").iterdir())[:count]):
                yield "train" if i % 10 else "val", name, file
        for line in (folder / "val/val_annotations.txt").read_text().splitlines():
            file, name = line.split("\t")[:2]
            if (path := folder / "val/images" / file).exists():
                yield "test", name, path

    return content


def mnist(data: Path) -> Content:
    """The first 3,000 images of MNIST, a tenth of each digit for validation; the test is the official one."""
    for split in ("train", "test"):
        images = datasets.MNIST(str(data), train=split == "train")
        count = 3000 if split == "train" else len(images)
        seen = [0] * 10
        for image, label in zip(images.data[:count], images.targets[:count].tolist(), strict=True):
            seen[label] += 1
            yield "val" if split == "train" and seen[label] % 10 == 0 else split, str(label), image.numpy()


def fsdd(data: Path) -> Content:
    """Twelve clips of each spoken digit, by four speakers; a fifth speaker is the validation, and a sixth the test."""
    for file in sorted((data / "free-spoken-digit-dataset/recordings").glob("*.wav")):
        digit, speaker, number = file.stem.split("_")
        if speaker in ("theo", "yweweler") and int(number) < 20:
            yield "test" if speaker == "theo" else "val", digit, file
        elif speaker in ("george", "jackson", "lucas", "nicolas") and 5 <= int(number) < 8:
            yield "train", digit, file


def speech_commands(data: Path) -> Content:
    """The words in the folder, split by the official lists."""
    folder = data / "SpeechCommands/speech_commands_v0.02"
    lists = {
        split: set((folder / f"{name}_list.txt").read_text().split())
        for split, name in (("test", "testing"), ("val", "validation"))
    }
    for file in sorted(folder.glob("[!_]*/*.wav")):
        name = file.relative_to(folder).as_posix()
        yield next((split for split, names in lists.items() if name in names), "train"), file.parent.name, file


def esc50(fold: int) -> Callable[[Path], Content]:
    """A fold of ESC-50 is the test, and the fold before it the validation."""

    def content(data: Path) -> Content:
        folder = data / "ESC-50-master"
        with open(folder / "meta/esc50.csv", newline="") as file:
            for row in csv.DictReader(file):
                if (path := folder / "audio" / row["filename"]).exists():
                    split = {fold: "test", (fold - 2) % 5 + 1: "val"}.get(int(row["fold"]), "train")
                    yield split, row["category"], path

    return content


class Set(NamedTuple):
    """A set's content, and what its CNN reads: images of ``size`` pixels, or ``seconds`` of sound."""

    content: Callable[[Path], Content]
    size: int = 0
    seconds: float = 0.0
    strides: tuple[int, ...] = (1, 2, 2)
    mirrors: bool = True
    subtracts_level: bool = False  # a clip's mean, from its spectrogram
    group: str | None = None  # matches what is drawn together in the bootstrap, in a sample's name

    @property
    def config(self) -> str:
        return "audio/folder" if self.seconds else "image/folder"


SETS = {
    "things": Set(things, 32),
    "tiny50": Set(tiny(50), 64, strides=(2, 1, 2, 2)),
    "tiny450": Set(tiny(450), 64, strides=(2, 1, 2, 2)),
    "mnist3000": Set(mnist, 28, mirrors=False),
    "fsdd": Set(fsdd, seconds=1.0),
    "speech_commands": Set(speech_commands, seconds=1.0, group=r"(\w+)_nohash"),
    **{f"esc50-{fold}": Set(esc50(fold), seconds=5.0) for fold in range(1, 6)},
}


def written(name: str, data: Path, runs: Path) -> Path:
    """Write a set as class folders in train/, val/ and test/, and return its folder."""
    folder = runs / "sets" / name
    if not folder.exists():
        part = folder.with_name(name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        for number, (split, label, content) in enumerate(SETS[name].content(data)):
            (target := part / split / label).mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copy(content, target)
            else:
                Image.fromarray(content).save(target / f"{number:05}.png")
        part.rename(folder)
    return folder


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut, (b, c, h, w) to (b, width, h / stride, w / stride)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        same = stride == 1 and channels == width
        shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.shortcut = nn.Identity() if same else shortcut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.block(x) + self.shortcut(x))


class ImageCNN(nn.Sequential):
    """A convolution and three residual blocks, whose mean is classified: pixels (b, 3, h, w) to logits."""

    def __init__(self, num_classes: int, strides: tuple[int, ...]) -> None:
        first, *others = strides if len(strides) == 4 else (1, *strides)
        stem = nn.Conv2d(3, 32, 3, first, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()
        blocks = [ResidualBlock(*sizes) for sizes in zip((32, 32, 64), (32, 64, 128), others, strict=True)]
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, num_classes)
        super().__init__(*stem, *blocks, *head)


class SoundCNN(nn.Module):
    """Four convolutions with max pooling, whose mean and maximum are classified: spectrograms (b, 1, bands, frames)."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels, width in itertools.pairwise((1, 32, 64, 128, 128)):
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            layers += [nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(256, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return self.head(F.dropout(torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1), 0.3, self.training))


class Images:
    """Standardised images of one size. Augmentation shifts each, and mirrors half of them if the set allows it."""

    def __init__(self, folder: Path, source: Set) -> None:
        self.source = source
        self.splits = {split: self._read(folder / split) for split in ("train", "val", "test")}
        x = self.splits["train"][0]
        mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
        self.splits = {split: ((x - mean) / std, y) for split, (x, y) in self.splits.items()}

    def _read(self, folder: Path) -> tuple[Tensor, Tensor]:
        samples = datasets.ImageFolder(str(folder), lambda image: np.asarray(image.resize((self.source.size,) * 2)))
        pixels, labels = zip(*samples, strict=True)
        return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 255, torch.tensor(labels)

    def network(self, num_classes: int) -> nn.Module:
        return ImageCNN(num_classes, self.source.strides)

    def features(self, x: Tensor) -> Tensor:
        return x

    def augmented(self, x: Tensor) -> Tensor:
        size, by = self.source.size, self.source.size // 8
        wide = F.pad(x, (by,) * 4, mode="reflect")
        places = [(random.randint(0, 2 * by), random.randint(0, 2 * by)) for _ in x]
        shifted = torch.stack(
            [image[:, i : i + size, j : j + size] for image, (i, j) in zip(wide, places, strict=True)]
        )
        mirrored = self.source.mirrors & (torch.rand(len(x), 1, 1, 1) < 0.5)
        return torch.where(mirrored, shifted.flip(-1), shifted)

    beta, weight_decay = 0.0, 0.05  # of MixUp, and of AdamW

    def batch_size(self) -> int:
        return 64


class Sounds:
    """Clips of one length, as log-mel spectrograms. Augmentation shifts, scales, masks and mixes, and adds noise."""

    def __init__(self, folder: Path, source: Set) -> None:
        self.subtracts_level = source.subtracts_level
        first = next((folder / "train").glob("*/*"))
        self.rate = soundfile.info(first).samplerate
        self.length = round(source.seconds * self.rate)
        window = round(self.rate * 0.025)
        self.mel = torchaudio.transforms.MelSpectrogram(
            self.rate, 2 ** math.ceil(math.log2(window)), window, self.rate // 100, n_mels=64
        )
        self.splits = {split: self._read(folder / split) for split in ("train", "val", "test")}
        self.mean, self.std = 0.0, 1.0
        x = torch.cat([self.features(part) for part in self.splits["train"][0].split(64)])
        self.mean, self.std = float(x.mean()), float(x.std())

    def _read(self, folder: Path) -> tuple[Tensor, Tensor]:
        samples = datasets.DatasetFolder(str(folder), lambda file: soundfile.read(file, dtype="float32")[0], (".wav",))
        clips, labels = zip(*samples, strict=True)
        fitted = [torch.from_numpy(clip)[: self.length] for clip in clips]
        return torch.stack([F.pad(clip, (0, self.length - len(clip))) for clip in fitted]), torch.tensor(labels)

    def network(self, num_classes: int) -> nn.Module:
        return SoundCNN(num_classes)

    def features(self, x: Tensor) -> Tensor:
        levels = (self.mel(x) + 1e-6).log()[:, None]
        if self.subtracts_level:
            levels = levels - levels.mean((2, 3), keepdim=True)
        return (levels - self.mean) / self.std

    def augmented(self, x: Tensor) -> Tensor:
        shifts = [round(random.uniform(-0.1, 0.1) * self.length) for _ in x]
        x = torch.stack([clip.roll(shift) for clip, shift in zip(x, shifts, strict=True)]) * 10 ** random.uniform(
            -0.3, 0.3
        )
        x = x + torch.randn_like(x) * x.std(1, keepdim=True) * 10 ** -random.uniform(0.5, 2)
        x = self.features(x)
        for axis, most in ((2, 12), (3, max(2, x.shape[3] // 6))):
            for image in x:
                width = random.randrange(most)
                image.narrow(axis - 1, random.randrange(x.shape[axis] - width), width).zero_()
        return x

    beta, weight_decay = 0.3, 0.03

    def batch_size(self) -> int:
        return min(32, max(8, len(self.splits["train"][1]) // 8))


class CNN(NamedTuple):
    """A trained CNN, with the sounds or images that it reads."""

    data: Sounds | Images
    network: nn.Module
    passes: int = 0
    validation: float = 0.0

    def right(self, split: str) -> Tensor:
        """Whether the answer to each sample of a split is right."""
        self.network.eval()
        with torch.no_grad():
            parts = zip(*(values.split(64) for values in self.data.splits[split]), strict=True)
            right = [self.network(self.data.features(x)).argmax(1) == y for x, y in parts]
        self.network.train()
        return torch.cat(right)

    def accuracy(self, split: str) -> float:
        return float(self.right(split).double().mean())

    def tested(self, folder: Path) -> Tested:
        """The answers to the test split of a folder from which the data was read."""
        names = [path.relative_to(folder).as_posix() for path in sorted((folder / "test").glob("*/*"))]
        return Tested(names, self.data.splits["test"][1].tolist(), self.right("test").numpy())


def untrained_cnn(folder: Path, source: Set) -> CNN:
    data = Sounds(folder, source) if source.seconds else Images(folder, source)
    return CNN(data, data.network(int(data.splits["train"][1].max()) + 1))


def fit_cnn(folder: Path, source: Set, minutes: float, seed: int, rate: float) -> CNN:
    """Train a CNN for so many minutes of one core, and keep the weights that are best on the validation."""
    torch.manual_seed(seed), random.seed(seed), torch.set_num_threads(1)
    np.random.seed(seed)
    cnn = untrained_cnn(folder, source)
    data, network = cnn.data, cnn.network
    x, y = data.splits["train"]
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=data.weight_decay)
    best, best_weights, steps, evaluations = -1.0, {}, 0, 0
    begin = time.process_time()  # with one thread this is the time on an idle core
    size = data.batch_size()
    a_pass = len(y) // size or 1
    while (share := (time.process_time() - begin) / (60 * minutes)) < 1:
        if steps % a_pass == 0:
            order = torch.randperm(len(y))
        chosen = order[steps % a_pass * size :][:size]
        for group in optimizer.param_groups:  # the rate follows the clock: a rise, then half a cosine
            group["lr"] = rate * min(share / 0.15 + 0.01, 0.5 + 0.5 * math.cos(math.pi * max(share - 0.15, 0) / 0.85))
        inputs, other = data.augmented(x[chosen]), torch.randperm(len(chosen))
        mix = np.random.beta(data.beta, data.beta) if data.beta else 1.0
        logits = network(mix * inputs + (1 - mix) * inputs[other] if mix < 1 else inputs)
        losses = [F.cross_entropy(logits, y[part], label_smoothing=0.1) for part in (chosen, chosen[other])]
        optimizer.zero_grad()
        (mix * losses[0] + (1 - mix) * losses[1]).backward()
        optimizer.step()
        steps += 1
        if steps % a_pass == 0 and share > evaluations / 15:
            evaluations += 1
            if (validated := cnn.accuracy("val")) >= best:
                best, best_weights = validated, {key: value.clone() for key, value in network.state_dict().items()}
    if (validated := cnn.accuracy("val")) < best:
        network.load_state_dict(best_weights)
    return CNN(data, network, round(steps / a_pass), max(validated, best))


def train_cnn(folder: Path, source: Set, minutes: float, seed: int, rate: float, run: Path) -> dict[str, object]:
    """Train a CNN for so many minutes of one core, and return its epochs and accuracies."""
    cnn = fit_cnn(folder, source, minutes, seed, rate)
    (tested := cnn.tested(folder)).save(run / ANSWERS)
    return {"epochs": cnn.passes, "validation": cnn.validation, "test": tested.right.mean(), "minutes": minutes}


def train_longseq(
    folder: Path, source: Set, minutes: float, seed: int, flags: list[str], run: Path
) -> dict[str, object]:
    """Train longseq for so many minutes on one core, and return its epochs and accuracies."""
    shutil.rmtree(run, ignore_errors=True)  # left by a training that was stopped
    command = ["-m", "longseq", "fit", "--config", source.config, "--data.root", str(folder), *flags]
    command += ["--minutes", f"{minutes:g}", "--seed_everything", str(seed), "--trainer.enable_progress_bar", "false"]
    process = run_python(*command, "--trainer.default_root_dir", str(run), "--trainer.accelerator", "cpu")
    if process.returncode:
        raise SystemExit(process.stderr.strip().split("\n")[-1])
    (metrics,) = run.glob("runs/*/0/metrics.json")
    figures = json.loads(metrics.read_text())
    epochs = torch.load(metrics.with_name("last.ckpt"), weights_only=True)["epoch"]
    answers_of(metrics.with_name("best.ckpt")).save(run / ANSWERS)
    names = {"validation": "val/accuracy", "test": "test/accuracy"}
    described = {"epochs": epochs, "minutes": minutes, "flags": " ".join(["--config", source.config, *flags])}
    return {name: figures[metric] for name, metric in names.items()} | described


def train(
    name: str, systems: Iterable[str], all_minutes: list[float], seeds: int, data: Path, runs: Path, table: Path
) -> None:
    """Train every combination that has no row yet, and compare."""
    folder, source = written(name, data, runs), SETS[name]
    rates: dict[str, Sequence[float]] = {system: RATES for system in CNNS}
    for minutes in all_minutes:
        experiment = f"front_door/{name}/{minutes:g} min"

        def run_of(system: str, setting: str, seed: int, minutes: float = minutes) -> Path:
            return runs / f"{name}-{system}-{setting}-{minutes:g}-{seed}".replace(", ", "-").replace(" ", "-")

        def row_of(system: str, setting: str, seed: int, experiment: str = experiment, minutes: float = minutes) -> Row:
            def measure() -> dict[str, object]:
                run = run_of(system, setting, seed, minutes)
                if system in CNNS:
                    of_cnn = source._replace(subtracts_level=system == LEVEL)
                    return train_cnn(folder, of_cnn, minutes, seed, float(setting), run)
                return train_longseq(folder, source, minutes, seed, SYSTEMS[system], run)

            return measured(table, (experiment, system, setting, str(seed)), measure)

        best = dict.fromkeys(systems, "")
        for system in (system for system in systems if system in CNNS):
            rate = best_rate(rates[system], lambda rate, system=system: row_of(system, f"{rate:g}", 0))
            rates[system], best[system] = (rate,), f"{rate:g}"  # later minutes use the rate of the first
        for seed in range(seeds):  # the systems in turns, because a machine's speed drifts
            for system, setting in best.items():
                row_of(system, setting, seed)
        print_tables(table, experiment)
        answers = {
            system: [run_of(system, row["setting"], int(row["seed"])) / ANSWERS for row in rows]
            for system, rows in chosen(read(table, experiment)).items()
        }
        if missing := [str(path) for paths in answers.values() for path in paths if not path.exists()]:
            print(f"{experiment}: not compared, as these are missing: {', '.join(missing)}")
        elif "longseq" in answers and len(answers) > 1:
            tested = {system: [Tested.load(path) for path in paths] for system, paths in answers.items()}
            compare(table, "longseq", {experiment: tested}, source.group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder of the data sets")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--systems", nargs="+", choices=[*SYSTEMS, *CNNS], default=[*SYSTEMS, *CNNS])
    parser.add_argument("--minutes", nargs="+", type=PositiveFloat, default=[2.0])
    parser.add_argument("--seeds", type=PositiveInt, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/front_door"), help="the folder of sets and trainings")
    parser.add_argument("--table", type=Path, default=RUNS, help="the table of runs")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # for longseq
    for name in options.sets:
        systems = [system for system in options.systems if system != LEVEL or SETS[name].seconds]
        train(name, systems, options.minutes, options.seeds, options.data, options.runs, options.table)


if __name__ == "__main__":
    main()
