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
    """Each sample is of one of C classes that have an order: is its class above the first, above the second, ...?

    The C - 1 questions share one weight vector and have a bias each, s_k = w x + b_k, so that the answers agree: CORAL
    (Cao, Mirjalili and Raschka, arXiv:1901.07884). Trained is the binary cross entropy, mean over questions. The
    predicted class is the number of questions that are answered with yes. Its order is that of the class names: if
    these are not in order by the alphabet, ``data.class_names`` lists them.

    The metrics are the mean absolute error in classes, which chooses the best checkpoint, Cohen's kappa with quadratic
    weights, and the accuracy.

    Args:
        metrics: Further metrics by their names, as Task takes them. They take predicted classes, not probabilities.
    """

    best: ClassVar[str] = "mae"
    mode: ClassVar[Literal["max", "min"]] = "min"

    def num_outputs(self, num_classes: int) -> int:
        return num_classes - 1

    def head(self, encoder: Encoder, num_classes: int) -> nn.Module:
        return Questions(encoder.dim, self.num_outputs(num_classes))

    def learn(self, labels: Tensor, class_names: Sequence[str]) -> None:
        super().learn(labels, class_names)
        try:
            numbers = [float(name) for name in class_names]
        except ValueError:
            return  # words, whose order the user knows
        if numbers != sorted(numbers):
            ordered = ",".join(sorted(class_names, key=float))
            what = (
                f"the classes of Ordinal have an order, and {', '.join(class_names[:3])} ... are numbers out of theirs"
            )
            raise SettingError(f"data.class_names: {what}; give [{ordered}]")

    def loss(
        self, outputs: Float[Tensor, "b c"], targets: Tensor, weights: Float[Tensor, " classes"], label_smoothing: float
    ) -> Float[Tensor, ""]:
        """A sample has the weight of its class, and a mixed one the weights of its shares."""
        outputs, weights = at_least_float32(outputs), weights.to(outputs)
        shares = targets.to(outputs) if targets.is_floating_point() else self.targets(targets, len(weights)).to(outputs)
        smooth = shares * (1 - label_smoothing) + label_smoothing / len(weights)
        losses = F.binary_cross_entropy_with_logits(outputs, _above(smooth), reduction="none").mean(1)
        return (losses * (shares @ weights)).sum() / self.weight(outputs, targets, weights)

    def losses(self, outputs: Float[Tensor, "b c"], labels: Tensor) -> Float[Tensor, " b"]:
        above = _above(self.targets(labels, outputs.shape[1] + 1))
        return F.binary_cross_entropy_with_logits(outputs.float(), above, reduction="none").mean(1)

    def distillation(self, outputs: Tensor, taught: Tensor, temperature: float) -> Float[Tensor, ""]:
        """Binary cross entropy against the teacher's answers."""
        return binary_distillation(outputs, taught, temperature)

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
        return median_class(predicted), labels

    def example(self, num_classes: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(min(num_classes, 16))
        return labels, labels

    def probabilities(self, outputs: Float[Tensor, "b c"]) -> Float[Tensor, "b classes"]:
        """The differences of neighbouring answers, in the order of their size: early in a training biases may be out of
        their order."""
        chances = outputs.float().sigmoid().sort(-1, descending=True).values
        return F.pad(chances, (1, 0), value=1.0) - F.pad(chances, (0, 1))

    def evidence(self, outputs: Float[Tensor, "b c"]) -> Float[Tensor, "b classes"]:
        """The logarithms of the probabilities."""
        return self.probabilities(outputs).clamp(min=1e-30).log()

    def answer(self, head: nn.Module, probabilities: Float[Tensor, " classes"], class_names: list[str]) -> list[Answer]:
        label = int(median_class(probabilities))
        return [Answer(class_names[label], float(probabilities[label]))]


class Questions(nn.Module):
    """The logits of C - 1 questions for features: one weight vector, and a bias for each question. They start at zero.

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


def median_class(probabilities: Float[Tensor, "*b classes"]) -> Int64[Tensor, "*b"]:
    """The class that half of the probability lies above at most: as many as questions that are answered with yes."""
    return (probabilities.cumsum(-1)[..., :-1] < 0.5).sum(-1)


def _above(shares: Float[Tensor, "b classes"]) -> Float[Tensor, "b c"]:
    """The share of the classes above each one but the last."""
    return 1 - shares.cumsum(-1)[..., :-1]
