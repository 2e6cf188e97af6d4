"""What a task decides after each validation, such as thresholds of classes: the checkpoint that follows holds it."""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from longseq.compat.lightning import running_averages
from longseq.training.classifier import Classifier
from longseq.training.tensorboard import show


class Decisions(pl.Callback):
    """Show a task the probabilities and labels of the whole validation, over all ranks, so that it can decide; and what
    it has decided as the image val/decision."""

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        metric = pl_module.task.decision(pl_module.num_classes)
        self._metric = None if metric is None else metric.to(pl_module.device)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Classifier, outputs: Mapping[str, Tensor], *_: Any
    ) -> None:
        if self._metric is not None:
            task, labels = pl_module.task, outputs["labels"]
            labels = task.targets(labels, pl_module.num_classes).long()
            self._metric.update(task.probabilities(outputs["outputs"]), labels)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        if self._metric is not None and not trainer.sanity_checking:
            result = self._metric.compute()
            # which of them the averaging of weights has put into place now depends on the order of the callbacks
            for model in (pl_module, *running_averages(trainer)):
                model.task.decide(model.head, result)
            task, head, names = pl_module.task, pl_module.head, pl_module.class_names
            show(trainer, "val/decision", lambda: task.draw_decision(head, result, names))
