"""The model card: its figures are those of the run, and it says what the model is for."""

import json
import math
import re
import subprocess
from pathlib import Path

import pytest
import soundfile
import torch
from huggingface_hub import ModelCard
from matplotlib.text import Text
from PIL import Image

import longseq
from longseq.deploy.card import _classes, _draw
from longseq.reports.interval import wilson
from longseq.training.classifier import model_and_data

pytestmark = pytest.mark.draws

SMALL = ["--model.encoder.dim", "16", "--model.encoder.depth", "1", "--trainer.accelerator", "cpu"]


def rows_of(card: str, header: str) -> list[list[str]]:
    """The rows of the table whose header begins so."""
    lines = card[card.index(f"| {header} |") :].split("\n\n")[0].split("\n")[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_figures_are_those_of_the_run(digits_run: Path) -> None:
    card, metrics = (digits_run / "README.md").read_text(), json.loads((digits_run / "metrics.json").read_text())
    named = {name.replace(" ", "/", 1): float(value) for name, value in rows_of(card, "figure")}
    assert named == {name: pytest.approx(value, abs=1e-4) for name, value in metrics.items()}
    accuracy, low, high = map(
        float, re.search(r"\*\*Test accuracy: (.+)\*\* on 359 samples \(95 % interval (.+) to (.+)\)", card).groups()
    )
    assert accuracy == pytest.approx(metrics["test/accuracy"], abs=1e-4)
    assert (low, high) == pytest.approx(wilson(round(accuracy * 359), 359), abs=1e-3)


def test_the_figures_of_each_class_are_those_of_its_predictions(digits_run: Path) -> None:
    model, data = model_and_data(digits_run / "best.ckpt")
    data.setup("test")
    inputs, labels = map(torch.cat, zip(*data.test_dataloader(), strict=True))
    with torch.no_grad():
        predicted = model(inputs).argmax(1)
    rows = rows_of((digits_run / "README.md").read_text(), "class")
    assert [row[0] for row in rows] == model.class_names
    for label, (_, train, val, test, precision, recall, f1) in enumerate(rows):
        of_split = [int((split.labels == label).sum()) for split in data.splits().values()]
        assert [int(train), int(val), int(test)] == of_split
        right = int(((predicted == label) & (labels == label)).sum())
        p, r = right / max(int((predicted == label).sum()), 1), right / int((labels == label).sum())
        assert (float(precision), float(recall)) == pytest.approx((p, r), abs=1e-3)
        assert float(f1) == pytest.approx(2 * p * r / max(p + r, 1e-9), abs=1e-3)


def test_the_card_says_how_the_model_came_about_and_what_it_is_for(digits_run: Path) -> None:
    card = (digits_run / "README.md").read_text()
    assert "longseq fit --config " in card and "--trainer.max_epochs 2" in card
    assert f"longseq {longseq.__version__}" in card and f"torch {torch.__version__.partition('+')[0]}" in card
    described = ["git", "-C", str(Path(longseq.__file__).parent), "describe", "--always"]
    commit = subprocess.run(described, capture_output=True, text=True).stdout.strip()  # empty outside of a clone
    assert f" ({commit}" in card
    assert re.search(r"[\d,]+ samples and [\d,]+ tokens a second", card)
    assert "- It sees 8 x 8 pixels; others are resized." in card and "also one that belongs to none of them" in card
    assert "encoder.attention.k: 16" in card and "parameters" in card
    assert card.startswith("---\nlibrary_name: longseq\npipeline_tag: image-classification\n")
    assert "![" in card and Image.open(digits_run / "card.png").width > 800


def test_the_hub_reads_the_licence_and_the_figure_of_the_test_with_its_interval(digits_run: Path) -> None:
    data = ModelCard.load(digits_run / "README.md").data
    accuracy = json.loads((digits_run / "metrics.json").read_text())["test/accuracy"]
    low, high = wilson(round(accuracy * 359), 359)
    (result,) = data.eval_results
    assert (data.license, data.library_name, data.model_name) == ("unknown", "longseq", "digits")
    assert (result.task_type, result.dataset_name, result.dataset_split) == ("image-classification", "Digits", "test")
    assert (result.metric_type, result.metric_value) == ("accuracy", pytest.approx(accuracy, abs=1e-6))
    assert result.metric_name == f"Test accuracy, 95 % interval {low:.3f} to {high:.3f}"


def test_the_card_says_if_training_figures_are_those_of_mixed_samples(
    command, digits_run: Path, tmp_path: Path
) -> None:
    flags = ["--trainer.max_steps", "2", "--trainer.logger", "false", "--trainer.default_root_dir", tmp_path]
    flags += ["--baseline", "false", "--trainer.enable_progress_bar", "false"]
    assert command("fit", "--config", "image/digits", *SMALL, *flags, "--model.mix", "MixUp").code == 0
    said = "samples are mixed (MixUp): the loss and the accuracy of the training are measured on mixed samples."
    assert said in (tmp_path / "runs/digits/0/README.md").read_text()
    assert "samples are mixed" not in (digits_run / "README.md").read_text()


def test_a_model_of_sounds_and_several_labels_has_its_own_figures(command, tmp_path: Path) -> None:
    lines = ["path,label"]
    for number in range(24):
        soundfile.write(tmp_path / f"{number}.wav", torch.randn(800).numpy() * 0.1, 8000)
        lines.append(f"{number}.wav,{['low|deep', 'high', 'low|deep;high'][number % 3]}")
    (tmp_path / "clips.csv").write_text("\n".join(lines) + "\n")
    data = ["--data.root", tmp_path, "--data.table", tmp_path / "clips.csv", "--data.labels_separator", ";"]
    flags = ["--model.task", "MultiLabel", "--trainer.max_epochs", "1", "--trainer.default_root_dir", tmp_path]
    done = command(
        "fit",
        "--config",
        "audio/folder",
        *SMALL,
        *data,
        *flags,
        "--trainer.logger",
        "false",
        "--model.encoder.any_length",
        "false",
    )
    assert done.code == 0, done.err
    (run,) = (tmp_path / "runs").glob("*/0")
    card = (run / "README.md").read_text()
    assert "| class | train | val | test | average precision | auroc | f1 |" in card
    assert "low\\|deep" in card and "pipeline_tag: audio-classification" in card
    assert "**Test average precision: " in card and "Its inputs are sounds of up to 0.1 s at 8000 Hz" in card
    assert "2 of the 2 classes have fewer than 20 samples" in card
    assert "belongs to none of them" not in card
    assert "card.png" not in card and not (run / "card.png").exists()  # neither curves nor confusions


def test_the_interval_is_that_of_the_samples_that_were_tested(command, tmp_path: Path) -> None:
    flags = ["--trainer.max_steps", "2", "--trainer.limit_test_batches", "1", "--trainer.default_root_dir", tmp_path]
    done = command("fit", "--config", "image/digits", *SMALL, *flags, "--data.batch_size", "50")
    assert done.code == 0, done.err
    card = (tmp_path / "runs/digits/0/README.md").read_text()
    assert "** on 50 samples (95 % interval " in card and "with the last weights." in card  # there was no validation
    done = command("fit", "--config", "image/digits", *SMALL, *flags, "--model.task", "MultiLabel")
    assert done.code == 0, done.err
    card = (tmp_path / "runs/digits/1/README.md").read_text()
    assert "** on a part of the test split, with the last weights." in card


def test_a_name_of_two_lines_is_one_cell_and_one_epoch_is_a_point() -> None:
    assert _classes(["a\nb"], {"train": [3]}, {"f1": [math.nan]}).split("\n")[2] == "| a b | 3 |  |"
    encoder = longseq.ImageEncoder((1, 8, 8), longseq.Verma(), dim=8, depth=1, heads=1)
    curves = {"val/accuracy": [(5, 0.5)], "train/accuracy": [(5, 0.4), (10, 0.5)]}
    of_one, of_two = (_draw(curves, longseq.training.Classifier(encoder, 2), None).axes[1].lines[at] for at in (1, 0))
    assert of_one.get_marker() == "." and of_two.get_marker() == "None"


def test_many_classes_have_a_key_in_the_picture_and_a_number_in_the_table() -> None:
    names = [f"kind {label:x}" for label in range(45)] + ["\U0010fff0"]  # no font has the last one
    encoder = longseq.ImageEncoder((1, 8, 8), longseq.Verma(), dim=8, depth=1, heads=1)
    figure = _draw({}, longseq.training.Classifier(encoder, 46, names), torch.eye(46, dtype=torch.int64))
    shown = [text.get_text() for text in figure.findobj(Text)]
    assert set(names[:45]) <= set(shown) and "(no font: see the text)" in shown
    rows = _classes(names, {"train": [3] * 46}, {}).split("\n")
    assert (rows[0], rows[2 + 45]) == ("| number | class | train |", "| 45 | \U0010fff0 | 3 |")


def test_a_training_without_a_test_has_a_card_too(command, tmp_path: Path) -> None:
    flags = ["--trainer.max_epochs", "1", "--trainer.limit_test_batches", "0", "--trainer.default_root_dir", tmp_path]
    done = command("fit", "--config", "image/digits", *SMALL, *flags)
    assert done.code == 0, done.err
    assert "It was not tested." in (tmp_path / "runs/digits/0/README.md").read_text()
