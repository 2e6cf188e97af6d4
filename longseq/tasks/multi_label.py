"""Any number of classes per sample."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MultilabelPrecisionRecallCurve

from longseq.compat.torch import at_least_float32
from longseq.compat.torchmetrics import AUROC, F1, AveragePrecision
from longseq.encoders import Encoder
from longseq.tasks.task import Answer, Task, binary_distillation, shares_of


class MultiLabel(Task):
    """Each sample has any number of classes, or none: binary cross entropy for each class.

    Labels are (b, classes) of 0 and 1, or int64 (b,) if each sample has one class. The metrics are means over the
    classes that occur: the average precision, which chooses the best checkpoint, the area under the ROC curve, and f1
    at the threshold of each class. This is the threshold with the highest f1 in the last validation. The checkpoint
    contains it, and a prediction names the classes whose probability reaches it.

    Args:
        metrics: Further metrics by their names, as Task takes them. They get probabilities that are shifted so that
            every threshold is at 0.5.
    """

    best: ClassVar[str] = "average_precision"
    names_silence: ClassVar[bool] = True

    def head(self, encoder: Encoder, num_classes: int) -> nn.Module:
        head = super().head(encoder, num_classes)
        head.thresholds = nn.Buffer(torch.full((num_classes,), 0.5))  # until a validation
        return head

    def targets(self, labels: Tensor, num_classes: int) -> Float[Tensor, "b classes"]:
        return (F.one_hot(labels, num_classes) if labels.ndim == 1 else labels).float()

    def loss(
        self, outputs: Tensor, targets: Tensor, weights: Float[Tensor, " classes"], label_smoothing: float
    ) -> Float[Tensor, ""]:
        """The weight of a class applies to samples that have it; samples without it have weight 1."""
        outputs = at_least_float32(outputs)
        targets = self.targets(targets, len(weights)).to(outputs)
        smooth = targets * (1 - label_smoothing) + label_smoothing / 2
        return F.binary_cross_entropy_with_logits(outputs, smooth, 1 + (weights.to(outputs) - 1) * targets)

    distillation = binary_distillation

    def outputs_of(self, scores: Float[Tensor, "b classes"], are_probabilities: bool) -> Float[Tensor, "b classes"]:
        return scores.double().logit(1e-12).float() if are_probabilities else scores

    def losses(self, outputs: Float[Tensor, "b classes"], labels: Tensor) -> Float[Tensor, " b"]:
        targets = self.targets(labels, outputs.shape[1])
        return F.binary_cross_entropy_with_logits(outputs.float(), targets, reduction="none").mean(1)

    def own_metrics(self, num_classes: int) -> dict[str, Metric]:
        return {
            "average_precision": AveragePrecision(num_classes),
            "auroc": AUROC(num_classes),
            "f1": F1(num_classes),
        }

    def by_class(self, num_classes: int) -> dict[str, Metric]:
        kinds = {"average precision": AveragePrecision, "auroc": AUROC, "f1": F1}
        return {name: kind(num_classes, by_class=True, validate_args=False) for name, kind in kinds.items()}

    def training_metrics(self, num_classes: int) -> dict[str, Metric]:
        # the others would store all outputs of an epoch; validating arguments would make the host wait for the device
        return {"f1": F1(num_classes, validate_args=False)}

    def measured(self, head: Any, predicted: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities, shifted so that the threshold of each class becomes the next number above 0.5, because
        torchmetrics does not count 0.5 as a prediction. The order within a class does not change."""
        thresholds = head.thresholds.to(predicted.device)
        below = 0.5 * predicted / thresholds
        above = (0.5 + 0.5 * (predicted - thresholds) / (1 - thresholds)).clamp(min=_REACHED)
        moved = torch.where(predicted < thresholds, below, above)
        return moved, self.targets(labels, predicted.shape[1]).long()

    def example(self, num_classes: int) -> tuple[Tensor, Tensor]:
        several = F.one_hot(torch.arange(min(num_classes, 16)), num_classes)
        return several.float(), several

    def thresholds(self, head: Any, num_classes: int) -> Float[Tensor, " classes"]:
        return head.thresholds.cpu()

    def decision(self, num_classes: int) -> Metric:
        return _PrecisionAgainstRecall(num_classes, thresholds=_GRID)

    def decide(self, head: Any, result: Any) -> None:
        precision, recall = (torch.stack(list(curves))[:, :-1] for curves in result[:2])  # the last has no threshold
        f1 = (2 * precision * recall / (precision + recall).clamp(min=1e-9)).nan_to_num(0)  # if no sample reaches it
        for label, of_class in enumerate(f1.tolist()):
            best = max(of_class)
            first = of_class.index(best)
            last = next((step for step in range(first, len(of_class)) if of_class[step] < best), len(of_class)) - 1
            # the middle of the thresholds that are equally good; 0.5 for a class without samples
            head.thresholds[label] = _GRID[(first + last) // 2] if best > 0 else 0.5

    def draw_decision(self, head: Any, result: Any, class_names: list[str]) -> Any:
        """Precision against recall with a dot at the threshold, of the eight classes with the lowest curves."""
        from longseq.encoders.drawing import draw_curves  # matplotlib takes half a second to import
        from longseq.encoders.lettering import drawable

        precision, recall = (torch.stack(list(curves)).cpu() for curves in result[:2])
        # recall falls along a curve; precision is NaN at thresholds that no sample reaches
        areas = -torch.trapezoid(precision.nan_to_num(1), recall, dim=1)
        lowest = areas.argsort()[:8].tolist()
        dots = [round(float(head.thresholds[label]) * _STEPS) - 1 for label in lowest]
        names = drawable(class_names)
        return draw_curves(
            {names[label]: (recall[label], precision[label]) for label in lowest},
            [(recall[label, dot], precision[label, dot]) for label, dot in zip(lowest, dots, strict=True)],
            ("recall", "precision"),
        )

    def probabilities(self, outputs: Float[Tensor, "b classes"]) -> Float[Tensor, "b classes"]:
        return outputs.float().sigmoid()

    def together(self, probabilities: Float[Tensor, "parts classes"]) -> Float[Tensor, " classes"]:
        """The maximum of each class: a class in one part is in the recording."""
        return probabilities.amax(0)

    def answer(self, head: Any, probabilities: Float[Tensor, " classes"], class_names: list[str]) -> list[Answer]:
        thresholds = head.thresholds.tolist()
        named = zip(probabilities.tolist(), class_names, thresholds, strict=True)
        reached = sorted(((share, name) for share, name, threshold in named if share >= threshold), reverse=True)
        return [Answer(name, share) for share, name in reached]

    def names(self, target: Tensor, class_names: list[str]) -> str:
        return class_names[int(target)] if target.ndim == 0 else ", ".join(shares_of(target, class_names)) or "no class"

    def counts(self, labels: Tensor, num_classes: int) -> Int64[Tensor, " classes"]:
        return self.targets(labels, num_classes).sum(0).long()


class _PrecisionAgainstRecall(MultilabelPrecisionRecallCurve):
    """torchmetrics' curves, for targets of 0 and 1 in float32."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds, target.long())


_REACHED = 0.5 + 2**-24  # the next number above 0.5 in float32
_STEPS = 200
_GRID = [step / _STEPS for step in range(1, _STEPS)]  # the thresholds to choose from
