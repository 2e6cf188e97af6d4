"""Trains on two processes and writes what each rank ends with: python two_ranks.py SHARING FOLDER [BAD].

In step BAD the loss of rank 1 is not finite.
"""

import sys
from pathlib import Path

import pytorch_lightning as pl
import torch

from datamodules import Digits
from longseq.attention import Linformer
from longseq.encoders import ImageEncoder
from longseq.training import Classifier
from longseq.training.recovery import Sentinel

if __name__ == "__main__":
    sharing, folder, *bad = sys.argv[1:]
    torch.manual_seed(0)
    encoder = ImageEncoder((1, 8, 8), Linformer(8, sharing), dim=16, depth=3, heads=2)  # type: ignore[arg-type]
    model = Classifier(encoder, num_classes=10)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=8, limit_val_batches=1, logger=False,
        default_root_dir=folder, enable_checkpointing=bool(bad), enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Sentinel(Path(folder) / "last.ckpt", 10)] if bad else [],
    )  # fmt: skip
    model.skip_bad_steps = len(bad)
    model.head.register_forward_hook(
        lambda _, inputs, logits: (
            logits * float("nan") if bad == [str(model.global_step)] and trainer.global_rank == 1 else logits
        )
    )
    trainer.fit(model, datamodule=Digits())
    ends = {name: parameter.detach() for name, parameter in model.named_parameters()}
    layers = [block.attn for block in model.encoder.trunk.blocks]
    projections = len({id(p) for layer in layers for p in (layer.project_keys.weight, layer.project_values.weight)})
    torch.save(
        {"start": start, "ends": ends, "projections": projections}, Path(folder) / f"rank{trainer.global_rank}.pt"
    )
