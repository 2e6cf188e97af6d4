"""One class per sample."""

import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

from longseq.arguments import SettingError
from longseq.compat.torch import at_least_float32
from longseq.compat.torchmetrics import F1OfOne, PrecisionOfOne, RecallOfOne, UnwaitedF1
from longseq.tasks.task import Answer, Task, shares_of


class SingleLabel(Task):
    """Each sample has one class: cross entropy, accuracy (top 1, over samples) and f1 (mean over classes).

    Labels are int64 (b,), from 0; others are an error.

    Args:
        metrics: Further metrics by their names, as Task takes them.
    """

    def targets(self, labels: Tensor, num_classes: int) -> Float[Tensor, "b classes"]:
        return F.one_hot(_one_each(labels), num_classes).float()

    def loss(
        self, outputs: Tensor, targets: Tensor, weights: Float[Tensor, " classes"], label_smoothing: float
    ) -> Float[Tensor, ""]:
        """torch's cross entropy, except that the smoothed part of a target has the weight of the sample's true class.
        In torch it has the weight of each class, so a rare class with a large weight becomes the answer to every
        sample."""
        outputs = at_least_float32(outputs)  # on a GPU, autocast computes cross_entropy's logarithms in bfloat16
        targets = targets.to(outputs) if targets.is_floating_point() else _one_each(targets)
        weights = weights.to(outputs)
        loss = F.cross_entropy(outputs, targets, weights)
        if not label_smoothing:
            return loss
        of_samples = (targets * weights).sum(-1) if targets.is_floating_point() else weights[targets]
        smooth = -(outputs.log_softmax(-1).mean(-1) * of_samples).sum() / self.weight(outputs, targets, weights)
        return (1 - label_smoothing) * loss + label_smoothing * smooth

    def weight(self, outputs: Tensor, targets: Tensor, weights: Float[Tensor, " classes"]) -> Tensor:
        return super().weight(outputs, targets, weights) if targets.is_floating_point() else weights[targets].sum()

    def distillation(self, outputs: Tensor, taught: Tensor, temperature: float) -> Float[Tensor, ""]:
        logs, taught_logs = ((scores.float() / temperature).log_softmax(-1) for scores in (outputs, taught))
        return temperature**2 * F.kl_div(logs, taught_logs, reduction="batchmean", log_target=True)

    def losses(self, outputs: Float[Tensor, "b classes"], labels: Tensor) -> Float[Tensor, " b"]:
        return F.cross_entropy(outputs.float(), _one_each(labels), reduction="none")

    def own_metrics(self, num_classes: int) -> dict[str, Metric]:
        return {
            "accuracy": MulticlassAccuracy(num_classes, average="micro"),
            "f1": MulticlassF1Score(num_classes, average="macro"),
        }

    def training_metrics(self, num_classes: int) -> dict[str, Metric]:
        return {**self.own_metrics(num_classes), "f1": UnwaitedF1(num_classes)}

    def by_class(self, num_classes: int) -> dict[str, Metric]:
        kinds = {"precision": PrecisionOfOne, "recall": RecallOfOne, "f1": F1OfOne}
        return {name: kind(num_classes, by_class=True, validate_args=False) for name, kind in kinds.items()}

    def confusion(self, num_classes: int) -> Metric:
        return MulticlassConfusionMatrix(num_classes, validate_args=False)

    def probabilities(self, outputs: Float[Tensor, "b classes"]) -> Float[Tensor, "b classes"]:
        return outputs.float().softmax(dim=-1)

    def answer(self, head: nn.Module, probabilities: Float[Tensor, " classes"], class_names: list[str]) -> list[Answer]:
        probability, label = probabilities.max(dim=0)
        return [Answer(class_names[int(label)], float(probability))]

    def names(self, target: Tensor, class_names: list[str]) -> str:
        return class_names[int(target)] if target.ndim == 0 else " + ".join(shares_of(target, class_names))

    def counts(self, labels: Int64[Tensor, " n"], num_classes: int) -> Int64[Tensor, " classes"]:
        return _one_each(labels).bincount(minlength=num_classes)


def _one_each(labels: Tensor) -> Int64[Tensor, " b"]:
    if labels.ndim > 1:
        what = "SingleLabel takes one class for each sample, and the data has several; give --model.task MultiLabel"
        raise SettingError(f"model.task: {what}")
    return labels
