"""What a model gets wrong, looks at and makes of its inputs, read back from TensorBoard's event files."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor
from training.test_tensorboard import NAMES, SIZE, images, loader, picture, read, sounds

from longseq.attention import Linformer, Softmax, Verma
from longseq.encoders import ImageEncoder, SpectrogramEncoder
from longseq.tasks import Masked, MultiLabel, Task
from longseq.training import Classifier
from longseq.training.answers.attribution import token_maps
from longseq.training.board.by_class import ByClass
from longseq.training.board.samples import AttentionMaps, Embeddings, Mistakes
from longseq.training.decisions import Decisions

pytestmark = pytest.mark.draws


def fit(
    folder: Path, *callbacks: pl.Callback, kind: Any = images, task: Task | None = None, epochs: int = 2
) -> tuple[pl.Trainer, Classifier]:
    torch.manual_seed(0)
    encoder, dataset = kind()
    model = Classifier(encoder, 3, NAMES, task, learning_rate=0.01)
    trainer = pl.Trainer(
        accelerator="cpu", enable_model_summary=False, enable_progress_bar=False, enable_checkpointing=False,
        callbacks=list(callbacks), max_epochs=epochs, logger=TensorBoardLogger(folder, "", "run"),
        num_sanity_val_steps=0, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(model, loader(dataset, 4), loader(dataset, 5))
    return trainer, model


class Known(Mistakes):
    """Keeps what it has found."""

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        super().on_validation_epoch_end(trainer, pl_module)
        self.last = list(self._worst)


@pytest.mark.parametrize("kind", [images, sounds])
def test_the_worst_mistakes_are_those_with_the_highest_loss_over_all_batches(tmp_path: Path, kind: Any) -> None:
    mistakes = Known(3)
    _, model = fit(tmp_path, mistakes, kind=kind)
    torch.manual_seed(0)
    _, dataset = kind()
    model.eval()
    wrong = []
    for batch in loader(dataset, 1):
        with torch.no_grad():
            outputs = model(batch[0])
        if outputs.argmax() != batch[1]:
            wrong.append((float(model.task.losses(outputs, batch[1])), NAMES[batch[1]], NAMES[outputs.argmax()]))
    expected = sorted(wrong, reverse=True)[:3]
    assert len(expected) == 3
    for found, (loss, truth, answer) in zip(mistakes.last, expected, strict=True):
        assert found.loss == pytest.approx(loss, rel=1e-4)
        assert found.truth == truth and found.answer.startswith(answer)
    assert len(read(tmp_path).Images("val/mistakes")) == 2


def test_the_mistakes_of_a_test_can_be_heard_under_truth_and_answer(tmp_path: Path) -> None:
    mistakes = Known(2)
    trainer, model = fit(tmp_path, mistakes, kind=sounds, epochs=1)
    trainer.test(model, loader(sounds()[1], 12), verbose=False)
    for sound in (found.sound for found in mistakes.last):
        assert sound.untyped_storage().nbytes() == 4 * sound.numel()  # and not the batch of which it was a part
    events = read(tmp_path)
    assert len(events.Images("test/mistakes")) == 1
    tags = events.Tags()["audio"]
    assert len(tags) == 2 and all("_taken_for_" in tag for tag in tags)
    truth, answer = tags[0].split("_", 1)[1].split("_taken_for_")
    assert truth in ("cat", "dog", "whod") and not answer.startswith(truth)


def test_a_sample_of_several_classes_is_a_mistake_unless_exactly_these_are_named(tmp_path: Path) -> None:
    mistakes = Known()
    fit(tmp_path, mistakes, Decisions(), task=MultiLabel())
    assert mistakes.last
    for found in mistakes.last:
        assert found.answer == "no class" or {part.rsplit(" ", 1)[0] for part in found.answer.split(", ")} != {
            found.truth
        }


def test_a_task_without_classes_shows_no_mistakes(tmp_path: Path) -> None:
    fit(tmp_path, Mistakes(), ByClass(), Embeddings(), task=Masked(), epochs=1)
    assert not read(tmp_path).Tags()["images"]
    assert not list(tmp_path.rglob("*.tsv"))


def test_the_figures_of_each_class_are_an_image_of_each_validation(tmp_path: Path) -> None:
    fit(tmp_path, ByClass())
    assert len(read(tmp_path).Images("val/by_class")) == 2


def test_a_detectors_curves_are_an_image_of_each_validation(tmp_path: Path) -> None:
    fit(tmp_path, Decisions(), task=MultiLabel())
    assert len(read(tmp_path).Images("val/decision")) == 2


def test_the_dot_on_a_curve_is_the_threshold_of_its_class() -> None:
    task = MultiLabel()
    head = task.head(images()[0], 2)
    metric: Any = task.decision(2)
    chances = torch.tensor([[0.9, 0.2], [0.8, 0.6], [0.3, 0.7], [0.1, 0.9]])
    metric.update(chances, torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1]]))
    task.decide(head, metric.compute())
    axes = task.draw_decision(head, metric.compute(), ["left", "right"]).axes[0]
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert len(dots) == 2
    for dot in dots:  # both classes are told apart at their thresholds
        assert (float(dot.get_xdata()[0]), float(dot.get_ydata()[0])) == (1.0, 1.0)


@pytest.mark.parametrize("attention", [Linformer(4), Linformer(4, sharing="none"), Verma(), Verma(4), Softmax()])
def test_the_share_of_a_token_is_how_much_its_value_moves_the_mean_result(attention: Any) -> None:
    torch.manual_seed(0)
    model = Classifier(ImageEncoder((1, 4, 4), attention, dim=8, depth=1, heads=2), 3).eval()
    image = torch.randint(0, 256, (1, 1, 4, 4)).byte()
    model.encoder.measure([torch.randint(0, 256, (8, 1, 4, 4)).byte()])
    (maps,) = token_maps(model, image, 6).values()
    assert maps.mean.shape == (4, 4)
    if attention in (Verma(), Softmax()):
        assert float(maps.mean.sum()) == pytest.approx(1, abs=1e-5)  # rows of softmax sum to one
    assert maps.summaries.shape[1:] == (4, 4)
    if isinstance(attention, Linformer):
        layer: Any = model.encoder.trunk.blocks[0].attn
        E = layer.projections_for(torch.zeros(1, 16, 8), None)[0].weight.detach()
        assert torch.allclose(maps.summaries.flatten(1), E.reshape(-1, 16)[: len(maps.summaries)], atol=1e-6)


def test_attention_is_shown_every_few_epochs_and_at_the_end(tmp_path: Path) -> None:
    fit(tmp_path / "images", AttentionMaps(every_n_epochs=3), epochs=5)
    events = read(tmp_path / "images")
    assert [image.step for image in events.Images("val/attention")] == [2, 11, 14]  # of the epochs 0, 3 and 4
    assert len(events.Images("val/summary_tokens")) == 3
    fit(tmp_path / "sounds", AttentionMaps(), kind=sounds, epochs=1)
    assert picture(read(tmp_path / "sounds").Images("val/summary_tokens")[0]).shape[1] == 720


def test_a_clip_of_a_padded_batch_has_the_maps_that_it_has_alone() -> None:
    torch.manual_seed(0)
    encoder = SpectrogramEncoder(4000, 0.25, Linformer(4), num_mels=16, **SIZE)
    model = Classifier(encoder, 3).eval()
    clip = torch.randn(1, 600)
    encoder.measure([clip])
    alone = token_maps(model, {"waveforms": clip, "lengths": torch.tensor([600])}, 6)[0]
    longer = torch.nn.functional.pad(clip, (0, 400))
    inside = token_maps(model, {"waveforms": longer, "lengths": torch.tensor([600])}, 6)[0]
    rows = len(alone.mean)
    assert torch.allclose(inside.mean[:rows], alone.mean, atol=1e-6) and not inside.mean[rows:].any()


def test_the_maps_change_nothing_in_a_training(tmp_path: Path) -> None:
    weights = []
    for name, callbacks in {"with": [AttentionMaps(1), Mistakes(), Embeddings(), ByClass()], "without": []}.items():
        _, model = fit(tmp_path / name, *callbacks)
        weights.append(torch.cat([weight.flatten() for weight in model.parameters()]))
    assert torch.equal(*weights)


def test_the_projector_gets_features_classes_answers_and_thumbnails(tmp_path: Path) -> None:
    _, model = fit(tmp_path, Embeddings(7))
    (table,) = tmp_path.rglob("tensors.tsv")
    features = torch.from_numpy(np.loadtxt(table, delimiter="\t")).float()
    inputs: Tensor = images_of(7)
    with torch.no_grad():
        expected = model.eval().encoder(inputs)
        answers = [NAMES[label] for label in model(inputs).argmax(1)]
    assert torch.allclose(features, expected, atol=1e-5)
    with open(table.with_name("metadata.tsv"), newline="") as file:
        header, *rows = csv.reader(file, delimiter="\t")
    assert header == ["class", "answer"]
    assert rows == [[NAMES[number % 3], answer] for number, answer in enumerate(answers)]
    with Image.open(table.with_name("sprite.png")) as sprite:
        assert sprite.size == (72, 72)  # three by three


def images_of(count: int) -> Tensor:
    torch.manual_seed(0)
    return images()[1].inputs[:count]


def test_sounds_have_no_thumbnails(tmp_path: Path) -> None:
    fit(tmp_path, Embeddings(), kind=sounds, epochs=1)
    assert len(list(tmp_path.rglob("tensors.tsv"))) == 1 and not list(tmp_path.rglob("sprite.png"))


@pytest.mark.parametrize("make", [Mistakes, AttentionMaps, Embeddings])
def test_numbers_that_are_not_positive_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        make(0)
