"""Trains on several processes: python shared_training.py DEVICES TOKENS FOLDER [STRATEGY, masked or bad].

DEVICES processes, of which TOKENS share a sequence; with 1 token, an ordinary training, or one with STRATEGY. masked is
a pretraining. With bad, the loss of step 1 is not finite, and is left out. Sums in another order are other numbers in
float32, so the precision is float64.
"""

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from datamodules import Digits
from longseq.attention import Linformer
from longseq.encoders import Conv2d, ImageEncoder
from longseq.tasks import Masked
from longseq.training import Classifier, MixUp, SequenceParallel
from longseq.training.throughput import ThroughputLogger

if __name__ == "__main__":
    devices, tokens, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    is_masked, is_bad = "masked" in sys.argv, "bad" in sys.argv
    is_named = sys.argv[4:] and not (is_masked or is_bad)
    otherwise = sys.argv[4] if is_named else "ddp" if devices > 1 else "auto"
    os.environ.pop("PL_GLOBAL_SEED", None)  # Lightning would seed several processes once more
    torch.manual_seed(0)
    data = Digits(batch_size=32 // (devices // tokens))
    data.setup()
    # 65: with two processes one has a batch more than the other
    data.val_set, data.test_set = (split.subset(torch.arange(65)) for split in (data.val_set, data.test_set))
    size: dict[str, Any] = {"dim": 16, "depth": 2, "heads": 2, "drop_path": 0.1 if devices == tokens else 0.0}
    encoder = ImageEncoder((1, 8, 8), Linformer(8), local=Conv2d(3), pool="token", **size)
    steps = 8 if devices == tokens else 3
    mix = MixUp() if devices == tokens and not is_masked else None  # other processes draw other numbers
    model = Classifier(encoder, 10, mix=mix, task=Masked() if is_masked else None, learning_rate=0.01)
    if is_bad:
        model.bad_steps.allowed = 1
        model.head.register_forward_hook(lambda *call: call[2] * math.nan if model.global_step == 1 else None)
    strategy: Any = SequenceParallel(tokens) if tokens > 1 else otherwise
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=steps, val_check_interval=steps,
        check_val_every_n_epoch=None, gradient_clip_val=0.5, precision="64-true", log_every_n_steps=max(steps // 2, 1),
        default_root_dir=folder, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ThroughputLogger(1e12)], logger=pl.loggers.CSVLogger(folder),
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    trainer.save_checkpoint(Path(folder) / "last.ckpt")
    figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
    (tested,) = trainer.test(model, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        torch.save(figures | tested, Path(folder) / "figures.pt")
