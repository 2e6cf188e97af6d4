"""What a task decides after each validation, such as thresholds of classes. The next checkpoint holds it."""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from longseq.compat.lightning import running_averages
from longseq.training.board.tensorboard import View, show
from longseq.training.classifier import Classifier


class Decisions(View):
    """Let a task decide from the predictions and labels of the whole validation, on all ranks. Log its decision as the
    image val/decision."""

    def begin(self, trainer: pl.Trainer, model: Classifier, stage: str) -> None:
        metric = model.task.decision(model.num_classes) if stage == "val" else None
        self._metric = None if metric is None else metric.to(model.device)

    def see(self, trainer: pl.Trainer, model: Classifier, seen: Mapping[str, Tensor], batch: Any, number: int) -> None:
        if self._metric is not None:
            self._metric.update(seen["predicted"], model.task.targets(seen["labels"], model.num_classes))

    def end(self, trainer: pl.Trainer, model: Classifier, stage: str) -> None:
        if self._metric is not None and not trainer.sanity_checking:
            result = self._metric.compute()
            # any of these may hold the model's weights now, depending on the order of the callbacks
            for weights in (model, *running_averages(trainer)):
                weights.task.decide(weights.head, result)
            show(trainer, "val/decision", lambda: model.task.draw_decision(model.head, result, model.class_names))
