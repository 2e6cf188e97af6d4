"""Amounts: ages, distances, counts, scores."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, Metric, R2Score
from torchmetrics.utilities import dim_zero_cat

from longseq.arguments import SettingError, require
from longseq.compat.torch import at_least_float32
from longseq.tasks.task import Answer, Task


class Regression(Task):
    """Each sample has one or more amounts: mean squared error of standardised amounts.

    Labels are float (b, amounts), which the data module reads from the columns ``data.amounts`` of its table. The names
    of these columns are used as class names. The model learns (label - mean) / deviation, with the mean and deviation
    of the training split, which the checkpoint contains, and predicts in the unit of the labels.

    The metrics are the mean absolute error, which chooses the best checkpoint, and R2, the share of explained variance.
    They are means over amounts: if these differ much in size, train one model for each. Mixed samples have mixed
    amounts; class weights and label smoothing are ignored. A teacher is not possible, because its outputs are
    standardised with another mean and deviation.

    Args:
        metrics: Further metrics by their names, as Task takes them, also of torchmetrics.regression.
        mean: The mean of each amount. A training sets it.
        std: The standard deviation of each amount. A training sets it.

    Raises:
        ValueError: If a deviation is not positive, or there are not as many deviations as means.
    """

    best: ClassVar[str] = "mae"
    mode: ClassVar[Literal["max", "min"]] = "min"
    predicts: ClassVar[Literal["classes", "amounts"]] = "amounts"
    fewest: ClassVar[int] = 1

    def __init__(
        self, metrics: dict[str, Any] | None = None, mean: list[float] | None = None, std: list[float] | None = None
    ) -> None:
        super().__init__(metrics)
        is_right = len(mean or []) == len(std or []) and all(deviation > 0 for deviation in std or [])
        require(is_right, "std", f"must be positive, one for each mean, got {std}; leave both out")
        self.mean, self.std = mean, std

    def learn(self, labels: Tensor, class_names: Sequence[str]) -> None:
        if not labels.is_floating_point():
            what = "Regression learns amounts, and the data has classes; name columns of data.table with --data.amounts"
            raise SettingError(f"model.task: {what}")
        exact = labels.double()
        deviations = exact.std(0, correction=0)
        self.mean = exact.mean(0).tolist()
        self.std = torch.where(deviations > 0, deviations, 1).tolist()  # 0 if an amount is the same everywhere

    def targets(self, labels: Tensor, num_classes: int) -> Float[Tensor, "b amounts"]:
        return labels.reshape(len(labels), num_classes)

    def loss(
        self, outputs: Float[Tensor, "b amounts"], targets: Tensor, weights: Tensor, label_smoothing: float
    ) -> Float[Tensor, ""]:
        return self._errors(outputs, targets).square().mean()

    def losses(self, outputs: Float[Tensor, "b amounts"], labels: Tensor) -> Float[Tensor, " b"]:
        return self._errors(outputs, labels).square().mean(1)

    def own_metrics(self, num_classes: int) -> dict[str, Metric]:
        return {"mae": MeanAbsoluteError(), "r2": _Explained()}

    def training_metrics(self, num_classes: int) -> dict[str, Metric]:
        return {"mae": MeanAbsoluteError()}

    def by_class(self, num_classes: int) -> dict[str, Metric]:
        return {"mae": MeanAbsoluteError(num_outputs=num_classes), "r2": _Explained(multioutput="raw_values")}

    def example(self, num_classes: int) -> tuple[Tensor, Tensor]:
        labels = torch.linspace(0, 1, 16)[:, None].expand(-1, num_classes)
        return labels.flip(0), labels

    def decision(self, num_classes: int) -> Metric:
        return _Pairs()

    def draw_decision(self, head: nn.Module, result: tuple[Tensor, Tensor], class_names: list[str]) -> Any:
        """Predicted against true values."""
        from longseq.encoders.drawing import draw_pairs  # matplotlib takes half a second to import

        predicted, labels = result
        return draw_pairs(predicted.cpu(), labels.cpu(), class_names)

    def probabilities(self, outputs: Float[Tensor, "b amounts"]) -> Float[Tensor, "b amounts"]:
        """The amounts, in the unit of the labels."""
        mean, std = self._figures(outputs)
        return outputs.float() * std + mean

    def answer(self, head: nn.Module, probabilities: Float[Tensor, " amounts"], class_names: list[str]) -> list[Answer]:
        return [Answer(name, amount) for name, amount in zip(class_names, probabilities.tolist(), strict=True)]

    def names(self, target: Float[Tensor, " amounts"], class_names: list[str]) -> str:
        return ", ".join(f"{name} {amount:.4g}" for name, amount in zip(class_names, target.tolist(), strict=True))

    def counts(self, labels: Tensor, num_classes: int) -> Tensor:
        return torch.full((num_classes,), len(labels))

    def _figures(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        if self.mean is None:
            return outputs.new_zeros(1, dtype=torch.float32), outputs.new_ones(1, dtype=torch.float32)
        mean, std = torch.tensor([self.mean, self.std], dtype=torch.float32, device=outputs.device)
        return mean, std

    def _errors(self, outputs: Tensor, labels: Tensor) -> Float[Tensor, "b amounts"]:
        mean, std = self._figures(outputs)
        outputs = at_least_float32(outputs)
        return outputs - (labels.reshape(outputs.shape) - mean) / std


class _Explained(R2Score):
    """torchmetrics' R2 in float64, and NaN for fewer than two samples, where torchmetrics raises an error. In float32
    its sums of squares cancel if amounts are far from 0: it says 1.03 for 0.75 if they are 10,000 deviations away."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.set_dtype(torch.float64)

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds.double(), target.double())

    def compute(self) -> Tensor:
        return super().compute() if self.total > 1 else torch.full_like(self.residual, torch.nan).mean(-1)


class _Pairs(Metric):
    """All predictions of an evaluation, with their labels."""

    predicted: list[Tensor]
    labels: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("predicted", [], dist_reduce_fx="cat")
        self.add_state("labels", [], dist_reduce_fx="cat")

    def update(self, predicted: Tensor, labels: Tensor) -> None:
        self.predicted.append(predicted)
        self.labels.append(labels)

    def compute(self) -> tuple[Tensor, Tensor]:
        return dim_zero_cat(self.predicted), dim_zero_cat(self.labels)
