"""Lightning's trainer with four commands that work on data: preview, stats, check, shard."""

import shlex
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from longseq.cli.errors import UserError
from longseq.cli.names import escaped, shown
from longseq.encoders.lettering import key_of
from longseq.reports.plots import can_be_drawn, refuse_foreign_picture, save
from longseq.training import Classifier
from longseq.training.board.pictures import draw_inputs
from longseq.training.data import bounds
from longseq.training.statistics import measure_inputs


class Trainer(pl.Trainer):
    """Lightning's Trainer with more commands: methods, whose arguments are flags; those on data alone are static."""

    def preview(
        self, model: Classifier, datamodule: pl.LightningDataModule, out: str = "preview.png", num_samples: int = 16
    ) -> None:
        """Draw training inputs as the model sees them, with their labels.

        Args:
            model: The classifier.
            datamodule: The data.
            out: The figure to write: .png, .pdf or .svg.
            num_samples: The number of inputs.
        """
        if num_samples < 1:
            raise UserError(f"num_samples: got {num_samples}; give 1 or more")
        if not can_be_drawn(out):
            raise UserError(f"out: {out}: not a known format; give a .png, .pdf or .svg")
        if not Path(out).parent.is_dir():
            raise UserError(f"out: {out} cannot be written (no such folder); make it, or give another")
        refuse_foreign_picture(Path(out), "out")
        datamodule.setup("fit")
        measure_inputs(model.encoder, datamodule)
        of_data: Any = datamodule
        loader: Any = datamodule.train_dataloader()
        chosen = torch.randperm(len(loader.dataset))[:num_samples].tolist()
        inputs, labels = loader.collate_fn(loader.dataset.__getitems__(chosen))
        try:
            save(draw_inputs(model.train(), inputs, labels, bounds(of_data.inputs)), Path(out))
        except (OSError, ValueError) as error:
            raise UserError(f"out: {out} cannot be written ({error}); give a path that ends in .png") from error
        print(shown(f"inputs drawn: {len(labels)}, in {out}"))
        counts = model.task.counts(labels, model.num_classes)
        for number, name in key_of(model.class_names).items():
            if counts[number]:
                print(f"class {number}: {escaped(name)}")

    @staticmethod
    def stats(model: None, datamodule: Any) -> None:
        """Print the sizes of splits and classes, and figures of the training set."""
        datamodule.setup("fit")
        for name, value in datamodule.statistics().items():
            text = value
            if isinstance(value, dict):
                text = ", ".join(f"{escaped(key)} {count}" for key, count in value.items())
            print(f"{name}: {text}")

    @staticmethod
    def check(model: None, datamodule: Any) -> None:
        """Open every file of the data, and list those that are broken."""
        bad = datamodule.bad_files()
        for path, what in bad.items():
            print(f"{escaped(path)}: {shown(what)}")
        if bad:
            files = "1 broken file" if len(bad) == 1 else f"{len(bad)} broken files"
            raise UserError(f"data.root: {files}; repair them, or give --data.on_error skip", exit_code=3)
        datamodule.setup("fit")
        sizes = ", ".join(f"{len(samples)} {name}" for name, samples in datamodule.splits().items())
        print(f"all files can be read: {sizes} samples of {datamodule.num_classes} classes")
        labels = [samples.labels for samples in datamodule.splits().values()]
        if labels[0].ndim == 2:  # each sample may have several classes, or none
            counts = (torch.cat(labels) > 0).sum(dim=1).bincount().tolist()
            of_each = ", ".join(f"{number}: {count}" for number, count in enumerate(counts) if count)
            print(f"labels per {_sample_of(datamodule)}: {of_each}")

    @staticmethod
    def shard(model: None, datamodule: Any, out: str, samples_per_shard: int = 10_000) -> None:
        """Write all splits as tar archives of many samples each, and print the flags to train on them.

        Args:
            model: None.
            datamodule: The data.
            out: The folder to write into.
            samples_per_shard: The largest number of samples in one archive.
        """
        if not hasattr(datamodule, "write_shards"):
            what = f"{type(datamodule).__name__} writes no shards"
            raise UserError(f"data: {what}; derive it from datamodules.ImageDataModule or AudioDataModule")
        datamodule.setup("fit")
        number = datamodule.write_shards(Path(out).expanduser(), samples_per_shard)
        sizes = ", ".join(f"{len(samples)} {name}" for name, samples in datamodule.splits().items())
        print(f"shards:   {number}, of {sizes} samples")
        flags = datamodule.flags_of_shards(out)
        print(shown(f"to train: --data {shlex.join(flags)}"))


def _sample_of(datamodule: Any) -> str:
    """What a sample is."""
    if hasattr(datamodule, "sample_rate_hz"):
        return "clip"
    return "bag" if hasattr(datamodule, "max_tokens") else "image"
