"""One training step and one prediction of the largest bags: 100,000 tiles of a slide, and a week of BirdNET's tokens.

    python benchmarks/bags.py
    python benchmarks/bags.py --precision bf16-mixed

Each row starts a process of its own, which reads a bag of 1,024 features from an .h5 file as FeatureFolder does, and
then trains the model of configs/feature/bags.yaml on it. Seconds are those of the processor, so that other processes
count little: with one thread they are the time on an idle core. The memory is the peak of the process, in GiB.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import yaml

from datamodules import FeatureFolder
from longseq import Verma
from longseq.encoders import FeatureEncoder
from longseq.training import Classifier
from longseq.training.throughput import timed

ROWS = {"a slide": (100_000, True), "a week of BirdNET": (201_600, False)}
_CONFIG = Path(__file__).parents[1] / "configs/feature/bags.yaml"
_FEATURES = 1024
_BLOCK = 10_000  # tokens that are written at once, so that the file takes no memory


def write_bag(path: Path, num_tokens: int, has_coordinates: bool) -> None:
    generator = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        features = file.create_dataset("features", (num_tokens, _FEATURES), "f4")
        for start in range(0, num_tokens, _BLOCK):
            shape = min(_BLOCK, num_tokens - start), _FEATURES
            features[start : start + _BLOCK] = generator.standard_normal(shape, np.float32)
        if has_coordinates:
            file["coords"] = 512 * np.stack(np.divmod(np.arange(num_tokens), 400), 1)
        else:
            file.attrs["token_seconds"] = 3.0


def measured(path: Path, num_tokens: int, has_coordinates: bool, act: str, precision: str) -> dict[str, float]:
    """Seconds to read the bag and to act on it in this process, and its peak memory so far in GiB."""
    torch.manual_seed(0)
    described = yaml.safe_load(_CONFIG.read_text())["model"]
    sizes = described["encoder"]["init_args"]
    attention = Verma(**sizes.pop("attention")["init_args"])
    times = {"num_coordinates": 2} if has_coordinates else {"token_seconds": 3.0}
    model = Classifier(
        FeatureEncoder(_FEATURES, num_tokens, attention, **times, **sizes), 2, pool=described.get("pool")
    )
    # else the first step would measure the bag, in float64
    model.encoder.set_statistics(model.encoder.mean, model.encoder.std)
    data = FeatureFolder(
        str(path.parent), coordinates=has_coordinates, num_features=_FEATURES, most_tokens=num_tokens, token_seconds=0
    )
    reading: list[float] = []
    acting: list[float] = []
    bf16 = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")
    with timed(reading, "cpu", time.process_time):
        batch: Any = data.samples_of([], torch.zeros(0, dtype=torch.int64)).collate([data.read(path)])
    if act == "step":
        optimizer = torch.optim.AdamW(model.train().parameters())
        with timed(acting, "cpu", time.process_time):
            with bf16:
                loss = torch.nn.functional.cross_entropy(model(batch), torch.tensor([1]))
            loss.backward()
            optimizer.step()
    else:
        with timed(acting, "cpu", time.process_time), torch.inference_mode(), bf16:
            model.eval().predict_step(batch, 0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"read (s)": reading[0], f"{act} (s)": acting[0], "peak (GiB)": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, help="tokens of each bag, for a shorter try")
    parser.add_argument("--precision", choices=["32", "bf16-mixed"], default="32")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child is not None:
        path, *rest = json.loads(asked.child)
        print(json.dumps(measured(Path(path), *rest)))
        return
    for name, (num_tokens, has_coordinates) in ROWS.items():
        num_tokens = asked.tokens or num_tokens
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "bag.h5")
            write_bag(path, num_tokens, has_coordinates)
            for act in ("step", "prediction"):
                child = json.dumps([str(path), num_tokens, has_coordinates, act, asked.precision])
                command = [sys.executable, __file__, "--child", child]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                figures = json.loads(done.stdout.splitlines()[-1])
                listed = ", ".join(f"{what} {value:.2f}" for what, value in figures.items())
                print(f"{name}, {num_tokens} tokens of {_FEATURES}: {listed}", flush=True)


if __name__ == "__main__":
    main()
