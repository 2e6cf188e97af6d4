"""A task holds all that differs between tasks, so that a new task needs no change of the classifier."""

from collections.abc import Callable
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from sklearn.metrics import r2_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MultilabelAUROC, MultilabelF1Score

from longseq import ImageEncoder, Softmax
from longseq.arguments import SettingError
from longseq.tasks import Answer, MultiLabel, Ordinal, Regression, SingleLabel, Task
from longseq.training import Classifier, MixUp

DIGITS = str(Path(__file__).parents[2] / "configs/image/digits.yaml")


class AnyLabels(Task):
    """A task that only this test knows: a sample may have any number of classes: labels are (b, classes) of 0 and 1."""

    best = "f1"

    def targets(self, labels, num_classes):
        return labels.float()

    def loss(self, outputs, targets, weights, label_smoothing):
        smooth = targets.float() * (1 - label_smoothing) + label_smoothing / 2
        return F.binary_cross_entropy_with_logits(outputs, smooth, weights.expand_as(outputs))

    def losses(self, outputs, labels):
        return F.binary_cross_entropy_with_logits(outputs.float(), labels.float(), reduction="none").mean(1)

    def own_metrics(self, num_classes):
        return {"f1": MultilabelF1Score(num_classes, average="micro"), "auroc": MultilabelAUROC(num_classes)}

    def probabilities(self, outputs):
        return outputs.float().sigmoid()

    def answer(self, head, probabilities, class_names):
        pairs = zip(class_names, probabilities.tolist(), strict=True)
        return [Answer(name, share) for name, share in pairs if share > 0.5]

    def names(self, target, class_names):
        return ", ".join(name for name, is_there in zip(class_names, target, strict=True) if is_there)

    def counts(self, labels, num_classes):
        return labels.sum(0)


class Bars(pl.LightningDataModule):
    """Pictures with a horizontal bar, a vertical bar, both, or neither."""

    def loader(self, seed: int) -> DataLoader:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, 2, (96, 2), generator=generator)
        pictures = 20 * torch.rand(96, 1, 6, 6, generator=generator)
        pictures[:, :, 2] += 200 * labels[:, 0, None, None]
        pictures[:, :, :, 3] += 200 * labels[:, 1, None, None]
        return DataLoader(TensorDataset(pictures, labels), 16)

    def train_dataloader(self) -> DataLoader:
        return self.loader(0)

    def val_dataloader(self) -> DataLoader:
        return self.loader(1)

    test_dataloader = val_dataloader


def fitted(
    task: Task, tmp_path: Path, data: pl.LightningDataModule, **options: object
) -> tuple[Classifier, pl.Trainer]:
    torch.manual_seed(0)
    encoder = ImageEncoder((1, 6, 6), Softmax(), dim=16, depth=1, heads=2)
    model = Classifier(encoder, 2, ["across", "upright"], task, learning_rate=1e-2, **options)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=20, default_root_dir=tmp_path, logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, train_dataloaders=data.train_dataloader(), val_dataloaders=data.val_dataloader())
    return model, trainer


def test_a_task_of_many_labels_trains_tests_and_answers_without_a_change_of_the_classifier(tmp_path: Path) -> None:
    model, trainer = fitted(AnyLabels(), tmp_path, Bars(), mix=MixUp(0.2), label_smoothing=0.01)
    (tested,) = trainer.test(model, Bars().test_dataloader(), verbose=False)
    assert set(tested) == {"test/loss", "test/f1", "test/auroc"}
    assert tested["test/f1"] > 0.95 and tested["test/auroc"] > 0.95
    pictures, labels = next(iter(Bars().test_dataloader()))
    answers = [
        model.task.answer(model.head, row, model.class_names) for row in model.predict_step(pictures, 0).detach()
    ]
    named = [[answer.class_name for answer in of_sample] for of_sample in answers]
    expected = [[name for name, there in zip(model.class_names, row, strict=True) if there] for row in labels.tolist()]
    assert sum(a == b for a, b in zip(named, expected, strict=True)) >= 14


def test_single_label_is_cross_entropy_and_its_names_and_counts() -> None:
    task, outputs, labels = SingleLabel(), torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    weights = torch.tensor([1.0, 2.0, 3.0])
    for smoothing, of_class in ((0.0, weights), (0.1, torch.ones(3))):
        for given in (labels, task.targets(labels, 3)):
            torch.testing.assert_close(
                task.loss(outputs, given, of_class, smoothing),
                F.cross_entropy(outputs, given, of_class, label_smoothing=smoothing),
            )
    torch.testing.assert_close(task.losses(outputs, labels).mean(), F.cross_entropy(outputs, labels))
    torch.testing.assert_close(
        task.loss(outputs, task.targets(labels, 3), torch.ones(3), 0.0), F.cross_entropy(outputs, labels)
    )
    assert task.counts(labels, 4).tolist() == [2, 2, 1, 0]
    assert task.answer(nn.Identity(), torch.tensor([0.1, 0.7, 0.2]), ["a", "b", "c"])[0].class_name == "b"
    assert task.names(torch.tensor(2), ["a", "b", "c"]) == "c"
    assert task.names(torch.tensor([0.25, 0.0, 0.75]), ["a", "b", "c"]) == "75% c + 25% a"


@pytest.mark.parametrize("task", [SingleLabel(), MultiLabel()], ids=["single", "multi"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_bfloat16_outputs_is_computed_in_float32(task: Task, smoothing: float) -> None:
    """A GPU's autocast leaves the logarithms of cross_entropy in bfloat16, which has two values about ln 2."""
    outputs = (0.01 * torch.randn(256, 2, generator=torch.Generator().manual_seed(0))).bfloat16().requires_grad_()
    exact = outputs.detach().double().requires_grad_()
    labels, weights = torch.arange(256) % 2, torch.tensor([1.0, 1.5])
    loss = task.loss(outputs, labels, weights, smoothing)
    expected = task.loss(exact, task.targets(labels, 2).double(), weights.double(), smoothing)
    if isinstance(task, SingleLabel):  # shares of classes are divided by the samples, labels by their weights
        expected = expected * 256 / weights[labels].sum()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    for value in (loss, expected):
        value.backward()
    assert outputs.grad is not None and exact.grad is not None
    torch.testing.assert_close(outputs.grad.double(), exact.grad, rtol=2**-8, atol=0)


def test_r2_of_amounts_far_from_0_is_that_of_scikit_learn() -> None:
    labels = 1e6 + torch.randn(1000, 1, dtype=torch.float64).float()
    predicted = labels + 0.5 * torch.randn(1000, 1)
    explained = Regression().own_metrics(1)["r2"]
    for batch in zip(predicted.split(64), labels.split(64), strict=True):
        explained.update(*batch)
    assert float(explained.compute()) == pytest.approx(r2_score(labels.double(), predicted.double()), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_amounts_keep_their_digits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MixUp, "share", lambda _: 0.75)
    encoder = ImageEncoder((1, 8, 8), Softmax(), dim=16, depth=1, heads=2)
    model = Classifier(encoder, 1, task=Regression(mean=[2000.0], std=[5.0]), mix=MixUp(1e-3)).to(dtype)
    labels = torch.tensor([[1993.0], [1997.0], [2003.0], [2005.0]])
    _, targets = model.mixed(torch.rand(4, 1, 8, 8), labels)
    torch.testing.assert_close(targets, 0.75 * labels + 0.25 * labels.roll(1, 0), rtol=0, atol=1e-3)


@pytest.mark.parametrize("task", [SingleLabel(), Ordinal()])
def test_counts_of_several_labels_a_sample_are_refused_in_one_line(task: Task) -> None:
    with pytest.raises(SettingError, match="give --model.task MultiLabel"):
        task.counts(torch.tensor([[1, 0], [1, 1]]), 2)


def test_what_a_network_gives_to_foreign_classes_is_above_no_grade() -> None:
    task = Ordinal()
    outputs = task.outputs_of(torch.tensor([[0.1, 0.0, 0.0], [0.2, 0.2, 0.4]]), are_probabilities=True)
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.25, 0.25, 0.5]])
    torch.testing.assert_close(task.probabilities(outputs), expected, rtol=0, atol=1e-6)


def test_a_class_without_a_sample_has_no_figure() -> None:
    for metric in SingleLabel().by_class(4).values():
        metric.update(torch.eye(4)[[0, 0, 2, 1]], torch.tensor([0, 1, 1, 1]))
        figures = metric.compute()
        assert figures.isnan().tolist() == [False, False, True, True] and figures[:2].min() > 0


def test_a_sample_has_the_weight_of_its_class_in_the_smoothed_part_too() -> None:
    task, outputs, labels = SingleLabel(), torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    weights = torch.tensor([1.0, 2.0, 3.0])
    of_each = F.cross_entropy(outputs, labels, reduction="none", label_smoothing=0.1)
    expected = (of_each * weights[labels]).sum() / weights[labels].sum()
    torch.testing.assert_close(task.loss(outputs, labels, weights, 0.1), expected)
    mixed = 0.7 * task.targets(labels, 3) + 0.3 * task.targets(labels.flip(0), 3)
    logs = outputs.log_softmax(1)
    sums = 0.9 * (mixed * weights * logs).sum(1) + 0.1 * (mixed * weights).sum(1) * logs.mean(1)
    torch.testing.assert_close(task.loss(outputs, mixed, weights, 0.1), -sums.mean())


def test_weights_and_smooth_labels_together_do_not_make_the_rare_class_every_answer() -> None:
    labels = torch.tensor([0] * 900 + [1] * 99 + [2])
    weights, logits = 1000 / (3 * labels.bincount()), torch.zeros(3, 3, requires_grad=True)  # of samples of each class
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        SingleLabel().loss(logits[labels], labels, weights, 0.1).backward()
        optimizer.step()
    assert logits.argmax(1).tolist() == [0, 1, 2]


def test_metrics_named_in_a_configuration_are_logged_beside_the_tasks_own(command: Callable, tmp_path: Path) -> None:
    """A checkpoint holds these metrics too."""
    metrics = "{top5: {metric: MulticlassAccuracy, top_k: 5, average: micro}, auroc: MulticlassAUROC}"
    small = ["--model.encoder.dim", "8", "--model.encoder.depth", "1", "--trainer.max_steps", "2"]
    done = command("fit", "--config", DIGITS, *small, "--model.task", "SingleLabel", "--model.task.metrics", metrics)
    assert done.code == 0, done.err
    tested = command("test", "--ckpt_path", "runs/digits/0/last.ckpt", "--trainer.enable_progress_bar", "false")
    figures = {line.split(":")[0]: float(line.split(":")[1]) for line in tested.out.strip().splitlines()}
    assert figures.keys() == {"test accuracy", "test auroc", "test f1", "test loss", "test top5"}
    assert figures["test top5"] > figures["test accuracy"]


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (
            "{a: os.system}",
            "model.task.metrics: must be classes of torchmetrics.classification or torchmetrics.regression, got 'os",
        ),
        *(
            (f"{{{name}: MulticlassAUROC}}", "model.task.metrics: must have names without a dot such as top5, got ")
            for name in ("a.b", "keys", "''")
        ),
        *(
            (f"{{{name}: MulticlassAUROC}}", f"model.task.metrics: must have new names, got {name}, which is ")
            for name in ("accuracy", "loss")
        ),
        (
            "{a: {top_k: 5}}",
            "model.task.metrics: must be classes of torchmetrics.classification or torchmetrics.regression, got None",
        ),
        ("{a: {metric: MulticlassAccuracy, topk: 5}}", "model.task.metrics: must be made of arguments that Multiclass"),
        *(
            (
                f"{{x: {metric}}}",
                f"model.task.metrics: must take what the task measures, and give one number, got x: {why}",
            )
            for metric, why in {
                "BinaryAUROC": "BinaryAUROC refuses a batch (",
                "MultilabelAUROC": "MultilabelAUROC refuses a batch (",
                "MulticlassConfusionMatrix": "MulticlassConfusionMatrix gives 100 numbers; MulticlassAccuracy is one",
                "MulticlassROC": "MulticlassROC gives a tuple; MulticlassAccuracy is one that does",
                "{metric: MulticlassF1Score, average: none}": "MulticlassF1Score gives 10 numbers; ",
            }.items()
        ),
    ],
)
def test_a_metric_that_cannot_be_is_one_line(metrics: str, said: str, command: Callable) -> None:
    flags = ["--model.task", "SingleLabel", "--model.task.metrics", metrics]
    done = command("fit", "--config", DIGITS, *flags)
    assert (done.code, done.error.startswith(f"error: {said}")) == (2, True), done.err
