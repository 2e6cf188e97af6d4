"""The figures of each class."""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from torchmetrics import MetricCollection

from longseq.training.classifier import Classifier
from longseq.training.pictures import draw_by_class
from longseq.training.tensorboard import board_of, show


class ByClass(pl.Callback):
    """Keep what the task's metrics by class say of the last test, over the samples of all ranks, and show them in
    TensorBoard: the images val/by_class and test/by_class.

    Attributes:
        figures: Of each metric of the test, a figure for each class; NaN where a class has none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.figures: dict[str, list[float]] = {}
        self._metrics = MetricCollection({})

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        self._metrics = MetricCollection({})
        if board_of(trainer) is not None:  # nobody would see those of a validation
            self.on_test_start(trainer, pl_module)

    def on_test_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        metrics = MetricCollection(dict(pl_module.task.by_class(pl_module.num_classes)))
        self._metrics = metrics.to(pl_module.device)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Classifier, outputs: Mapping[str, Tensor], *_: Any
    ) -> None:
        if self._metrics:
            measured = pl_module.task.measured(pl_module.head, outputs["outputs"], outputs["labels"])
            self._metrics.update(*measured, logits=outputs["outputs"])

    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        self._show(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        self.figures = self._show(trainer, pl_module, "test")

    def _show(self, trainer: pl.Trainer, model: Classifier, stage: str) -> dict[str, list[float]]:
        if not self._metrics:
            return {}
        computed = self._metrics.compute()  # called on every rank, because it sums over ranks
        # in the task's own order, because a MetricCollection sorts its names
        figures = {name: computed[name].tolist() for name in model.task.by_class(model.num_classes)}
        show(trainer, f"{stage}/by_class", lambda: draw_by_class(figures, model.class_names))
        return figures
