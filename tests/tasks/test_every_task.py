"""Every exported task keeps the promises of tasks/task.py: a new one is tried without a change here, unless its labels
are of a kind of their own."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from onnxruntime import InferenceSession
from PIL import Image
from torch import Tensor
from torchmetrics import MetricCollection

import longseq
from longseq import ImageEncoder, Verma, tasks
from longseq.arguments import SettingError
from longseq.tasks import Masked, MultiLabel, Ordinal, Regression, Task
from longseq.training import Classifier

ROOT = Path(__file__).parents[2]
TASKS = [kind for name in tasks.__all__ if isinstance(kind := getattr(tasks, name), type) and issubclass(kind, Task)]
TASKS.remove(Task)
PREDICTING = [kind for kind in TASKS if kind.predicts is not None]
OF_CLASSES = [kind for kind in PREDICTING if kind.predicts == "classes"]
CLASSES = 5
NAMES = [f"class {number}" for number in range(CLASSES)]


def labels_for(task: Task, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if isinstance(task, MultiLabel):
        return torch.randint(0, 2, (count, CLASSES), generator=generator)
    if task.predicts == "amounts":
        return 40 + 10 * torch.randn(count, CLASSES, generator=generator)
    return torch.arange(count) % CLASSES


def inputs_of(count: int) -> Tensor:
    return torch.randint(256, (count, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def classifier(kind: type[Task], **options) -> Classifier:
    torch.manual_seed(0)
    encoder = ImageEncoder((1, 8, 8), Verma(k=None), patch_size=2, dim=16, depth=1, heads=2)
    encoder.measure([inputs_of(32)])
    task = kind()
    task.learn(labels_for(task, 40), NAMES)
    return Classifier(encoder, CLASSES, NAMES, task, **options)


def trained(kind: type[Task], steps: int = 200, **options) -> Classifier:
    """A classifier that knows 20 inputs by heart."""
    model = classifier(kind, **options).train()
    inputs, labels = inputs_of(20), labels_for(model.task, 20)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model.task.loss(model(inputs), labels, model.loss_weights, 0.0).backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("pool", [None, "avg", "max", "attention"])
def test_the_model_puts_out_as_many_numbers_as_the_task_says_and_everyone_gets_one_form_of_them(kind, pool) -> None:
    model = classifier(kind, pool=pool).eval()
    outputs = model(inputs_of(3))
    if kind is not Masked:
        assert outputs.shape == (3, model.task.num_outputs(CLASSES))
    for given in (outputs, outputs.bfloat16()):
        predicted = model.task.predicted(given)
        if kind.predicts is None:
            assert predicted is given
            continue
        assert predicted.shape == (3, CLASSES) and predicted.dtype == torch.float32
        assert predicted.isfinite().all()
        if kind.predicts == "classes":
            assert predicted.min() >= 0 and predicted.max() <= 1 + 1e-6
    if kind.predicts is not None:
        assert model.task.evidence(outputs).shape == (3, CLASSES)
        assert model.predict_step(inputs_of(3), 0).shape == (3, CLASSES)


@pytest.mark.parametrize("kind", PREDICTING)
def test_the_loss_is_the_mean_of_the_losses_and_of_mixed_samples_a_number_too(kind) -> None:
    task = classifier(kind).task
    labels, outputs = labels_for(task, 12), torch.randn(12, task.num_outputs(CLASSES))
    weights = torch.ones(CLASSES)
    torch.testing.assert_close(task.loss(outputs, labels, weights, 0.0), task.losses(outputs, labels).mean())
    targets = task.targets(labels, CLASSES)
    torch.testing.assert_close(task.loss(outputs, targets, weights, 0.0), task.losses(outputs, labels).mean())
    mixed = 0.3 * targets + 0.7 * targets.roll(1, 0)
    assert task.loss(outputs, mixed, weights, 0.1).isfinite()
    assert all(isinstance(task.names(row, NAMES), str) for row in (labels[0], mixed[0]))


@pytest.mark.parametrize("kind", PREDICTING)
def test_the_loss_of_two_batches_is_that_of_both_with_the_weights_that_the_task_gives_them(kind) -> None:
    task = classifier(kind).task
    labels, outputs = labels_for(task, 12), torch.randn(12, task.num_outputs(CLASSES))
    weights = torch.linspace(0.5, 2, CLASSES)

    def both(part: slice) -> tuple[Tensor, Tensor]:
        given = outputs[part], labels[part], weights
        return task.loss(*given, 0.1), task.weight(*given)

    (first, one), (second, other), (whole, _) = both(slice(0, 4)), both(slice(4, 12)), both(slice(0, 12))
    torch.testing.assert_close((one * first + other * second) / (one + other), whole)


@pytest.mark.parametrize("kind", PREDICTING)
def test_what_a_model_has_learned_is_measured_named_and_drawn(kind) -> None:
    model, before = trained(kind), classifier(kind).eval()
    task, labels = model.task, labels_for(model.task, 20)
    bests = []
    for each in (before, model):
        outputs = each(inputs_of(20)).detach()
        predicted = task.predicted(outputs)
        if (decision := task.decision(CLASSES)) is not None:
            decision.update(predicted, task.targets(labels, CLASSES))
            task.decide(each.head, decision.compute())
            assert task.draw_decision(each.head, decision.compute(), NAMES) is not None
        measured = task.measured(each.head, predicted, labels)
        metrics = MetricCollection(task.own_metrics(CLASSES))
        metrics.update(*measured, logits=outputs)
        bests.append(float(metrics.compute()[task.best]))
    better = max if task.mode == "max" else min
    assert better(bests) == bests[1] != bests[0]
    by_class = MetricCollection(task.by_class(CLASSES))
    by_class.update(*measured, logits=outputs)
    assert all(figures.shape == (CLASSES,) for figures in by_class.compute().values())
    if (confusion := task.confusion(CLASSES)) is not None:
        confusion.update(*measured)
        matrix = confusion.compute()
        assert matrix.sum() == 20
        assert matrix.trace() >= 16
    assert task.counts(labels, CLASSES).shape == (CLASSES,)
    assert task.thresholds(model.head, CLASSES).shape == (CLASSES,)
    torch.testing.assert_close(task.together(predicted[:1].expand(3, -1)), predicted[0])
    if kind.predicts == "classes":
        named = [{answer.class_name for answer in task.answer(model.head, row, NAMES)} for row in predicted]
        rows = task.targets(labels, CLASSES)
        right = [{name for name, there in zip(NAMES, row, strict=True) if there} for row in rows.tolist()]
        assert sum(a == b for a, b in zip(named, right, strict=True)) >= 16


@pytest.mark.parametrize("kind", [kind for kind in PREDICTING if kind().takes_teacher])
def test_a_student_that_says_what_its_teacher_says_has_the_lowest_loss(kind) -> None:
    task = classifier(kind).task
    taught = 3 * torch.randn(6, task.num_outputs(CLASSES), generator=torch.Generator().manual_seed(0))
    same = task.distillation(taught, taught, 2.0)
    assert all(task.distillation(taught + 0.5 * torch.randn_like(taught), taught, 2.0) > same for _ in range(5))


@pytest.mark.parametrize("kind", [kind for kind in TASKS if not kind().takes_teacher])
def test_a_task_without_a_loss_against_a_teacher_refuses_one(kind) -> None:
    with pytest.raises(ValueError, match=f"^teacher must be left out with the task {kind.__name__}, .*cannot learn"):
        classifier(kind, teacher="teacher.ckpt")


@pytest.mark.parametrize("kind", OF_CLASSES)
def test_every_command_takes_a_model_of_every_task(kind, command) -> None:
    fit = ["fit", "--config", ROOT / "configs/image/digits.yaml", "--model.encoder.dim", "16", "--model.encoder.depth"]
    fit += ["1", "--trainer.enable_progress_bar", "false", "--trainer.max_epochs", "8", "--model.task", kind.__name__]
    done = command(*fit, "--experiment", "run")
    assert done.code == 0, done.err
    figure = float(re.search(rf"test {kind.best}: +([0-9.]+)", done.out)[1])
    figures = json.loads(Path("runs/run/0/metrics.json").read_text())
    assert figures[f"test/{kind.best}"] == pytest.approx(figure, abs=1e-4)
    card = Path("runs/run/0/README.md").read_text()
    assert len(re.findall(r"^\| [0-9] \|(?: [0-9.]+ \|)+$", card, re.MULTILINE)) == 10, card

    checkpoint = ["--ckpt_path", "runs/run/0/best.ckpt"]
    model = longseq.load("runs/run/0/best.ckpt")
    model.data.setup("test")
    pixels, _ = next(iter(model.data.test_dataloader()))
    Image.fromarray(pixels[0, 0].numpy()).save("x.png")
    done = command("predict", *checkpoint, "--input", "x.png", "--top", "10", "--out", "x.csv")
    assert done.code == 0, done.err
    rows = list(csv.DictReader(Path("x.csv").read_text().splitlines()))
    (expected,) = model.predict("x.png")
    named = dict(zip(model.class_names, expected.probabilities.tolist(), strict=True))
    assert {row["class"]: float(row["probability"]) for row in rows} == pytest.approx(named, abs=1e-4)
    done = command("explain", *checkpoint, "--input", "x.png", "--out", "x-explained.png")
    assert (done.code, Path("x-explained.png").exists()) == (0, True), done.err

    done = command("export", *checkpoint, "--format", "onnx", "--out", "x.onnx", "--int8", "true")
    assert done.code == 0, done.err
    before = float(re.search(rf"test {kind.best}: ([0-9.]+), with int8", done.out)[1])
    assert before == pytest.approx(figure, abs=2e-3)
    (answers,) = InferenceSession("x.onnx").run(None, {"images": pixels.numpy()})
    np.testing.assert_allclose(answers, model.model.predict_step(pixels, 0).detach(), atol=0.05)  # in int8


def test_ordinal_is_coral_by_its_formula() -> None:
    """-sum over k of log(sigma(s_k)) where y > k, and of log(1 - sigma(s_k)) elsewhere (equation 4 of the paper, whose
    weights are one), here divided by the number of questions; the predicted rank is the number of sigma(s_k) > 0.5."""
    task, labels = Ordinal(), torch.tensor([0, 3, 4, 2])
    slope, bias = torch.randn(4, dtype=torch.float64), torch.tensor([2.0, 0.5, -0.25, -3.0]).double()
    outputs = slope[:, None] + bias
    expected = torch.zeros(())
    for row, label in zip(outputs, labels, strict=True):
        for k, logit in enumerate(row):
            chance = 1 / (1 + (-logit).exp())
            expected = expected - (chance.log() if label > k else (1 - chance).log())
    weights = torch.ones(CLASSES).double()
    torch.testing.assert_close(task.loss(outputs, labels, weights, 0.0), expected / 4 / len(labels))
    ranks, _ = task.measured(None, task.predicted(outputs), labels)
    assert ranks.tolist() == (outputs.sigmoid() > 0.5).sum(1).tolist()
    chances = task.predicted(outputs)
    torch.testing.assert_close(chances.sum(1), torch.ones(4))
    torch.testing.assert_close(chances[:, 3:].sum(1), outputs.sigmoid()[:, 2].float())


def test_ordinal_wants_numbers_in_their_order() -> None:
    Ordinal().learn(torch.arange(3), ["mild", "moderate", "severe"])
    Ordinal().learn(torch.arange(3), ["1", "2", "10"])
    with pytest.raises(SettingError, match=r"^data\.class_names: .* out of theirs; give \[1,2,10\]$"):
        Ordinal().learn(torch.arange(3), ["1", "10", "2"])


def test_regression_learns_in_deviations_and_predicts_in_units() -> None:
    labels = torch.tensor([[10.0, 1000.0], [20.0, 3000.0], [30.0, 2000.0]])
    task = Regression()
    task.learn(labels, ["age", "weight"])
    assert task.mean == pytest.approx([20, 2000])
    assert task.std == pytest.approx(labels.std(0, correction=0).tolist())
    outputs = (labels - labels.mean(0)) / labels.std(0, correction=0)
    torch.testing.assert_close(task.predicted(outputs), labels)
    assert task.losses(outputs, labels).max() < 1e-9
    torch.testing.assert_close(task.losses(torch.zeros(3, 2), labels).mean(), torch.tensor(1.0))
    assert task.names(labels[0], ["age", "weight"]) == "age 10, weight 1000"
    with pytest.raises(SettingError, match="^model.task: Regression learns amounts, and the data has classes; "):
        Regression().learn(torch.arange(3), ["a", "b", "c"])
