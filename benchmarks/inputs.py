"""Does the input pipeline keep up? Samples per second of fit: A on real data, B on batches in memory.

    python benchmarks/inputs.py DIR [--steps 40] [--rounds 3]     # DIR holds the data sets, as the README says

Both sides run the same model in the same process, in the order A B A B. No pipeline can beat B: its batches are random
numbers of the same shapes and lengths, made before the clock starts.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from jsonargparse.typing import PositiveInt
from torch.utils.data import DataLoader

from datamodules import FSDD, MNIST, DataModule, ImageFolder
from longseq import ImageEncoder, Linformer, SpectrogramEncoder
from longseq.reports.plots import markdown, markdown_row
from longseq.training import Classifier

WARM_UP = 5  # steps that are not counted
SMALL = {"dim": 64, "depth": 4, "heads": 4}


class Clock(pl.Callback):
    """Measures samples per second, from the end of the warm-up to the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, number: int) -> None:
        if trainer.global_step == WARM_UP:
            self.begin = time.perf_counter()
        elif trainer.global_step > WARM_UP:
            self.samples += len(batch[1])
            self.rate = self.samples / (time.perf_counter() - self.begin)


def rate_of(model: Classifier, steps: int, **data: Any) -> float:
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=steps, limit_val_batches=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
    )  # fmt: skip
    trainer.fit(model, **data)
    return clock.rate


def like(batch: Any) -> Any:
    """The batch with random numbers instead of its inputs."""
    inputs, labels = batch
    if isinstance(inputs, dict):
        return {**inputs, "waveforms": torch.randn_like(inputs["waveforms"]).clamp(-1, 1)}, labels
    return torch.randint_like(inputs, 256), labels


def images(data: DataModule, k: int) -> Classifier:
    return Classifier(ImageEncoder(data.shape, Linformer(k, "layerwise"), **SMALL), data.num_classes)


def sounds(data: Any) -> Classifier:
    encoder = SpectrogramEncoder(data.sample_rate_hz, data.seconds, Linformer(32), num_mels=40, **SMALL)
    return Classifier(encoder, data.num_classes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--steps", type=PositiveInt, default=40)
    parser.add_argument("--rounds", type=PositiveInt, default=3)
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"argument --steps: must be more than the {WARM_UP} that warm up, got {options.steps}")
    warnings.simplefilter("ignore")
    root = options.root
    cases: dict[str, tuple[Callable[[], Any], Callable[[Any], Classifier]]] = {
        "FSDD, up to 101 frames": (lambda: FSDD(str(root)), sounds),
        "MNIST, 784 pixels": (lambda: MNIST(str(root)), lambda data: images(data, 64)),
        "ImageFolder (Tiny ImageNet, 16x16), in memory": (
            lambda: ImageFolder(str(root / "tiny-imagenet-200/train"), size=16), lambda data: images(data, 64)
        ),
        "ImageFolder (Tiny ImageNet, 16x16), decoded by one worker": (
            lambda: ImageFolder(str(root / "tiny-imagenet-200/train"), size=16, in_memory=False, num_workers=1),
            lambda data: images(data, 64),
        ),
    }  # fmt: skip
    print(markdown(["data", "fit, samples/s", "in memory, samples/s", "ratio (each round)"], []), end="")
    for name, (make, build) in cases.items():
        data = make()
        data.setup()
        loader = data.train_dataloader()
        batches = []
        while len(batches) < options.steps:
            batches += [like(batch) for batch in loader]
        real, memory = [], []
        for _ in range(options.rounds):
            real.append(rate_of(build(data), options.steps, datamodule=make()))
            model = build(data)
            memory.append(rate_of(model, options.steps, train_dataloaders=DataLoader(batches, batch_size=None)))
        ratios = [a / b for a, b in zip(real, memory, strict=True)]
        per_round = f"**{statistics.median(ratios):.2f}** ({', '.join(f'{ratio:.2f}' for ratio in ratios)})"
        row = [name, f"{statistics.median(real):.0f}", f"{statistics.median(memory):.0f}", per_round]
        print(markdown_row(row), end="", flush=True)


if __name__ == "__main__":
    main()
