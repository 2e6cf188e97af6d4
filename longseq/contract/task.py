"""What every task promises, tested on five classes or amounts."""

import torch
from torch import Tensor
from torchmetrics import MetricCollection

from longseq.attention import Verma
from longseq.contract.promise import promise, require, require_close
from longseq.encoders import ImageEncoder
from longseq.tasks import Task
from longseq.training.classifier import Classifier

CLASSES = 5
NAMES = [f"class {number}" for number in range(CLASSES)]


def drawn(task: Task, count: int = 12) -> tuple[Tensor, Tensor]:
    """Random outputs and labels of some samples."""
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(count, task.num_outputs(CLASSES), generator=generator)
    labels = torch.arange(count) % CLASSES
    if task.predicts == "amounts":
        labels = 40 + 10 * torch.randn(count, CLASSES, generator=generator)
    else:
        try:
            task.losses(outputs, labels)
        except Exception:  # its labels have another form: any number of classes for each sample
            labels = torch.randint(0, 2, (count, CLASSES), generator=generator)
    task.learn(labels, NAMES)
    return outputs, labels


def inputs_of(count: int) -> Tensor:
    return torch.randint(256, (count, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def classifier(task: Task, pool: str | None = None) -> Classifier:
    torch.manual_seed(0)
    encoder = ImageEncoder((1, 8, 8), Verma(k=None), patch_size=2, dim=16, depth=1, heads=2)
    encoder.measure([inputs_of(32)])
    return Classifier(encoder, CLASSES, NAMES, task, pool=pool)  # type: ignore[arg-type]


@promise("a model puts out as many numbers as it says", "return their number from num_outputs, and make such a head")
def as_many_outputs_as_it_says(task: Task) -> None:
    for pool in (None, "avg", "max", "attention") if task.predicts else ():
        outputs = classifier(task, pool).eval()(inputs_of(3))
        expected = 3, task.num_outputs(CLASSES)
        require(outputs.shape == expected, f"with pool {pool} the outputs are {tuple(outputs.shape)}, not {expected}")


@promise(
    "predictions are one finite number in float32 for each class, of any outputs",
    "return (b, num_classes) in float32 from probabilities",
)
def one_number_for_each_class(task: Task) -> None:
    if task.predicts is None:
        return
    outputs, _ = drawn(task)
    for given in (outputs, outputs.bfloat16(), 100 * outputs):
        predicted = task.predicted(given)
        require(predicted.shape == (12, CLASSES), f"{tuple(given.shape)} outputs give {tuple(predicted.shape)}")
        require(predicted.dtype == torch.float32, f"of {given.dtype} they are {predicted.dtype}")
        require(bool(predicted.isfinite().all()), "some are not finite")
        if task.predicts == "classes":
            low, high = map(float, predicted.aminmax())
            require(low >= 0 and high <= 1 + 1e-6, f"probabilities are from {low:g} to {high:g}")
    require(task.evidence(outputs).shape == (12, CLASSES), f"evidence is {tuple(task.evidence(outputs).shape)}")
    require(task.thresholds(task.head(classifier(task).encoder, CLASSES), CLASSES).shape == (CLASSES,), "thresholds")
    equal_parts = task.predicted(outputs)[:1].expand(3, -1)
    require_close(task.together(equal_parts), equal_parts[0], "three equal parts and each of them")


@promise("the loss is the mean of the losses", "divide loss by the number of samples, where weights are 1")
def the_loss_is_the_mean_of_the_losses(task: Task) -> None:
    if task.predicts is None:
        return
    outputs, labels = drawn(task)
    expected = task.losses(outputs, labels).mean()
    for targets in (labels, task.targets(labels, CLASSES)):
        require_close(task.loss(outputs, targets, torch.ones(CLASSES), 0.0), expected, "loss and mean of losses")


@promise("mixed samples have a loss, and a name", "let loss and names take what targets returns, in shares too")
def mixed_samples_have_a_loss(task: Task) -> None:
    if task.predicts is None:
        return
    outputs, labels = drawn(task)
    targets = task.targets(labels, CLASSES)
    mixed = 0.3 * targets + 0.7 * targets.roll(1, 0)
    require(bool(task.loss(outputs, mixed, torch.ones(CLASSES), 0.1).isfinite()), "the loss is not finite")
    for row in (labels[0], mixed[0]):
        require(isinstance(task.names(row, NAMES), str), f"the name of {row.tolist()} is not text")


@promise("the loss of two processes is that of all their samples", "write weight: by what loss divides its sum")
def losses_of_parts_become_that_of_all(task: Task) -> None:
    if task.predicts is None:
        return
    outputs, labels = drawn(task)
    weights = torch.linspace(0.5, 2, CLASSES)
    parts = [(outputs[part], labels[part], weights) for part in (slice(0, 4), slice(4, 12), slice(0, 12))]
    (one, other, whole), shares = [task.loss(*part, 0.1) for part in parts], [task.weight(*part) for part in parts[:2]]
    require_close((one * shares[0] + other * shares[1]) / (shares[0] + shares[1]), whole, "both and the whole loss")


@promise("it is measured by the metric that it calls best", "return it from own_metrics, and let metrics take measured")
def it_is_measured(task: Task) -> None:
    if task.predicts is None:
        return
    outputs, labels = drawn(task, 40)
    head = task.head(classifier(task).encoder, CLASSES)
    measured = task.measured(head, task.predicted(outputs), labels)
    for metrics in (task.own_metrics(CLASSES), task.training_metrics(CLASSES)):
        collection = MetricCollection(dict(metrics))
        collection.update(*measured, logits=outputs)
        figures = collection.compute()
        require(all(value.numel() == 1 for value in figures.values()), f"it gives {figures}")
    require(task.best in task.own_metrics(CLASSES), f"own_metrics has no {task.best}")
    for name, metric in task.by_class(CLASSES).items():
        collection = MetricCollection({name: metric})
        collection.update(*measured, logits=outputs)
        count = collection.compute()[name].numel()
        require(count == CLASSES, f"{name} by class has {count} figures")
    counted = task.counts(labels, CLASSES)
    require(counted.shape == (CLASSES,), f"counts are {tuple(counted.shape)}")
    answers = task.answer(head, task.predicted(outputs)[0], NAMES)
    require({answer.class_name for answer in answers} <= {*NAMES}, f"an answer names {answers}")


@promise("what a teacher says has the lowest loss", "make distillation least where outputs and taught are equal")
def a_teacher_is_learned(task: Task) -> None:
    if not task.takes_teacher:
        return
    taught = 3 * drawn(task, 6)[0]
    same = task.distillation(taught, taught, 2.0)
    for _ in range(5):
        other = task.distillation(taught + 0.5 * torch.randn_like(taught), taught, 2.0)
        require(bool(other > same), f"other outputs have {float(other):g}, and those of the teacher {float(same):g}")


PROMISES = [
    as_many_outputs_as_it_says,
    one_number_for_each_class,
    the_loss_is_the_mean_of_the_losses,
    mixed_samples_have_a_loss,
    losses_of_parts_become_that_of_all,
    it_is_measured,
    a_teacher_is_learned,
]
