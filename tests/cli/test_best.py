"""Which epoch's checkpoint is the best one."""

from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.demos.boring_classes import BoringModel

from longseq.cli.runs.callbacks import BestCheckpoint
from longseq.tasks import SingleLabel


class Scored(BoringModel):
    """Logs given figures, one pair of accuracy and loss for each epoch."""

    def __init__(self, figures: list[tuple[float, float]]) -> None:
        super().__init__()
        self.figures = figures

    def on_validation_epoch_end(self) -> None:
        accuracy, loss = self.figures[self.current_epoch]
        self.log_dict({"val/accuracy": torch.tensor(accuracy), "val/loss": torch.tensor(loss)})


def best_epoch(figures: list[tuple[float, float]], folder: Path) -> tuple[int, dict[str, float]]:
    callback = BestCheckpoint(folder, SingleLabel())
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=len(figures), limit_train_batches=1, limit_val_batches=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Scored(figures))
    return torch.load(folder / "best.ckpt", weights_only=True)["epoch"], callback.figures


def test_of_equal_figures_the_first_is_the_best_but_of_perfect_ones_that_with_the_lowest_loss(tmp_path: Path) -> None:
    epoch, _ = best_epoch([(0.5, 0.9), (0.75, 0.8), (0.75, 0.4), (0.5, 0.1)], tmp_path / "equal")
    assert epoch == 1
    epoch, figures = best_epoch([(0.5, 0.9), (1.0, 0.8), (1.0, 0.9), (1.0, 0.25), (1.0, 0.5)], tmp_path / "perfect")
    assert epoch == 3
    assert figures == {"val/accuracy": 1.0, "val/loss": 0.25}
