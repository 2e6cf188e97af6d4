"""The training set's mean and deviation, measured once for the same data."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from lightning_fabric.utilities.apply_func import move_data_to_device
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from longseq.encoders import Encoder
from longseq.training.data import lacking

_MOST = 1000  # batches of a stream


def training_inputs(datamodule: Any, device: torch.device) -> Iterator[Any]:
    """Inputs of the training set in batches, in a random order that is the same in every run.

    If the data module fulfils the contract, they are not cropped or augmented as in training. The batches of a stream,
    or of a data set that makes them itself, come as they are, up to 1,000 of them, because a stream may have no end.
    """
    loader: Any = datamodule.train_dataloader()
    is_foreign = lacking(datamodule)
    if is_foreign and (isinstance(loader.dataset, IterableDataset) or loader.batch_size is None):
        batches = islice(loader, _MOST)
    else:
        dataset: Any = loader.dataset if is_foreign else datamodule.splits()["train"]
        order = torch.Generator().manual_seed(0)
        batches = iter(DataLoader(dataset, 256, shuffle=True, generator=order, collate_fn=loader.collate_fn))
    for inputs, *_ in batches:
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
