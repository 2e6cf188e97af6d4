"""The figures of each class in the test."""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from torchmetrics import MetricCollection

from longseq.training.classifier import Classifier


class ByClass(pl.Callback):
    """Keep what the task's metrics by class say of the last test, over the samples of all ranks.

    Attributes:
        figures: Of each metric, a figure for each class; NaN where a class has none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.figures: dict[str, list[float]] = {}

    def on_test_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        metrics = MetricCollection(dict(pl_module.task.by_class(pl_module.num_classes)))
        self._metrics = metrics.to(pl_module.device)

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: Classifier, outputs: Mapping[str, Tensor], *_: Any
    ) -> None:
        if self._metrics:
            self._metrics.update(*pl_module.task.measured(pl_module.head, outputs["outputs"], outputs["labels"]))

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        if self._metrics:
            computed = self._metrics.compute()
            names = pl_module.task.by_class(pl_module.num_classes)  # a MetricCollection sorts its names
            self.figures = {name: computed[name].tolist() for name in names}
