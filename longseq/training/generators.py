"""Save and restore the states of all random number generators, so that a resumed training draws the same numbers."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.distributed as dist

from longseq.compat.torchmetrics import restore_states, state_of
from longseq.training.classifier import Classifier
from longseq.training.devices.processes import copies, data_rank


class GeneratorStates(pl.Callback):
    """Save the states of all random number generators in the checkpoint, and restore them.

    There is one set of states for each rank with its own samples.

    The training metrics of an unfinished epoch are saved and restored too. Generators are restored when the first batch
    starts, because the setup of a training draws random numbers. In a new training each rank with its own samples draws
    its own numbers; otherwise the samples of all ranks would get the same noise. If the number of ranks has changed, a
    training resumes with new numbers, and with the metrics of all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._restore: dict[str, Any] | None = None
        self._metrics: list[dict[str, Any]] = []

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Classifier, checkpoint: dict[str, Any]) -> None:
        # a resumed training may validate and save before its first batch, and thus before generators are restored
        mine = {"generators": self._restore or _generator_states(), "metrics": _metric_states(pl_module)}
        of_ranks: list[Any] = [mine] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(of_ranks, mine)
        checkpoint["ranks"] = of_ranks[:: copies(trainer)]

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: Classifier, checkpoint: dict[str, Any]) -> None:
        of_ranks = checkpoint.get("ranks") or []
        rank, ranks = data_rank(trainer), trainer.world_size // copies(trainer)
        self._restore = of_ranks[rank]["generators"] if len(of_ranks) == ranks else None
        self._metrics = [of_rank["metrics"] for of_rank in of_ranks[rank::ranks]]

    def on_train_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        for name, metric in _train_metrics(pl_module):
            restore_states(metric, [metrics[name] for metrics in self._metrics], pl_module.device)
        self._metrics = []
        if self._restore is None and data_rank(trainer) > 0:
            torch.manual_seed(torch.initial_seed() + data_rank(trainer))

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._restore is not None:
            _restore_generators(self._restore)
            self._restore = None


def _generator_states() -> dict[str, Any]:
    """The states of Python's, NumPy's, torch's and the device's generators, as plain types and tensors."""
    numpy_state: Mapping[str, Any] = np.random.get_state(legacy=False)  # type: ignore[assignment]
    numpy_plain = {**numpy_state, "state": {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}}
    version, internal, gauss = random.getstate()
    return {
        "python": [version, list(internal), gauss],
        "numpy": numpy_plain,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _restore_generators(states: dict[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    key = np.array(states["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state({**states["numpy"], "state": {**states["numpy"]["state"], "key": key}})
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())


def _metric_states(model: Classifier) -> dict[str, dict[str, Any]]:
    return {name: state_of(metric) for name, metric in _train_metrics(model)}


def _train_metrics(model: Classifier) -> Any:
    return model.train_metrics.items(keep_base=True, copy_state=False)
