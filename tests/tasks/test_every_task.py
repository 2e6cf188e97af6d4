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
from datamodules import DataError
from datamodules.hold_out import hold_out
from datamodules.labels import counts, written
from datamodules.own._table import read_table
from longseq import ImageEncoder, Verma, tasks
from longseq.arguments import SettingError
from longseq.contract.promise import Promise
from longseq.contract.task import CLASSES, NAMES, PROMISES, inputs_of
from longseq.tasks import MultiLabel, Ordinal, Regression, Task
from longseq.training import Classifier

ROOT = Path(__file__).parents[2]
TASKS = [kind for name in tasks.__all__ if isinstance(kind := getattr(tasks, name), type) and issubclass(kind, Task)]
TASKS.remove(Task)
PREDICTING = [kind for kind in TASKS if kind.predicts is not None]
OF_CLASSES = [kind for kind in PREDICTING if kind.predicts == "classes"]


def labels_for(task: Task, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if isinstance(task, MultiLabel):
        return torch.randint(0, 2, (count, CLASSES), generator=generator)
    if task.predicts == "amounts":
        return 40 + 10 * torch.randn(count, CLASSES, generator=generator)
    return torch.arange(count) % CLASSES


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
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.test.__name__)
def test_every_task_keeps_every_promise(kind: type[Task], promise: Promise) -> None:
    promise(kind())


@pytest.mark.parametrize("kind", PREDICTING)
def test_what_a_model_has_learned_is_measured_named_and_drawn(kind) -> None:
    model, before = trained(kind), classifier(kind).eval()
    task, labels = model.task, labels_for(model.task, 20)
    bests = []
    for network in (before, model):
        outputs = network(inputs_of(20)).detach()
        predicted = task.predicted(outputs)
        if (decision := task.decision(CLASSES)) is not None:
            decision.update(predicted, task.targets(labels, CLASSES))
            task.decide(network.head, decision.compute())
            assert task.draw_decision(network.head, decision.compute(), NAMES) is not None
        measured = task.measured(network.head, predicted, labels)
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


def test_every_command_takes_a_model_of_amounts(command, tmp_path: Path) -> None:
    """Grey pictures: the brightness and the height of the edge between two halves can be read off each."""
    drawn = np.random.default_rng(0)
    (tmp_path / "pictures").mkdir()
    rows = []
    for number in range(120):
        brightness, height = drawn.uniform(20, 200), int(drawn.integers(1, 7))
        pixels = np.full((8, 8), brightness, np.uint8)
        pixels[:height] = 255
        Image.fromarray(pixels).save(tmp_path / f"pictures/{number}.png")
        rows.append([f"{number}.png", f"{brightness:.3f}", height])
    with open(tmp_path / "pictures/table.csv", "w", newline="") as file:
        csv.writer(file).writerows([["path", "brightness", "edge"], *rows])
    fit = [
        "fit",
        "--config",
        ROOT / "configs/image/folder.yaml",
        "--data.root",
        "pictures",
        "--data.table",
        "table.csv",
    ]
    fit += ["--trainer.enable_progress_bar", "false", "--trainer.max_epochs", "30", "--data.batch_size", "16"]
    fit += ["--model.encoder.stem", "null", "--model.encoder.patch_size", "2", "--model.encoder.depth", "1"]
    fit += [
        "--model.encoder.dim",
        "16",
        "--model.encoder.positions",
        "learned",
        "--data.augment",
        "[]",
        "--model.mix",
        "null",
    ]
    done = command(*fit, "--model.task", "Regression", "--experiment", "classes")
    assert (done.code, "table.csv: no column label; name it" in done.error) == (3, True), done
    fit += ["--data.amounts", "[brightness,edge]"]
    done = command(*fit, "--experiment", "classes")
    assert (done.code, "model.task: SingleLabel" in done.error and "Regression" in done.error) == (2, True), done.err
    done = command(*fit, "--model.task", "Regression", "--experiment", "run")
    assert done.code == 0, done.err
    figures = json.loads(Path("runs/run/0/metrics.json").read_text())
    assert figures["test/r2"] > 0.8 and figures["test/mae"] < 15
    card = Path("runs/run/0/README.md").read_text()
    assert "2 amounts, trained with longseq (Regression)" in card
    assert re.search(r"^\| edge \| 90 \| 10 \| 20 \| [0-9.]+ \| [0-9.]+ \|$", card, re.MULTILINE), card
    checkpoint = ["--ckpt_path", "runs/run/0/best.ckpt"]
    model = longseq.load("runs/run/0/best.ckpt")
    (prediction,) = model.predict("pictures/0.png")
    assert [answer.class_name for answer in prediction.answers] == ["brightness", "edge"]
    assert prediction.probabilities.tolist() == pytest.approx([float(rows[0][1]), rows[0][2]], abs=40)
    done = command("predict", *checkpoint, "--input", "pictures/0.png", "--out", "x.csv")
    assert done.code == 0, done.err
    written = list(csv.DictReader(Path("x.csv").read_text().splitlines()))
    assert [row["class"] for row in written] == ["brightness", "edge"]
    assert [float(row["probability"]) for row in written] == pytest.approx(prediction.probabilities.tolist(), abs=1e-3)
    done = command("predict", *checkpoint, "--input", "pictures/0.png", "--top", "1")
    assert (done.code, done.error) == (2, "error: top: applies to classes, and Regression predicts none; leave it out")
    with pytest.raises(SettingError, match=r"^model\.task: Regression predicts no classes; "):
        model.predict("pictures/0.png", top=1)
    done = command("explain", *checkpoint, "--input", "pictures/0.png", "--out", "x.png")
    assert (done.code, "edge" in done.out) == (0, True), done.err
    done = command("export", *checkpoint, "--format", "onnx", "--out", "x.onnx", "--tolerance", "1e-2")
    assert done.code == 0, done.err
    done = command(*fit[:-2], "--data.amounts", "[path]")
    assert (done.code, "data.amounts: must be columns of their own" in done.error) == (2, True), done.err


@pytest.mark.parametrize(
    ("cell", "what"), [("tall", "height 'tall' is not a number"), ("nan", "height 'nan' is not a")]
)
def test_a_cell_that_is_no_amount_is_named_with_its_line(cell: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(f"path,height\na.png,1\nb.png,{cell}\n")
    with pytest.raises(DataError, match=rf"table.csv: line 3: {what}"):
        read_table(tmp_path / "table.csv", amounts=["height"])


def test_amounts_are_divided_by_their_size_and_written_as_numbers() -> None:
    labels = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    train, held = hold_out(labels, 0.2, 0)
    tenths = labels[:, 0].argsort().argsort() // 10
    assert tenths[held].bincount(minlength=10).tolist() == [2] * 10
    assert len(train) == 80
    assert written(torch.tensor([[31.5, -2.0]]), ["age", "change"], ";") == ["31.5;-2"]
    assert counts(labels).tolist() == [100, 100]
