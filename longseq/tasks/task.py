"""The contract of a task: the meaning of a model's outputs, their loss, and their metrics."""

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

from longseq.arguments import ArgumentError, SettingError, require
from longseq.attention.shard import Shard
from longseq.encoders import Encoder
from longseq.tasks.pooling import Pool, Pooling, make_pooling


class Answer(NamedTuple):
    """A class of a prediction and its probability, or an amount."""

    class_name: str
    probability: float


class Task(ABC):
    """What a Classifier learns: the part that differs from task to task.

    Arguments of the constructor are kept as attributes of the same name, so that a checkpoint can name them.

    Args:
        metrics: Further metrics of validation and test, by the names under which they are logged. Each is a class of
            torchmetrics.classification or torchmetrics.regression, or a dictionary with the class as ``metric`` and
            its arguments. The number of classes is filled in.

    Attributes:
        best: The name of the metric that chooses the best checkpoint and is printed. A sweep compares settings by it
            unless its --metric names another figure.
        mode: Whether the best is the highest (max) or the lowest (min).
        shard: This process's part of the tokens; None if it has all.
        predicts: The content of a prediction: ``classes`` (their probabilities), ``amounts``, or None if nothing is
            predicted. In the last case labels are not used, and samples are not mixed.
        fewest: The smallest possible number of classes.
        names_silence: Whether a prediction may contain no class, so that the events of a recording have gaps.
        is_by_token: Whether the head takes the features of every token even without a pooling of scores.

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
            is_name = isinstance(name, str) and name and "." not in name and not hasattr(MetricCollection({}), name)
            what = f"must have names without a dot such as top5, got {name!r}; choose another"
            require(bool(is_name), "metrics", what)
            _metric_class(name, described)

    def num_outputs(self, num_classes: int) -> int:
        """The number of outputs of the head for an input, or for a token."""
        return num_classes

    def head(self, encoder: Encoder, num_classes: int) -> nn.Module:
        """The layer after the encoder. By default it is linear and starts at zero, so that with any encoder the first
        loss is that of guessing."""
        head = nn.Linear(encoder.dim, self.num_outputs(num_classes))
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return head

    def outputs(
        self, encoder: Any, head: nn.Module, inputs: Any, pooling: Pooling | None = None
    ) -> Float[Tensor, "b outputs"]:
        """The outputs of the model for a batch.

        Args:
            encoder: The encoder.
            head: The layer after the encoder.
            inputs: As the data module yields them.
            pooling: Pools the outputs of the head for every token; None if the encoder pools features instead.
        """
        if pooling is None:
            return head(encoder(inputs))
        tokens, present = encoder.token_features(inputs)
        return pooling(tokens, head(tokens), present)

    def pooling(self, encoder: Encoder, pool: Pool | None) -> Pooling | None:
        """The pooling of the scores of tokens; None if the encoder pools features instead."""
        of_encoder = getattr(encoder, "pool", None)
        what = f"must be left out if the encoder's pool is {of_encoder}, which learns to pool; leave out one of them"
        require(pool is None or of_encoder not in ("gated", "statistics"), "pool", what)
        return make_pooling(pool, encoder.dim)

    @abstractmethod
    def targets(self, labels: Tensor, num_classes: int) -> Float[Tensor, "b classes"]:
        """The labels of a batch as shares of classes, the form that labels of mixed samples have too."""

    @abstractmethod
    def loss(
        self, outputs: Tensor, targets: Tensor, weights: Float[Tensor, " classes"], label_smoothing: float
    ) -> Float[Tensor, ""]:
        """The loss of a training batch.

        Args:
            outputs: Outputs of the head.
            targets: Labels as the data module yields them, or mixed labels in the form of ``targets``.
            weights: The weight of each class.
            label_smoothing: Share of the target that is distributed over all classes.
        """

    def weight(self, outputs: Tensor, targets: Tensor, weights: Float[Tensor, " classes"]) -> Tensor:
        """The number by which ``loss`` divides the sum over a batch, by default the number of samples. With it, the
        losses of several processes are combined to the loss over all their samples."""
        return weights.new_full((), len(targets))

    def distillation(self, outputs: Tensor, taught: Tensor, temperature: float) -> Float[Tensor, ""]:
        """The loss of a training batch against a teacher, times the square of the temperature, so that gradients keep
        their size (Hinton et al., arXiv:1503.02531). By default a task cannot learn from a teacher.

        Args:
            outputs: Outputs of the head.
            taught: Outputs of the teacher.
            temperature: Divides both.
        """
        raise SettingError(f"model.teacher: {type(self).__name__} cannot learn from one; leave it out")

    def outputs_of(self, scores: Float[Tensor, "b classes"], are_probabilities: bool) -> Float[Tensor, "b outputs"]:
        """The outputs that say the same as the scores of a foreign network: logits of all classes, or probabilities."""
        return scores.clamp(min=1e-30).log() if are_probabilities else scores

    @property
    def takes_teacher(self) -> bool:
        """Whether it can learn from a teacher, which means that it overrides ``distillation``."""
        return type(self).distillation is not Task.distillation

    def learn(self, labels: Tensor, class_names: Sequence[str]) -> None:
        """Look at the labels of the training split and the names of the classes, before a training, in every process.
        To save a result in the checkpoint, store it in an attribute that is an argument of the constructor.

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
        """The metrics that every model of this task logs, including ``best``. They take what ``measured`` returns; a
        metric whose ``update`` has an argument ``logits`` also gets the outputs of the model."""

    def training_metrics(self, num_classes: int) -> dict[str, Metric]:
        """The metrics of the training batches, which take what ``measured`` returns; by default ``own_metrics``."""
        return self.own_metrics(num_classes)

    def measured(self, head: nn.Module, predicted: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The arguments of all metrics: by default the predictions and labels of a batch.

        Args:
            head: The layer after the encoder.
            predicted: What ``predicted`` returns.
            labels: As the data module yields them.
        """
        return predicted, labels

    def example(self, num_classes: int) -> tuple[Tensor, Tensor] | None:
        """A small batch, as ``measured`` returns it, to try the user's metrics on; None if there can be no example."""
        labels = torch.arange(min(num_classes, 16))
        return F.one_hot(labels, num_classes).float(), labels

    def user_metrics(self, num_classes: int) -> dict[str, Metric]:
        """The metrics of the argument ``metrics``.

        Raises:
            ValueError: If a metric refuses its arguments, takes another kind of labels, or returns several numbers.
        """
        named = {name: _make_metric(name, described, num_classes) for name, described in (self.metrics or {}).items()}
        if named:
            own = self.own_metrics(num_classes)
            if taken := sorted(named.keys() & {*own, "loss"}):
                what = f"must have new names, got {taken[0]}, which is logged already"
                raise ArgumentError("metrics", f"{what}; choose another")
            _refuse_other_kinds(named, own[self.best], self.example(num_classes))
        return named

    def by_class(self, num_classes: int) -> dict[str, Metric]:
        """Metrics with one figure per class, for the model card; they take what ``measured`` returns."""
        return {}

    def confusion(self, num_classes: int) -> Metric | None:
        """The metric of the confusion matrix, which takes what ``measured`` returns; None if the task has none."""
        return None

    def decision(self, num_classes: int) -> Metric | None:
        """A metric of predictions and ``targets`` over a whole validation, whose result ``decide`` gets; None if there
        is nothing to decide."""
        return None

    def decide(self, head: nn.Module, result: Any) -> None:  # noqa: B027  (most tasks decide nothing)
        """Store in the head what answers need from a validation, such as thresholds; a checkpoint contains the head.

        Args:
            head: The layer after the encoder.
            result: The value of the metric ``decision`` over all samples of the validation.
        """

    def draw_decision(self, head: nn.Module, result: Any, class_names: list[str]) -> Any:
        """A matplotlib figure of the decision, from the arguments of ``decide``; None if there is none."""
        return None

    def draw(self, encoder: Encoder, outputs: Tensor) -> Any:
        """A matplotlib figure of the outputs for a validation batch; None if there is none."""
        return None

    @abstractmethod
    def probabilities(self, outputs: Tensor) -> Float[Tensor, "b classes"]:
        """The predictions, in float32: the probability of each class, or each amount.

        Raises:
            SettingError: If nothing is predicted.
        """

    def predicted(self, outputs: Tensor) -> Tensor:
        """What answers, metrics and figures use: the probabilities, or the outputs if nothing is predicted."""
        return outputs if self.predicts is None else self.probabilities(outputs)

    def evidence(self, outputs: Float[Tensor, "b outputs"]) -> Float[Tensor, "b classes"]:
        """A number for each class whose gradient ``explain`` shows: by default the outputs."""
        return outputs

    def thresholds(self, head: nn.Module, num_classes: int) -> Float[Tensor, " classes"]:
        """The probability from which each class counts as present, in events."""
        return torch.full((num_classes,), 0.5)

    def require(self, *kinds: Literal["classes", "amounts"]) -> None:
        """Check that the task predicts one of these kinds.

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
        """The classes, or the amounts, of one sample; an empty list if no class is present."""

    @abstractmethod
    def names(self, target: Tensor, class_names: list[str]) -> str:
        """A label, or a row of ``targets``, as text for a figure."""

    @abstractmethod
    def counts(self, labels: Tensor, num_classes: int) -> Tensor:
        """The number of samples of each class, (classes,)."""


def binary_distillation(self: Task, outputs: Tensor, taught: Tensor, temperature: float) -> Float[Tensor, ""]:
    """A method ``distillation``: binary cross entropy of logits against a teacher's probabilities."""
    chances = (taught.float() / temperature).sigmoid()
    return temperature**2 * F.binary_cross_entropy_with_logits(outputs.float() / temperature, chances)


def shares_of(target: Tensor, class_names: list[str]) -> list[str]:
    """The classes of a row of ``targets``, the largest share first, with a percentage unless the share is 1."""
    shares = [(float(share), name) for share, name in zip(target, class_names, strict=True) if share > 0.005]
    return [name if share > 0.995 else f"{share:.0%} {name}" for share, name in sorted(shares, reverse=True)]


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
    arguments = dict(described) if isinstance(described, dict) else {}
    arguments.pop("metric", None)
    for argument in {"num_classes", "num_labels"} & set(inspect.signature(kind).parameters):
        arguments.setdefault(argument, num_classes)
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        what = f"must be made of arguments that {kind.__name__} takes, got {name}: {' '.join(str(error).split())}"
        raise ArgumentError("metrics", what) from error


def _refuse_other_kinds(named: dict[str, Metric], own: Metric, example: tuple[Tensor, Tensor] | None) -> None:
    """Try metrics on a small batch that the task's own metric takes. Otherwise a validation would end in a traceback.

    Raises:
        ValueError: If a metric refuses the batch, or returns several numbers.
    """
    if example is None or _trouble(own, *example) is not None:
        return
    for name, metric in named.items():
        trouble = _trouble(metric, *example)
        what = f"must take what the task measures, and give one number, got {name}: {type(metric).__name__} {trouble}"
        require(trouble is None, "metrics", f"{what}; {type(own).__name__} is one that does")


def _trouble(metric: Metric, predicted: Tensor, labels: Tensor) -> str | None:
    """Why a metric does not return one number for a batch; None if it does."""
    probe = metric.clone()
    probe.distributed_available_fn = lambda: False  # other processes may not be building a model now
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
