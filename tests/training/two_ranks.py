"""Trains on two processes and writes the final state of every rank: python two_ranks.py SHARING FOLDER [BAD].

In step BAD the loss of rank 1 is not finite. With the sharing ``layerwise`` the data is clips of any lengths,
otherwise images. Validation and test have 33 samples: rank 0 gets two batches of them, and rank 1 gets one.
"""

import sys
from pathlib import Path

import pytorch_lightning as pl
import torch

from datamodules import Digits, Vowels
from datamodules.base import DataModule
from datamodules.samples import Clips
from longseq.attention import Linformer
from longseq.encoders import ImageEncoder, SpectrogramEncoder
from longseq.training import Classifier
from longseq.training.recovery import Sentinel

SMALL = {"dim": 16, "depth": 3, "heads": 2}


def model_and_data(sharing: str) -> tuple[Classifier, DataModule]:
    """The model and the data; they are the same in every process."""
    torch.manual_seed(0)
    mechanism = Linformer(8, sharing)  # type: ignore[arg-type]
    if sharing == "layerwise":
        data = Vowels(num_train=240, num_test=60, batch_size=16)
        data.setup()
        data.train_set, data.val_set, data.test_set = map(cut, (data.train_set, data.val_set, data.test_set))
        encoder = SpectrogramEncoder(data.sample_rate_hz, data.seconds, mechanism, num_mels=16, **SMALL)
    else:
        data, encoder = Digits(batch_size=16), ImageEncoder((1, 8, 8), mechanism, **SMALL)
        data.setup()
    data.val_set, data.test_set = data.val_set.subset(torch.arange(33)), data.test_set.subset(torch.arange(33))
    return Classifier(encoder, num_classes=10), data


def cut(clips: Clips) -> Clips:
    """Shorten the clips to random lengths of 0.1 to 0.4 s."""
    lengths = torch.randint(800, 3200, (len(clips),), generator=torch.Generator().manual_seed(0)).tolist()
    return Clips([clip[:length] for clip, length in zip(clips.inputs, lengths, strict=True)], clips.labels)


if __name__ == "__main__":
    sharing, folder, *bad = sys.argv[1:]
    model, data = model_and_data(sharing)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=8, val_check_interval=8, check_val_every_n_epoch=None,
        logger=False, default_root_dir=folder, enable_checkpointing=bool(bad), enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Sentinel(Path(folder) / "last.ckpt", 10)] if bad else [],
    )  # fmt: skip
    model.bad_steps.allowed = len(bad)
    model.head.register_forward_hook(
        lambda _, inputs, logits: (
            logits * float("nan") if bad == [str(model.global_step)] and trainer.global_rank == 1 else logits
        )
    )
    trainer.fit(model, datamodule=data)
    figures = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    (tested,) = trainer.test(model, datamodule=data, verbose=False)
    ends = {name: parameter.detach() for name, parameter in model.named_parameters()}
    layers = [block.attn for block in model.encoder.trunk.blocks]
    projections = len({id(p) for layer in layers for p in (layer.project_keys.weight, layer.project_values.weight)})
    torch.save(
        {"start": start, "ends": ends, "projections": projections, "figures": figures | tested,
         "state": model.state_dict()},
        Path(folder) / f"rank{trainer.global_rank}.pt",
    )  # fmt: skip
