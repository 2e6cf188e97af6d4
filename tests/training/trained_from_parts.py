"""Two processes train with sharded weights, and then from what these wrote: python trained_from_parts.py FOLDER.

parts.ckpt is a checkpoint of parts after two steps of a training that ends with whole.ckpt; another one goes on from
there and ends with resumed.ckpt. Two further trainings start from its weights (init_from), learn from it as a teacher,
and accumulate gradients: one with sharded weights (sharded.ckpt), one with whole ones (ddp.ckpt). Sums in another order
are other numbers in float32, so the precision is float64.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import DoublePrecision

from datamodules import Digits
from longseq.attention import Linformer
from longseq.encoders import ImageEncoder
from longseq.training import Classifier, FullySharded


class SavesAfterTwo(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def train(strategy: Any, path: Path, *callbacks: pl.Callback, resumed: Path | None = None, **options: Any) -> None:
    torch.manual_seed(0)
    data = Digits(batch_size=16)
    data.setup()
    attention = Linformer(8, sharing="layerwise")
    encoder = ImageEncoder((1, 8, 8), attention, dim=16, depth=2, heads=2, drop_path=0.0)
    model = Classifier(encoder, 10, class_names=data.class_names, learning_rate=0.01, **options)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=4, plugins=[DoublePrecision()], logger=False,
        accumulate_grad_batches=2 if options else 1, limit_val_batches=0, default_root_dir=path.parent,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(model, datamodule=data, ckpt_path=resumed, weights_only=True)
    trainer.save_checkpoint(path)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    os.environ.pop("PL_GLOBAL_SEED", None)  # Lightning would seed several processes once more
    parts = folder / "parts.ckpt"
    writes_parts = FullySharded(save_distributed_checkpoint=True)
    train(writes_parts, folder / "whole.ckpt", SavesAfterTwo(parts))
    train(FullySharded(), folder / "resumed.ckpt", resumed=parts)
    for name, strategy in (("sharded", FullySharded()), ("ddp", "ddp")):
        train(strategy, folder / f"{name}.ckpt", init_from=str(parts), teacher=str(parts))
