"""The contract of a task: what a model's outputs mean, how they are trained, and how they are measured."""

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
import torchmetrics.classification
import torchmetrics.regression
from jaxtyping import Float
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from longseq.arguments import ArgumentError, SettingError
from longseq.attention.shard import Shard
from longseq.encoders import Encoder
from longseq.tasks.pooling import Pool, Pooling, make_pooling


class Answer(NamedTuple):
    """A class that a prediction names, and its probability."""

    class_name: str
    probability: float


class Task(ABC):
    """What is learned: the part of a Classifier that differs from task to task.

    Arguments of the constructor are kept as attributes of the same name, so that a checkpoint can name them.

    Args:
        metrics: Further metrics of validation and test, by the names under which they are logged. Each is a class of
            torchmetrics.classification or torchmetrics.regression, or a dictionary with the class as ``metric`` and
            its arguments. The number of classes is filled in.

    Attributes:
        best: The name of the metric that chooses the best checkpoint and is printed. A sweep compares settings by it
            unless its --metric names another figure.
        mode: Whether the best is the highest (max) or the lowest (min).
        shard: The share of this process in the tokens; None where it has all.
        predicts: What a prediction holds: ``classes`` (their probabilities), ``amounts``, or None where nothing is
            predicted. Then labels are not learned, and samples are not mixed.
        fewest: The fewest classes that there must be.
        names_silence: Whether a prediction may name no class, so that the events of a recording have gaps.
        is_by_token: Whether the head takes the features of every token, although nothing pools its scores.

    Raises:
        ValueError: If a metric is unknown.

    Example:
        >>> SingleLabel(metrics={"top5": {"metric": "MulticlassAccuracy", "top_k": 5}, "auroc": "MulticlassAUROC"})
    """

    best: ClassVar[str] = "accuracy"
    mode: ClassVar[Literal["max", "min"]] = "max"
    shard: Shard | None = None
    predicts: ClassVar[Literal["classes", "amounts"] | None] = "classes"
    fewest: ClassVar[int] = 2
    names_silence: ClassVar[bool] = False
    is_by_token: ClassVar[bool] = False

    def __init__(self, metrics: dict[str, Any] | None = None) -> None:
        self.metrics = metrics
        for name, described in (metrics or {}).items():
            if not isinstance(name, str) or not name or "." in name or hasattr(MetricCollection({}), name):
                raise ArgumentError(
                    "metrics", f"must have names without a dot such as top5, got {name!r}; choose another"
                )
            _metric_class(name, described)

    def num_outputs(self, num_classes: int) -> int:
        """How many numbers the head puts out for an input, or for a token."""
        return num_classes

    def head(self, encoder: Encoder, num_classes: int) -> nn.Module:
        """The layer behind the encoder. By default it is linear, and starts at zero, so that the first loss is that of
        a guess with any encoder."""
        head = nn.Linear(encoder.dim, self.num_outputs(num_classes))
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return head

    def outputs(
        self, encoder: Any, head: nn.Module, inputs: Any, pooling: Pooling | None = None
    ) -> Float[Tensor, "b outputs"]:
        """The outputs of the model for a batch.

        Args:
            encoder: Makes features of inputs.
            head: The layer behind the encoder.
            inputs: As the data module yields them.
            pooling: Makes the outputs from those of the head for every token; None if the encoder pools its features.
        """
        if pooling is None:
            return head(encoder(inputs))
        tokens, present = encoder.token_features(inputs)
        return pooling(tokens, head(tokens), present)

    def pooling(self, encoder: Encoder, pool: Pool | None) -> Pooling | None:
        """How scores of tokens become outputs; None if the encoder pools its features."""
        return make_pooling(pool, encoder.dim)

    @abstractmethod
    def targets(self, labels: Tensor, num_classes: int) -> Float[Tensor, "b classes"]:
        """The labels of a batch as shares of classes, in which the labels of mixed samples can be written."""

    @abstractmethod
    def loss(
        self, outputs: Tensor, targets: Tensor, weights: Float[Tensor, " classes"], label_smoothing: float
    ) -> Float[Tensor, ""]:
        """The loss of a training batch.

        Args:
            outputs: Outputs of the head.
            targets: Labels as the data module yields them, or mixed labels in the form of ``targets``.
            weights: Weight of each class.
            label_smoothing: Share of the target that is spread over all classes.
        """

    def weight(self, outputs: Tensor, targets: Tensor, weights: Float[Tensor, " classes"]) -> Tensor:
        """By what ``loss`` divides the sum over a batch: by default the number of samples. By it the losses of several
        processes become that of all their samples."""
        return weights.new_full((), len(targets))

    def distillation(self, outputs: Tensor, taught: Tensor, temperature: float) -> Float[Tensor, ""]:
        """How far the outputs of a training batch are from a teacher's, times the temperature's square, so that the
        gradients keep their size (Hinton et al., arXiv:1503.02531). By default a task has no teacher.

        Args:
            outputs: Outputs of the head.
            taught: Those of the teacher.
            temperature: Divides both.
        """
        raise SettingError(f"model.teacher: {type(self).__name__} cannot learn from one; leave it out")

    @property
    def takes_teacher(self) -> bool:
        """Whether it can learn from a teacher: whether it has a ``distillation`` of its own."""
        return type(self).distillation is not Task.distillation

    def learn(self, labels: Tensor, class_names: Sequence[str]) -> None:
        """See the labels of the training split and the names of the classes, before a training; every process does.
        What is kept in attributes that are arguments of the constructor stands in the checkpoint.

        Raises:
            SettingError: If the task cannot learn them.
        """
        if labels.is_floating_point() and self.predicts == "classes":
            what = f"{type(self).__name__} learns classes, and the data has amounts; give --model.task Regression"
            raise SettingError(f"model.task: {what}")

    @abstractmethod
    def losses(self, outputs: Tensor, labels: Tensor) -> Float[Tensor, " b"]:
        """The loss of each sample of an evaluation, without class weights and label smoothing."""

    @abstractmethod
    def own_metrics(self, num_classes: int) -> dict[str, Metric]:
        """The metrics that every model of this task logs, including ``best``; they take what ``measured`` returns, and
        those whose ``update`` has an argument ``logits`` get the outputs of the model there."""

    def training_metrics(self, num_classes: int) -> dict[str, Metric]:
        """The metrics of the training batches, which take what ``measured`` returns; by default ``own_metrics``."""
        return self.own_metrics(num_classes)

    def measured(self, head: nn.Module, predicted: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """What all metrics take: by default the predictions and labels of a batch.

        Args:
            head: The layer behind the encoder.
            predicted: What ``predicted`` returns.
            labels: As the data module yields them.
        """
        return predicted, labels

    def example(self, num_classes: int) -> tuple[Tensor, Tensor] | None:
        """A small batch of the kind that ``measured`` returns, on which the user's metrics are tried; None if only the
        task knows what its metrics take."""
        labels = torch.arange(min(num_classes, 16))
        return F.one_hot(labels, num_classes).float(), labels

    def user_metrics(self, num_classes: int) -> dict[str, Metric]:
        """The metrics that the user has named.

        Raises:
            ValueError: If a metric refuses its arguments, measures another kind of labels, or gives several numbers.
        """
        named = {name: _make_metric(name, described, num_classes) for name, described in (self.metrics or {}).items()}
        if named:
            own = self.own_metrics(num_classes)
            if taken := sorted(named.keys() & {*own, "loss"}):
                what = f"must have names of their own, got {taken[0]}, which is logged already"
                raise ArgumentError("metrics", f"{what}; choose another")
            _refuse_other_kinds(named, own[self.best], self.example(num_classes))
        return named

    def by_class(self, num_classes: int) -> dict[str, Metric]:
        """Metrics with a figure for each class, for the model card; they take what ``measured`` returns."""
        return {}

    def confusion(self, num_classes: int) -> Metric | None:
        """The matrix of how often one class is taken for another, which takes what ``measured`` returns; None if the
        task has no such matrix."""
        return None

    def decision(self, num_classes: int) -> Metric | None:
        """A metric of predictions and of the classes of ``targets``, which ``decide`` needs of a whole validation; None
        if it needs none."""
        return None

    def decide(self, head: nn.Module, result: Any) -> None:  # noqa: B027  (most tasks decide nothing)
        """Set in the head, which a checkpoint holds, what answers need to know of a validation.

        Args:
            head: The layer behind the encoder.
            result: The value of the metric ``decision`` over all samples of the validation.
        """

    def draw_decision(self, head: nn.Module, result: Any, class_names: list[str]) -> Any:
        """A matplotlib figure of what ``decide`` has decided, from the same arguments; None where there is none."""
        return None

    def draw(self, encoder: Encoder, outputs: Tensor) -> Any:
        """A matplotlib figure of what the model puts out for a batch of validation; None where there is none."""
        return None

    @abstractmethod
    def probabilities(self, outputs: Tensor) -> Float[Tensor, "b classes"]:
        """What is predicted of each class, in float32: its probability; of a task that predicts amounts, its amount.

        Raises:
            SettingError: If nothing is predicted.
        """

    def predicted(self, outputs: Tensor) -> Tensor:
        """What everything behind the model takes, from answers to metrics and pictures: the probabilities, or the
        outputs as they are where nothing is predicted."""
        return outputs if self.predicts is None else self.probabilities(outputs)

    def evidence(self, outputs: Float[Tensor, "b outputs"]) -> Float[Tensor, "b classes"]:
        """What speaks for each class, whose gradient ``explain`` shows: by default the outputs."""
        return outputs

    def thresholds(self, head: nn.Module, num_classes: int) -> Float[Tensor, " classes"]:
        """From which probability on each class counts as there, in events."""
        return torch.full((num_classes,), 0.5)

    def require(self, *kinds: Literal["classes", "amounts"]) -> None:
        """Check that it predicts something of these kinds.

        Raises:
            SettingError: If it does not.
        """
        if self.predicts not in kinds:
            remedy = "train from it with --model.init_from"
            raise SettingError(f"model.task: {type(self).__name__} predicts no {kinds[0]}; {remedy}")

    def together(self, probabilities: Float[Tensor, "parts classes"]) -> Float[Tensor, " classes"]:
        """The probabilities of a recording from those of its parts: by default their mean."""
        return probabilities.mean(0)

    @abstractmethod
    def answer(self, head: nn.Module, probabilities: Float[Tensor, " classes"], class_names: list[str]) -> list[Answer]:
        """What a prediction says of one sample; an empty list where no class is there."""

    @abstractmethod
    def names(self, target: Tensor, class_names: list[str]) -> str:
        """How a label, or a row of ``targets``, is written under a picture."""

    @abstractmethod
    def counts(self, labels: Tensor, num_classes: int) -> Tensor:
        """How many samples each class has, (classes,)."""


def binary_distillation(outputs: Tensor, taught: Tensor, temperature: float) -> Float[Tensor, ""]:
    """Binary cross entropy of logits against a teacher's probabilities, as ``Task.distillation`` wants it."""
    chances = (taught.float() / temperature).sigmoid()
    return temperature**2 * F.binary_cross_entropy_with_logits(outputs.float() / temperature, chances)


def shares_of(target: Tensor, class_names: list[str]) -> list[str]:
    """The classes of a row of ``targets``, the largest share first, with shares that are not whole in percent."""
    there = [(float(share), name) for share, name in zip(target, class_names, strict=True) if share > 0.005]
    return [name if share > 0.995 else f"{share:.0%} {name}" for share, name in sorted(there, reverse=True)]


def _metric_class(name: str, described: Any) -> type[Metric]:
    kind = described.get("metric") if isinstance(described, dict) else described
    homes = torchmetrics.classification, torchmetrics.regression
    short = str(kind)
    for home in homes:
        short = short.removeprefix(f"{home.__name__}.")
    for home in homes:
        metric = getattr(home, short, None)
        if isinstance(metric, type) and issubclass(metric, Metric):
            return metric
    what = f"must be classes of torchmetrics.classification or torchmetrics.regression, got {kind!r} for {name}"
    raise ArgumentError("metrics", f"{what}; MulticlassAUROC is one")


def _make_metric(name: str, described: Any, num_classes: int) -> Metric:
    kind = _metric_class(name, described)
    arguments = (
        {key: value for key, value in described.items() if key != "metric"} if isinstance(described, dict) else {}
    )
    for argument in {"num_classes", "num_labels"} & set(inspect.signature(kind).parameters):
        arguments.setdefault(argument, num_classes)
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        what = " ".join(str(error).split())
        raise ArgumentError(
            "metrics", f"must be made of arguments that {kind.__name__} takes, got {name}: {what}"
        ) from error


def _refuse_other_kinds(named: dict[str, Metric], own: Metric, example: tuple[Tensor, Tensor] | None) -> None:
    """Try metrics on a small batch that the task's own metric takes; a validation would end in a traceback.

    Raises:
        ValueError: If one does not take such a batch, or gives several numbers.
    """
    if example is None or _trouble(own, *example) is not None:
        return
    for name, metric in named.items():
        trouble = _trouble(metric, *example)
        if trouble is not None:
            what = "must take what the task measures, and give one number"
            raise ArgumentError(
                "metrics",
                f"{what}, got {name}: {type(metric).__name__} {trouble}; {type(own).__name__} is one that does",
            )


def _trouble(metric: Metric, predicted: Tensor, labels: Tensor) -> str | None:
    """Why a metric has not one number for a batch; None if it has."""
    probe = metric.clone()
    probe.distributed_available_fn = lambda: False  # other processes may build no model now
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes without samples
            probe.update(predicted, labels)
            result = probe.compute()
    except Exception as error:  # torchmetrics raises many kinds
        return f"refuses a batch ({' '.join(str(error).split())})"
    if isinstance(result, Tensor) and result.numel() == 1:
        return None
    return f"gives {result.numel()} numbers" if isinstance(result, Tensor) else f"gives a {type(result).__name__}"
