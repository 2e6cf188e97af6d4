"""Tasks whose answer no single window holds: recordings of ten minutes with calls in them, as tokens of BirdNET.

    python benchmarks/calls.py --data DIR --seconds 60

DIR holds free-spoken-digit-dataset and ESC-50-master. A call is a spoken digit in 3 s of coloured noise; other tokens
are noise, or noise with a clip of ESC-50. BirdNET embeds each 3 s once, and 32 principal components are kept. In the
test, speakers and clips are new. The recordings are class folders in RUNS/TASK, as FeatureFolder reads them.

    who     two bouts of six calls, minutes apart, by one speaker: the same digit, or two digits
    order   a bout of six sixes and one of six noughts, minutes apart: which comes first
    bouts   12 calls, in three bouts or fewer, or in four or more

Systems of longseq have the same seconds of the processor, so that other processes count little; a name with "clock"
means that tokens have their time as one more number. The learning rate with the best validation, of three with seed 0,
has the other seeds. A row is written to docs/results/runs.csv as soon as it is measured, and is not measured again.
"""

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import torch.nn.functional as F
from run_table import RUNS, measure_all, print_tables
from safetensors.torch import load_file, save_file
from sklearn.ensemble import RandomForestClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torchaudio.functional import resample

from datamodules import FeatureFolder
from datamodules.networks import BirdNET
from longseq import Conv1d, Dynamic, Linformer, NoAttention, Softmax, Verma
from longseq.encoders import FeatureEncoder
from longseq.tasks.pooling import Pool
from longseq.training import Classifier

RATES = "1e-3", "3e-3", "1e-2"
NUMBERS = {"train": 800, "val": 200, "test": 400}  # recordings
TOKENS, APART, COMPONENTS = 200, 40, 32  # of a recording; between two bouts; numbers of a token
CALLS, BATCH = 6, 32  # calls of a bout; recordings of a training step
SPEAKERS = {"yweweler": "val", "theo": "test"}
CLASSES = {"who": ("same", "different"), "order": ("nought first", "six first"), "bouts": ("few", "many")}
POOLED, CONV = {"depth": 0}, {"local": Conv1d(9)}
# Of each system its attention, arguments of the encoder, and the pooling of logits.
SYSTEMS: dict[str, tuple[Any, dict[str, Any], Pool | None]] = {
    "windows, highest logit": (NoAttention(), POOLED, "max"),
    "windows, mean logit": (NoAttention(), POOLED, "avg"),
    "max": (NoAttention(), {**POOLED, "pool": "max"}, None),
    "ABMIL": (NoAttention(), {**POOLED, "pool": "gated"}, None),
    "no attention": (NoAttention(), {}, None),
    "convolutions": (NoAttention(), CONV, None),
    "Verma": (Verma(), {}, None),
    "Verma and convolutions": (Verma(), CONV, None),
    "Linformer, Dynamic": (Linformer(16, projection=Dynamic()), {}, None),
    "Linformer, Dynamic, and convolutions": (Linformer(16, projection=Dynamic()), CONV, None),
    "Linformer, Linear": (Linformer(16), {"any_length": False}, None),
    "softmax": (Softmax(), {}, None),
}
CLOCKED = {name + ", clock": SYSTEMS[name] for name in ("max", "ABMIL", "Verma", "Linformer, Dynamic", "softmax")}
POOLERS: dict[str, Any] = {
    "MLP on mean, max and deviation": lambda seed: MLPClassifier(early_stopping=True, random_state=seed),
    "random forest on the same": lambda seed: RandomForestClassifier(300, random_state=seed),
}
Bank = dict[str, torch.Tensor]


def _noise(generator: np.random.Generator, samples: int) -> np.ndarray:
    """Noise of a random colour, with a deviation of 0.01."""
    frequencies = np.arange(samples // 2 + 1).clip(20)
    spectrum = generator.standard_normal((2, len(frequencies))) * frequencies ** -generator.uniform(0, 1)
    noise = np.fft.irfft(spectrum[0] + 1j * spectrum[1], samples)
    return 0.01 * noise / noise.std()


def _sounds(data: Path, samples: int) -> Iterator[tuple[str, np.ndarray]]:
    """(name, 3 s of sound) of each call, called SPLIT/SPEAKER/DIGIT, and of each background, SPLIT/background."""
    generator = np.random.default_rng(0)

    def placed(sound: np.ndarray, low: float, high: float) -> np.ndarray:
        """Somewhere in noise, with low to high times its deviation, as powers of ten."""
        whole, level = _noise(generator, samples), 0.01 * 10 ** generator.uniform(low, high)
        first = generator.integers(samples - len(sound) + 1)
        whole[first : first + len(sound)] += level * sound / (sound.std() + 1e-9)
        return whole

    def read(path: Path) -> np.ndarray:
        sound, rate_hz = soundfile.read(path, dtype="float32")
        return resample(torch.from_numpy(sound), rate_hz, 48_000).numpy()

    for path in sorted((data / "free-spoken-digit-dataset/recordings").glob("*.wav")):
        digit, speaker, _ = path.stem.split("_")
        yield f"{SPEAKERS.get(speaker, 'train')}/{speaker}/{digit}", placed(read(path)[:samples], 0.5, 1)
    for path in sorted((data / "ESC-50-master/audio").glob("*.wav")):
        split, sound = {"4": "val", "5": "test"}.get(path.name[0], "train"), read(path)
        for _ in range(12):
            first = generator.integers(len(sound) - samples + 1)
            yield f"{split}/background", placed(sound[first : first + samples], -0.5, 0.5)
            yield f"{split}/background", _noise(generator, samples)


def bank_of(data: Path, runs: Path) -> Bank:
    """The tokens of all sounds of each name, as principal components of those of the training."""
    path = runs / "bank.safetensors"
    if not path.exists():
        network, tokens = BirdNET(), {}
        for name, sound in _sounds(data, network.window):
            tokens.setdefault(name, []).append(network(torch.from_numpy(sound).float())[0])
        bank = {name: torch.stack(of_name) for name, of_name in tokens.items()}
        train = torch.cat([of_name for name, of_name in bank.items() if name.startswith("train")])
        mean, std = train.mean(0), train.std(0) + 1e-6
        _, scale, directions = torch.linalg.svd((train - mean) / std, full_matrices=False)
        size = min(COMPONENTS, len(scale))
        onto = directions[:size].T * len(train) ** 0.5 / (scale[:size] + 1e-6)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: ((of_name - mean) / std) @ onto for name, of_name in bank.items()}, path)
    return load_file(path)


def recording(bank: Bank, task: str, split: str, label: int, generator: np.random.Generator) -> torch.Tensor:
    """The tokens of a recording, (TOKENS, f)."""

    def drawn(name: str, count: int) -> torch.Tensor:
        return bank[name][torch.from_numpy(generator.integers(len(bank[name]), size=count))]

    tokens = drawn(f"{split}/background", TOKENS)
    calls = [name for name in bank if name.startswith(f"{split}/") and not name.endswith("background")]
    speaker = generator.choice(sorted({name.rpartition("/")[0] for name in calls}))
    digits = [name for name in calls if name.startswith(f"{speaker}/")]
    if task == "who":
        names = list(generator.choice(digits, 2, replace=False)) if label else 2 * [generator.choice(digits)]
        sizes = [CALLS, CALLS]
    elif task == "order":
        names, sizes = [f"{speaker}/{digit}" for digit in ("60" if label else "06")], [CALLS, CALLS]
    else:
        number = int(generator.integers(4, 7) if label else generator.integers(1, 4))
        cuts = np.sort(generator.choice(np.arange(1, 2 * CALLS), number - 1, replace=False))
        names, sizes = list(generator.choice(digits, number)), np.diff([0, *cuts, 2 * CALLS]).tolist()
    # a bout takes two tokens for each call; the rest of the time is divided by chance
    gap = APART if task != "bouts" else 10
    free = TOKENS - 2 * sum(sizes) - gap * (len(sizes) - 1)
    before = np.sort(generator.integers(free + 1, size=len(sizes)))
    for number, (name, size) in enumerate(zip(names, sizes, strict=True)):
        first = before[number] + gap * number + 2 * sum(sizes[:number])
        places = first + np.sort(generator.choice(2 * size, size, replace=False))
        tokens[torch.from_numpy(places)] = drawn(name, size)
    return tokens


def written(bank: Bank, task: str, runs: Path) -> Path:
    """Write the recordings of a task, with and without a clock, and return their folder."""
    folder, clock = runs / task, torch.linspace(-1.7, 1.7, TOKENS)[:, None]
    for seed, (split, number) in enumerate(NUMBERS.items()):
        generator = np.random.default_rng(seed)
        for index in range(number):
            path = folder / split / CLASSES[task][index % 2] / f"{index:04}.safetensors"
            tokens = recording(bank, task, split, index % 2, generator)
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"features": tokens, "clocked": torch.cat([tokens, clock], 1)}, path)
    return folder


def stacked(samples: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of all recordings, (recordings, TOKENS, f), and their labels."""
    return torch.stack([*samples.inputs]), samples.labels


def train(data: FeatureFolder, name: str, rate: float, seconds: float, seed: int) -> dict[str, object]:
    """Train a system of longseq, and return its steps, validation accuracy and test accuracy."""
    torch.manual_seed(seed)
    attention, options, pool = (SYSTEMS | CLOCKED)[name]
    sizes = {"dim": 32, "depth": 1, "heads": 4, "dropout": 0.1, **options}
    encoder = FeatureEncoder(data.num_features, data.most_tokens, attention, **sizes)
    model = Classifier(encoder, data.num_classes, pool=pool)
    inputs, labels = stacked(data.train_set)
    encoder.measure([inputs])
    optimizer, steps = torch.optim.AdamW(model.parameters(), rate, (0.9, 0.98), weight_decay=0.05), 0
    began = time.process_time()
    while (done := (time.process_time() - began) / seconds) < 1:
        for group in optimizer.param_groups:  # the rate follows the clock: a rise, then half a cosine
            group["lr"] = rate * min(done / 0.1 + 0.01, 0.5 + 0.5 * math.cos(math.pi * done))
        chosen = torch.randint(len(labels), (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
    model.eval()
    val, test = (_accuracy(model, *stacked(samples)) for samples in (data.val_set, data.test_set))
    return {"steps": steps, "validation": val, "test": test}


@torch.no_grad()
def _accuracy(model: Classifier, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    answers = torch.cat([model(part).argmax(1) for part in inputs.split(50)])
    return float((answers == labels).float().mean())


def pooled(data: FeatureFolder, name: str, seed: int) -> dict[str, object]:
    """Fit a model of scikit-learn on pooled tokens, and return its validation accuracy and test accuracy."""
    splits = [stacked(samples) for samples in (data.train_set, data.val_set, data.test_set)]
    fitting, val, test = [(torch.cat([x.mean(1), x.amax(1), x.std(1)], 1).numpy(), y.numpy()) for x, y in splits]
    fitted = make_pipeline(StandardScaler(), POOLERS[name](seed)).fit(*fitting)
    return {"validation": float(fitted.score(*val)), "test": float(fitted.score(*test))}


def measure(task: str, folder: Path, table: Path, systems: list[str], seconds: float, seeds: int) -> None:
    """Measure the rows that the table of runs lacks."""
    opened: dict[str, FeatureFolder] = {}

    def figures(name: str, rate: str, seed: int) -> dict[str, object]:
        array = "clocked" if name in CLOCKED else "features"
        if array not in opened:
            opened[array] = FeatureFolder(str(folder), key=array, batch_size=16)
            opened[array].setup("fit")
        data = opened[array]
        if name in POOLERS:
            return pooled(data, name, seed)
        return {"minutes": seconds / 60, **train(data, name, float(rate), seconds, seed)}

    settings = {name: [""] if name in POOLERS else list(RATES) for name in systems}
    experiment = f"calls/{task}/{seconds:g} s"
    measure_all(table, experiment, settings, seeds, figures)
    print_tables(table, experiment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*SYSTEMS, *CLOCKED, *POOLERS]
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--runs", type=Path, default=Path("runs/calls"), help="the folder of tokens and recordings")
    parser.add_argument("--table", type=Path, default=RUNS, help="the table of runs")
    parser.add_argument("--tasks", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--systems", nargs="+", choices=every, default=every)
    parser.add_argument("--seconds", type=float, default=60, help="of the processor, for each training")
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    bank = bank_of(asked.data, asked.runs)
    for task in asked.tasks:
        folder = written(bank, task, asked.runs)
        measure(task, folder, asked.table, asked.systems, asked.seconds, asked.seeds)


if __name__ == "__main__":
    main()
