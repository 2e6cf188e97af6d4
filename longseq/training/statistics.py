"""The training set's mean and deviation, measured once for the same content."""

from collections.abc import Iterator
from typing import Any

import torch
from lightning_fabric.utilities.apply_func import move_data_to_device
from torch import Tensor
from torch.utils.data import DataLoader

from longseq.encoders import Encoder
from longseq.training.data import lacking


def training_inputs(datamodule: Any, device: torch.device) -> Iterator[Any]:
    """Inputs of the training set in batches, in a random order that is the same in every run.

    They are not as they are drawn for training, cropped and augmented, but as they are.
    """
    loader: Any = datamodule.train_dataloader()
    dataset: Any = loader.dataset if lacking(datamodule) else datamodule.splits()["train"]
    order = torch.Generator().manual_seed(0)
    for inputs, _ in DataLoader(dataset, 256, shuffle=True, generator=order, collate_fn=loader.collate_fn):
        yield move_data_to_device(inputs, device)


def measure_inputs(encoder: Encoder, datamodule: Any, device: torch.device) -> None:
    """Set an encoder's mean and deviation to those of the training set, or to what is remembered of it."""

    def measure() -> dict[str, Tensor]:
        encoder.measure(training_inputs(datamodule, device))
        return {"mean": encoder.mean.cpu(), "std": encoder.std.cpu()}

    if lacking(datamodule):
        measure()
        return
    settings = {name: getattr(encoder, name) for name in encoder.measured_by}
    statistics = datamodule.remember(f"{type(encoder).__name__} {settings}", measure)
    encoder.set_statistics(statistics["mean"], statistics["std"])
