"""Classes in an order: grades, stages, ages."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassCohenKappa

from longseq.arguments import SettingError
from longseq.compat.torch import at_least_float32
from longseq.encoders import Encoder
from longseq.tasks.single_label import SingleLabel
from longseq.tasks.task import Answer, binary_distillation


class Ordinal(SingleLabel):
    """Each sample has one of C ordered classes. The model answers C - 1 questions: is the class above the k-th one?

    The questions share one weight vector and have one bias each, s_k = w x + b_k, so that the answers are consistent:
    CORAL (Cao, Mirjalili and Raschka, arXiv:1901.07884). The loss is the binary cross entropy, averaged over questions.
    The predicted class is the number of questions that are answered with yes. The order is that of the class names; if
    this is not the alphabetical one, list them in ``data.class_names``.

    The metrics are the mean absolute error in classes, which chooses the best checkpoint, Cohen's kappa with quadratic
    weights, and the accuracy.

    Args:
        metrics: Further metrics by their names, as Task takes them. They get predicted classes, not probabilities.
    """

    best: ClassVar[str] = "mae"
    mode: ClassVar[Literal["max", "min"]] = "min"

    def num_outputs(self, num_classes: int) -> int:
        return num_classes - 1

    def head(self, encoder: Encoder, num_classes: int) -> nn.Module:
        return _Questions(encoder.dim, self.num_outputs(num_classes))

    def learn(self, labels: Tensor, class_names: Sequence[str]) -> None:
        super().learn(labels, class_names)
        try:
            numbers = [float(name) for name in class_names]
        except ValueError:
            return  # words, whose order only the user knows
        if numbers != sorted(numbers):
            ordered = ",".join(sorted(class_names, key=float))
            first = ", ".join(class_names[:3])
            what = f"the classes of Ordinal have an order, and {first} ... are numbers out of theirs"
            raise SettingError(f"data.class_names: {what}; give [{ordered}]")

    def loss(
        self, outputs: Float[Tensor, "b c"], targets: Tensor, weights: Float[Tensor, " classes"], label_smoothing: float
    ) -> Float[Tensor, ""]:
        """The weight of a sample is that of its class, or the mean over the shares of a mixed one."""
        outputs, weights = at_least_float32(outputs), weights.to(outputs)
        shares = targets.to(outputs) if targets.is_floating_point() else self.targets(targets, len(weights)).to(outputs)
        smooth = shares * (1 - label_smoothing) + label_smoothing / len(weights)
        losses = F.binary_cross_entropy_with_logits(outputs, _above(smooth), reduction="none").mean(1)
        return (losses * (shares @ weights)).sum() / self.weight(outputs, targets, weights)

    def losses(self, outputs: Float[Tensor, "b c"], labels: Tensor) -> Float[Tensor, " b"]:
        above = _above(self.targets(labels, outputs.shape[1] + 1))
        return F.binary_cross_entropy_with_logits(outputs.float(), above, reduction="none").mean(1)

    distillation = binary_distillation

    def outputs_of(self, scores: Float[Tensor, "b classes"], are_probabilities: bool) -> Float[Tensor, "b c"]:
        exact = scores.double()
        exact = exact if are_probabilities else exact.softmax(-1)
        # a network may have further classes, so that the probabilities of these do not sum to 1
        return _above(exact / exact.sum(-1, keepdim=True).clamp(min=1e-30)).logit(1e-12).float()

    def own_metrics(self, num_classes: int) -> dict[str, Metric]:
        return {
            "mae": MeanAbsoluteError(),
            "kappa": MulticlassCohenKappa(num_classes, weights="quadratic", validate_args=False),
            "accuracy": MulticlassAccuracy(num_classes, average="micro", validate_args=False),
        }

    def training_metrics(self, num_classes: int) -> dict[str, Metric]:
        return {"mae": MeanAbsoluteError()}

    def measured(self, head: Any, predicted: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Predicted and true classes."""
        return _median_class(predicted), labels

    def example(self, num_classes: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(min(num_classes, 16))
        return labels, labels

    def probabilities(self, outputs: Float[Tensor, "b c"]) -> Float[Tensor, "b classes"]:
        """The differences of successive answers. These are sorted by size, because early in a training biases may be in
        another order."""
        chances = outputs.float().sigmoid().sort(-1, descending=True).values
        return F.pad(chances, (1, 0), value=1.0) - F.pad(chances, (0, 1))

    def evidence(self, outputs: Float[Tensor, "b c"]) -> Float[Tensor, "b classes"]:
        """The logarithms of the probabilities."""
        return self.probabilities(outputs).clamp(min=1e-30).log()

    def answer(self, head: nn.Module, probabilities: Float[Tensor, " classes"], class_names: list[str]) -> list[Answer]:
        label = int(_median_class(probabilities))
        return [Answer(class_names[label], float(probabilities[label]))]


class _Questions(nn.Module):
    """The logits of C - 1 questions: one weight vector, and one bias per question. All start at zero.

    Args:
        dim: d.
        count: C - 1.
    """

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.bias = nn.Parameter(torch.zeros(count))

    def forward(self, features: Float[Tensor, "*b d"]) -> Float[Tensor, "*b c"]:
        return (features @ self.weight)[..., None] + self.bias


def _median_class(probabilities: Float[Tensor, "*b classes"]) -> Int64[Tensor, "*b"]:
    """The median of the distribution over classes, which is the number of questions that are answered with yes."""
    return (probabilities.cumsum(-1)[..., :-1] < 0.5).sum(-1)


def _above(shares: Float[Tensor, "b classes"]) -> Float[Tensor, "b c"]:
    """The total share of the classes above each class, except the last."""
    return 1 - shares.cumsum(-1)[..., :-1]
