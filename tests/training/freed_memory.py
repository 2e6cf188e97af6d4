"""Page faults of a block of 64 MiB that is filled and freed: before a fit from Python, in the best of its steps,
and after."""

import json
import resource
from typing import Any

import pytorch_lightning as pl
import torch

from datamodules import Digits
from longseq import ImageEncoder, Linformer
from longseq.training import Classifier


def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.full((2**26,), 1, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


class Counts(pl.Callback):
    """The fewest of all steps: where something small stays inside the freed block, the next one needs new memory."""

    faults = 2**26

    def on_train_batch_end(self, *_: Any) -> None:
        self.faults = min(self.faults, faults())


def main() -> None:
    faults()
    before, counts = faults(), Counts()
    encoder = ImageEncoder((1, 8, 8), Linformer(8), dim=8, depth=1, heads=2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", max_steps=10, limit_val_batches=0, callbacks=[counts], **quiet)  # type: ignore[arg-type]
    trainer.fit(Classifier(encoder, 10), datamodule=Digits(batch_size=8))
    faults()
    print(json.dumps([before, counts.faults, faults()]))


if __name__ == "__main__":
    main()
