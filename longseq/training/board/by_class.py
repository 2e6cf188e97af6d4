"""The figures of each class."""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from torchmetrics import MetricCollection

from longseq.training.board.pictures import draw_by_class
from longseq.training.board.tensorboard import View, board_of, show
from longseq.training.classifier import Classifier


class ByClass(View):
    """Keep what the task's metrics by class say of the last test, over the samples of all ranks, and show them in
    TensorBoard: the images val/by_class and test/by_class.

    Attributes:
        figures: Of each metric of the test, a figure for each class; NaN where a class has none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.figures: dict[str, list[float]] = {}
        self._metrics = MetricCollection({})

    def begin(self, trainer: pl.Trainer, model: Classifier, stage: str) -> None:
        is_shown = stage == "test" or board_of(trainer) is not None  # nobody would see those of a validation
        metrics = model.task.by_class(model.num_classes) if is_shown else {}
        self._metrics = MetricCollection(dict(metrics)).to(model.device)

    def see(self, trainer: pl.Trainer, model: Classifier, seen: Mapping[str, Tensor], batch: Any, number: int) -> None:
        if self._metrics:
            measured = model.task.measured(model.head, seen["predicted"], seen["labels"])
            self._metrics.update(*measured, logits=seen["outputs"])

    def end(self, trainer: pl.Trainer, model: Classifier, stage: str) -> None:
        figures: dict[str, list[float]] = {}
        if self._metrics:
            computed = self._metrics.compute()  # called on every rank, because it sums over ranks
            # in the task's own order, because a MetricCollection sorts its names
            figures = {name: computed[name].flatten().tolist() for name in model.task.by_class(model.num_classes)}
            show(trainer, f"{stage}/by_class", lambda: draw_by_class(figures, model.class_names))
        if stage == "test":
            self.figures = figures
