"""Does the input pipeline keep up? Samples per second of fit: A on real data, B on batches in memory.

    python benchmarks/inputs.py DIR [--steps 40] [--rounds 3]     # DIR holds the data sets, as the README says
    python benchmarks/inputs.py [--device cuda]                   # batches alone, without a model: images per second

Both sides run the same model in the same process, in the order A B A B. No pipeline can beat B: its batches are random
numbers of the same shapes and lengths, made before the clock starts.

Without DIR, batches of random images are augmented as configs/image/folder.yaml does it, in one process, and brought to
the device: images are changed one by one or in batches, by the loader or by the device.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytorch_lightning as pl
import torch
from jsonargparse.typing import PositiveInt
from lightning_fabric.utilities.apply_func import move_data_to_device
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from datamodules import FSDD, MNIST, DataModule, ImageDataModule, ImageFolder, Mirror, Shift
from datamodules.samples import LabelledTensors
from longseq import ImageEncoder, Linformer, SpectrogramEncoder
from longseq.reports.plots import markdown, markdown_row
from longseq.training import Classifier

WARM_UP = 5  # steps that are not counted
IMAGES, SIDE, BATCH = 10_000, 64, 256  # of batches without a model
SECONDS = 1.0
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


class RandomImages(ImageDataModule):
    """Images of the size that image/folder makes of photographs."""

    shape = (3, SIDE, SIDE)

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self.class_names = ["a", "b"]

    def load(self) -> tuple[LabelledTensors, LabelledTensors, LabelledTensors]:
        images = torch.randint(256, (IMAGES, *self.shape), dtype=torch.uint8)
        train = LabelledTensors(images, torch.arange(IMAGES) % 2, digest="random")
        return train, train.subset(torch.arange(2)), train.subset(torch.arange(2))


class Alone(v2.Transform):
    """A transform that changes images one by one."""

    def __init__(self, transform: v2.Transform) -> None:
        super().__init__()
        self.change_one = transform

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.change_one(image)


def images_per_second(data: DataModule, device: torch.device, seconds: float) -> float:
    """Training images of one process that arrive on the device, augmented.

    Args:
        data: The data, after setup.
        device: Where the images must be.
        seconds: How long this is measured.
    """
    strategy = SimpleNamespace(root_device=device)
    data.trainer = SimpleNamespace(strategy=strategy, lightning_module=pl.LightningModule())  # type: ignore[assignment]
    loader, number = data.train_dataloader(), -WARM_UP
    begin = time.perf_counter()
    for batch in chain.from_iterable(repeat(loader)):
        inputs, _ = data.on_after_batch_transfer(move_data_to_device(batch, device), 0)
        number += 1
        if number <= 0 or time.perf_counter() - begin > seconds:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number > 0:
                return number * len(inputs) / (time.perf_counter() - begin)
            begin = time.perf_counter()
    raise AssertionError("the batches never end")


def compare_ways(device: torch.device, rounds: int) -> None:
    """Print the images per second of each way to augment, in turns."""
    augment = [Mirror(), Shift()]
    ways: dict[str, tuple[Sequence[v2.Transform], torch.device | None, int]] = {
        "one by one, by the loader": ([Alone(transform) for transform in augment], None, 0),
        "in batches, by the loader": (augment, None, 0),
        "in batches, by the device": (augment, device, 0),
        "in batches, by the device, from a copy there": (augment, device, 2**40),
    }
    data = RandomImages(batch_size=BATCH)
    data.setup()
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (data.augment, gpu, free_bytes) in ways.items():
            data._gpu, data._free_bytes = (lambda gpu=gpu: gpu), (lambda _, free=free_bytes: free)
            rates[name].append(images_per_second(data, device, SECONDS))
    print(markdown(["augmentation", f"images/s on {device}"], []), end="")
    for name, values in rates.items():
        print(markdown_row([name, f"{statistics.median(values):.0f}"]), end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, nargs="?")
    parser.add_argument("--device", default="cpu", help="without DIR")
    parser.add_argument("--steps", type=PositiveInt, default=40)
    parser.add_argument("--rounds", type=PositiveInt, default=3)
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"argument --steps: must be more than the {WARM_UP} that warm up, got {options.steps}")
    warnings.simplefilter("ignore")
    if options.root is None:
        compare_ways(torch.device(options.device), options.rounds)
        return
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
