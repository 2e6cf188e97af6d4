"""The training set's mean and deviation, measured once for the same data."""

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

    If the data module fulfils the contract, they are not cropped or augmented as in training.
    """
    loader: Any = datamodule.train_dataloader()
    dataset: Any = loader.dataset if lacking(datamodule) else datamodule.splits()["train"]
    order = torch.Generator().manual_seed(0)
    for inputs, _ in DataLoader(dataset, 256, shuffle=True, generator=order, collate_fn=loader.collate_fn):
        yield move_data_to_device(inputs, device)


def measure_inputs(encoder: Encoder, datamodule: Any) -> None:
    """Set an encoder's mean and deviation to the training set's, measured now or remembered by the data module.

    The encoder's device is used: in Lightning's setup the CPU, although the model's ``device`` is its GPU already.
    """

    def measure() -> dict[str, Tensor]:
        encoder.measure(training_inputs(datamodule, encoder.mean.device))
        return {"mean": encoder.mean.cpu(), "std": encoder.std.cpu()}

    if lacking(datamodule):
        measure()
        return
    settings = {name: getattr(encoder, name) for name in encoder.measured_by}
    statistics = datamodule.remember(f"{type(encoder).__name__} {settings}", measure)
    encoder.set_statistics(statistics["mean"], statistics["std"])
