"""Figures and answers of a training with weights in bfloat16 are those of float32."""

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from longseq import ImageEncoder, Verma
from longseq.tasks import Ordinal, Regression, Task
from longseq.training import Classifier


def model_of(task: Task, num_classes: int) -> Classifier:
    encoder = ImageEncoder((1, 8, 8), Verma(), patch_size=8, dim=4, depth=1, heads=1)
    return Classifier(encoder, num_classes, task=task).eval()


def trainer_of(precision: str) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", precision=precision, logger=False, enable_progress_bar=False)


@pytest.mark.parametrize(
    ("task", "num_classes", "mae"), [(Regression(mean=[0.0], std=[1.0]), 1, 1.0), (Ordinal(), 4, 3.0)]
)
def test_a_sum_of_many_batches_keeps_growing(task: Task, num_classes: int, mae: float) -> None:
    """A new head answers 0, or the first class, to each of 1,000 batches."""
    images = 255 * torch.rand(2000, 1, 8, 8)
    labels = torch.ones(2000, 1) if num_classes == 1 else torch.full((2000,), 3)
    found = [
        trainer_of(precision).validate(
            model_of(task, num_classes), DataLoader(TensorDataset(images, labels), 2), verbose=False
        )[0]["val/mae"]
        for precision in ("32-true", "bf16-true")
    ]
    assert found == pytest.approx([mae, mae])


def test_an_amount_is_the_same_in_the_trainer_and_outside_of_it() -> None:
    model = model_of(Regression(mean=[101333.7], std=[308.5]), 1)
    images = torch.rand(2, 1, 8, 8)
    (inside,) = trainer_of("bf16-true").predict(
        model, DataLoader(TensorDataset(images), 2, collate_fn=lambda x: torch.stack([y for (y,) in x]))
    )
    outside = model.predict_step(images.to(model.dtype), 0)
    for answers in (inside, outside):
        assert answers.flatten().tolist() == pytest.approx([101333.7, 101333.7])
