"""Any number of classes per sample: loss, metrics and thresholds against scikit-learn, and the command line."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from pytorch_lightning import Trainer
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score
from torch.nn.functional import logsigmoid
from torch.utils.data import DataLoader, TensorDataset

from longseq import ImageEncoder, Softmax
from longseq.tasks import MultiLabel
from longseq.training import Classifier
from longseq.training.board.by_class import ByClass
from longseq.training.mix import MixUp

SMALL = ["--model.encoder.dim", "16", "--model.encoder.depth", "1", "--model.encoder.heads", "1",
         "--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu",
         "--trainer.devices", "1"]  # fmt: skip
MANY = ["--data.labels_separator", ";", "--model.task", "MultiLabel"]


def head(num_classes: int):
    return MultiLabel().head(ImageEncoder((1, 4, 4), Softmax(), dim=8, depth=1, heads=1), num_classes)


def drawn(seed: int = 0, samples: int = 200, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs that know a little of their labels; the classes are not equally common."""
    generator = torch.Generator().manual_seed(seed)
    chances = torch.linspace(0.05, 0.6, classes)
    labels = (torch.rand(samples, classes, generator=generator) < chances).long()
    return 1.5 * labels - 2 + torch.randn(samples, classes, generator=generator), labels


def test_the_loss_is_binary_cross_entropy_of_each_class_weighted_and_smoothed() -> None:
    outputs, labels = drawn()
    weights, smooth = torch.tensor([1.0, 2.0, 0.5, 3.0]), labels * 0.9 + 0.05
    of_labels = torch.where(labels > 0, weights, 1)  # the samples that lack a class count once
    expected = -(of_labels * (smooth * logsigmoid(outputs) + (1 - smooth) * logsigmoid(-outputs))).mean()
    torch.testing.assert_close(MultiLabel().loss(outputs, labels, weights, 0.1), expected)
    plain = -(labels * logsigmoid(outputs) + (1 - labels) * logsigmoid(-outputs)).mean(1)
    torch.testing.assert_close(MultiLabel().losses(outputs, labels), plain)


def test_a_training_sees_mixed_samples_with_the_shares_of_their_classes(monkeypatch) -> None:
    task, mix = MultiLabel(), MixUp()
    encoder = ImageEncoder((1, 4, 4), Softmax(), dim=8, depth=1, heads=1)
    encoder.measure([torch.rand(8, 1, 4, 4)])
    model = Classifier(encoder, 4, task=task, mix=mix, label_smoothing=0.1)
    pictures, labels = torch.rand(3, 1, 4, 4), torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]])
    seen: list[tuple[torch.Tensor, ...]] = []
    loss = MultiLabel.loss

    def watched(task: MultiLabel, *arguments) -> torch.Tensor:
        seen.append((*arguments[:2], result := loss(task, *arguments)))
        return result

    monkeypatch.setattr(MultiLabel, "loss", watched)
    monkeypatch.setattr(mix, "share", lambda: 0.75)
    Trainer(max_steps=1, accelerator="cpu", barebones=True).fit(model, DataLoader(TensorDataset(pictures, labels), 3))
    ((outputs, shares, result),) = seen
    torch.testing.assert_close(shares, 0.75 * labels + 0.25 * labels[[2, 0, 1]])
    smooth = 0.9 * shares + 0.05
    expected = -(smooth * logsigmoid(outputs) + (1 - smooth) * logsigmoid(-outputs)).mean()
    torch.testing.assert_close(result, expected)


def test_one_class_for_each_sample_is_a_special_case() -> None:
    task, outputs = MultiLabel(), torch.randn(3, 4)
    single, many = torch.tensor([2, 0, 3]), torch.eye(4, dtype=torch.int64)[[2, 0, 3]]
    assert torch.equal(task.losses(outputs, single), task.losses(outputs, many))
    assert task.counts(single, 4).tolist() == task.counts(many, 4).tolist() == [1, 0, 1, 1]


def test_the_metrics_are_those_of_scikit_learn() -> None:
    task, layer = MultiLabel(), head(4)
    outputs, labels = drawn()
    layer.thresholds.copy_(torch.tensor([0.1, 0.3, 0.5, 0.7]))
    metrics = task.own_metrics(4)
    for part in range(0, 200, 40):
        measured = task.measured(layer, task.predicted(outputs[part : part + 40]), labels[part : part + 40])
        for metric in metrics.values():
            metric.update(*measured)
    chances = outputs.double().sigmoid().numpy()
    result = {name: float(metric.compute()) for name, metric in metrics.items()}
    assert result["average_precision"] == pytest.approx(average_precision_score(labels, chances), abs=1e-6)
    assert result["auroc"] == pytest.approx(roc_auc_score(labels, chances), abs=1e-6)
    said = chances >= layer.thresholds.numpy()
    assert result["f1"] == pytest.approx(f1_score(labels, said, average="macro"), abs=1e-6)


@pytest.mark.parametrize("command", ["validate", "test"])
def test_outputs_are_ranked_also_where_their_probabilities_are_all_one(command, monkeypatch) -> None:
    """In float32 the probability of an output above 17 is 1."""
    monkeypatch.setattr(Classifier, "forward", lambda model, inputs: inputs)
    model = Classifier(ImageEncoder((1, 4, 4), Softmax(), dim=8, depth=1, heads=1), 4, task=MultiLabel())
    outputs, labels = drawn()
    outputs += 19
    assert (outputs.sigmoid() == 1).float().mean() > 0.5
    by_class = ByClass()
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[by_class], enable_progress_bar=False)
    loader = DataLoader(TensorDataset(outputs, labels), 40)
    (figures,) = getattr(trainer, command)(model, loader, verbose=False)
    stage = "val" if command == "validate" else command
    for name, scored in {"average_precision": average_precision_score, "auroc": roc_auc_score}.items():
        assert figures[f"{stage}/{name}"] == pytest.approx(scored(labels, outputs), abs=1e-6)
        if stage == "test":
            expected = scored(labels, outputs, average=None)
            assert by_class.figures[name.replace("_", " ")] == pytest.approx(expected, abs=1e-6)


def test_a_class_that_no_sample_has_is_in_no_mean_and_has_no_figure() -> None:
    task, layer = MultiLabel(), head(4)
    outputs, labels = drawn()
    labels[:, 1], labels[:, 3] = 0, 1  # the last one is in all samples, so that only its AUROC is none
    measured = task.measured(layer, task.predicted(outputs), labels)
    of_all = {"average_precision": [0, 2, 3], "auroc": [0, 2], "f1": [0, 2, 3]}
    for name, metric in task.own_metrics(4).items():
        metric.update(*measured)
        by_class = task.by_class(4)[name.replace("_", " ")]
        by_class.update(*measured)
        figures = by_class.compute()
        assert (~figures.isnan()).nonzero()[:, 0].tolist() == of_all[name]
        torch.testing.assert_close(metric.compute(), figures[of_all[name]].mean())
        metric.reset()
        metric.update(measured[0], torch.zeros_like(labels))
        assert metric.compute() == 0


def test_a_threshold_has_the_highest_f1_of_its_class() -> None:
    task, layer = MultiLabel(), head(5)
    outputs, labels = drawn(classes=5)
    labels[:, 4] = 0  # a class without a sample
    metric = task.decision(5)
    metric.update(task.probabilities(outputs), labels)
    task.decide(layer, metric.compute())
    chances = outputs.sigmoid().numpy()
    grid = np.arange(1, 200) / 200
    for label in range(4):
        best = max(f1_score(labels[:, label], chances[:, label] >= threshold) for threshold in grid)
        chosen = float(layer.thresholds[label])
        assert f1_score(labels[:, label], chances[:, label] >= chosen - 1e-6) == pytest.approx(best, abs=1e-6)
    assert layer.thresholds[4] == 0.5


def test_the_curves_that_are_drawn_are_the_eight_lowest(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_curves: list[list[str]] = []
    monkeypatch.setattr("longseq.encoders.drawing.draw_curves", lambda curves, *_: drawn_curves.append(list(curves)))
    task, layer, labels = MultiLabel(), head(10), torch.arange(60)[:, None] % 10 == torch.arange(10)
    chances = 0.2 + 0.6 * labels.float()  # no sample reaches 0.9
    chances[:, 8:] = torch.rand(60, 2, generator=torch.Generator().manual_seed(0)) * 0.5
    decision = task.decision(10)
    decision.update(chances, labels.long())
    task.draw_decision(layer, decision.compute(), list("abcdefghij"))
    assert set(drawn_curves[0][:2]) == {"i", "j"} and len(drawn_curves[0]) == 8


def test_a_class_with_few_samples_has_a_threshold_that_they_reach() -> None:
    layer, task = head(2), MultiLabel()
    decision = task.decision(2)
    decision.update(torch.tensor([[0.6, 0.9], [0.3, 0.2], [0.1, 0.1]]), torch.tensor([[1, 1], [0, 0], [0, 0]]))
    task.decide(layer, decision.compute())
    assert layer.thresholds.tolist() == pytest.approx([0.45, 0.55], abs=0.01)


def test_an_answer_names_the_classes_that_reach_their_thresholds() -> None:
    layer = head(3)
    layer.thresholds.copy_(torch.tensor([0.2, 0.9, 0.5]))
    answers = MultiLabel().answer(layer, torch.tensor([0.3, 0.8, 0.6]), ["a", "b", "c"])
    assert [(name, round(share, 3)) for name, share in answers] == [("c", 0.6), ("a", 0.3)]
    assert MultiLabel().answer(layer, torch.tensor([0.1, 0.8, 0.4]), ["a", "b", "c"]) == []


def test_a_class_that_just_reaches_its_threshold_is_counted_as_it_is_named() -> None:
    layer, task = head(2), MultiLabel()
    outputs, labels = torch.zeros(3, 2), torch.ones(3, 2)
    layer.thresholds.copy_(task.probabilities(outputs)[0])
    metric = task.own_metrics(2)["f1"]
    metric.update(*task.measured(layer, task.predicted(outputs), labels))
    assert metric.compute() == 1
    assert len(task.answer(layer, task.probabilities(outputs)[0], ["a", "b"])) == 2


def test_what_is_in_one_window_is_in_the_recording() -> None:
    of_windows = torch.tensor([[0.1, 0.9, 0.2], [0.3, 0.2, 0.1]])
    assert MultiLabel().together(of_windows).tolist() == pytest.approx([0.3, 0.9, 0.2])


@pytest.fixture
def tones(tmp_path: Path) -> Path:
    """Forty sounds of a low tone, a high tone, both, or neither, and a table of them."""
    generator, folder = np.random.default_rng(0), tmp_path / "tones"
    folder.mkdir()
    rows, time = [], np.arange(1600) / 8000
    for number in range(40):
        there = {"low": number % 2 == 1, "high": number % 4 >= 2}
        sound = 0.02 * generator.standard_normal(1600)
        for name, hertz in (("low", 300), ("high", 2000)):
            sound += 0.3 * there[name] * np.sin(2 * np.pi * hertz * time + generator.uniform(0, 6))
        soundfile.write(folder / f"{number:02}.wav", sound, 8000)
        rows.append((f"{number:02}.wav", ";".join(name for name in there if there[name])))
    write(folder / "labels.csv", rows)
    return folder


def write(path: Path, rows: list[tuple[str, ...]], columns: tuple[str, ...] = ("path", "label")) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def test_a_table_of_several_classes_trains_and_predictions_name_what_is_there(command, tones, tmp_path) -> None:
    fit = ["fit", "--experiment", "tones", "--data", "AudioFolder", "--data.root", tones, "--data.table", "labels.csv",
           "--model.encoder", "SpectrogramEncoder", "--model.encoder.attention", "Verma",
           "--model.encoder.num_mels", "16", "--data.batch_size", "8", "--model.learning_rate", "1e-2",
           *MANY, *SMALL]  # fmt: skip
    done = command(*fit, "--trainer.max_epochs", "15", "--model.class_weights", "balanced")
    assert done.code == 0, done.err
    assert "test average_precision: " in done.out
    figures = json.loads((tmp_path / "runs/tones/0/metrics.json").read_text())
    assert figures["test/average_precision"] > 0.95 and figures["test/f1"] > 0.9
    with open(tmp_path / "runs/tones/0/splits.csv", newline="") as file:
        splits = list(csv.DictReader(file))
    assert {row["label"] for row in splits} == {"", "low", "high", "high;low"}  # in the order of the classes
    assert {row["label"] for row in splits if row["split"] == "test"} >= {"low", "high"}
    checkpoint = tmp_path / "runs/tones/0/best.ckpt"
    thresholds = Classifier.load_from_checkpoint(checkpoint).head.thresholds
    assert thresholds.shape == (2,) and not torch.equal(thresholds, torch.full((2,), 0.5))
    done = command("predict", "--ckpt_path", checkpoint, "--input", tones, "--trainer.enable_progress_bar", "false")
    said: dict[str, set[str]] = {}
    for line in done.out.strip("\n").split("\n"):
        path, name, _ = line.split("\t")
        said.setdefault(Path(path).name, set()).update({name} - {""})
    with open(tones / "labels.csv", newline="") as file:
        expected = {row["path"]: set(row["label"].split(";")) - {""} for row in csv.DictReader(file)}
    assert sum(said[name] == expected[name] for name in expected) >= 36
    done = command(*fit, "--trainer.max_steps", "1", "--model.task", "SingleLabel")
    refused = "SingleLabel takes one class for each sample, and the data has several; give --model.task MultiLabel"
    assert (done.code, done.error) == (2, f"error: model.task: {refused}")


def test_averaged_weights_are_saved_with_the_thresholds_of_their_validation(command, tones, tmp_path: Path) -> None:
    averaging = ["--trainer.callbacks+=EMAWeightAveraging", "--trainer.callbacks.decay", "0.5"]
    done = command(
        "fit", "--experiment", "tones", "--data", "AudioFolder", "--data.root", tones, "--data.table", "labels.csv",
        "--model.encoder", "SpectrogramEncoder", "--model.encoder.attention", "Verma", "--data.batch_size", "8",
        "--model.learning_rate", "1e-2", "--trainer.max_epochs", "3", *averaging, *MANY, *SMALL,
    )  # fmt: skip
    assert done.code == 0, done.err
    for name in ("best", "last"):
        thresholds = Classifier.load_from_checkpoint(tmp_path / f"runs/tones/0/{name}.ckpt").head.thresholds
        assert not torch.equal(thresholds, torch.full((2,), 0.5))
        assert torch.allclose(200 * thresholds, (200 * thresholds).round(), atol=1e-4)  # as they were chosen


def test_several_rows_of_a_clip_are_put_together_and_images_may_have_a_table_too(command, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    rows = []
    for number in range(24):
        Image.new("RGB", (6, 6), (255 * (number % 2), number, 255 * (number % 3 == 0))).save(folder / f"{number}.png")
        rows += [(f"{number}.png", "red")] * (number % 2) + [(f"{number}.png", "blue")] * (number % 3 == 0)
    write(folder / "labels.csv", rows)
    fit = ["fit", "--experiment", "pictures", "--data", "ImageFolder", "--data.root", folder, "--data.table",
           "labels.csv", "--model.encoder", "ImageEncoder", "--model.encoder.attention", "Verma", *SMALL]  # fmt: skip
    done = command(*fit, *MANY, "--trainer.max_epochs", "1")
    assert done.code == 0, done.err
    assert "8 images without a row in labels.csv" in done.err
    with open(tmp_path / "runs/pictures/0/splits.csv", newline="") as file:
        labels = {row["path"]: row["label"] for row in csv.DictReader(file)}
    assert (labels["3.png"], labels["1.png"], labels["6.png"], len(labels)) == ("blue;red", "red", "blue", 16)
    done = command(*fit, "--trainer.max_epochs", "1")
    assert (done.code, "or give data.labels_separator for several classes" in done.error) == (3, True), done.err


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (
            ["--data.labels_separator", ";"],
            2,
            "data.table: must be given with labels_separator, got None; a folder is ",
        ),
        (["--data.labels_separator", "", "--data.table", "t.csv"], 2, "data.labels_separator: must be a text, got ''"),
        (["--data.table", "t.csv"], 3, "line 2: start and end are of sounds; leave them out"),
    ],
)
def test_what_a_table_of_images_cannot_have_is_one_line(flags, code, said, command, tmp_path: Path) -> None:
    write(tmp_path / "t.csv", [("a.png", "x", "1"), ("b.png", "y", "0")], ("path", "label", "start"))
    done = command("fit", "--data", "ImageFolder", "--data.root", tmp_path, "--model.encoder", "ImageEncoder",
                   "--model.encoder.attention", "Verma", *flags, *SMALL)  # fmt: skip
    assert (done.code, said in done.error) == (code, True), done.err


def test_data_with_one_class_for_each_sample_trains_too(command, tmp_path: Path) -> None:
    flags = ["--model.task", "MultiLabel", "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2"]
    done = command("fit", "--config", "image/digits", *flags, "--trainer.default_root_dir", tmp_path)
    assert done.code == 0, done.err
    assert "test average_precision" in done.out
