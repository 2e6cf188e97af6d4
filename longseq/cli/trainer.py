"""Lightning's trainer: with commands that look at data - preview, stats and check - and what is said of wrong flags."""

import os
import re
from typing import Any

import pytorch_lightning as pl
import torch
from jsonargparse import Namespace

from longseq.cli.errors import UserError, locate
from longseq.training import Classifier
from longseq.training.pictures import draw_inputs
from longseq.training.statistics import measure_inputs


class Trainer(pl.Trainer):
    """A command is a method here, and its arguments are flags; one that needs data alone is static."""

    def preview(
        self, model: Classifier, datamodule: pl.LightningDataModule, out: str = "preview.png", num_samples: int = 16
    ) -> None:
        """Draw training inputs as the model sees them, with their labels.

        Args:
            model: The classifier.
            datamodule: The data.
            out: The PNG to write.
            num_samples: How many inputs.
        """
        if num_samples < 1:
            raise UserError(f"num_samples: got {num_samples}; give 1 or more")
        datamodule.setup("fit")
        measure_inputs(model.encoder, datamodule, model.device)
        loader: Any = datamodule.train_dataloader()
        chosen = torch.randperm(len(loader.dataset))[:num_samples].tolist()
        inputs, labels = loader.collate_fn(loader.dataset.__getitems__(chosen))
        try:
            draw_inputs(model.train(), inputs, labels).savefig(out)
        except (OSError, ValueError) as error:
            raise UserError(f"out: {out} cannot be written ({error}); give a path that ends in .png") from error
        print(f"{len(labels)} inputs: {out}")

    @staticmethod
    def stats(model: None, datamodule: Any) -> None:
        """Print sizes of splits and classes, and the training set's figures."""
        datamodule.setup("fit")
        for name, value in datamodule.statistics().items():
            said = ", ".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, dict) else value
            print(f"{name}: {said}")

    @staticmethod
    def check(model: None, datamodule: Any) -> None:
        """Open every file of the data, and list those that are broken."""
        bad = datamodule.bad_files()
        for path, what in bad.items():
            print(f"{path}: {what}")
        if bad:
            files = "1 broken file" if len(bad) == 1 else f"{len(bad)} broken files"
            raise UserError(f"data.root: {files}; mend what is broken, or --data.on_error skip", exit_code=3)
        datamodule.setup("fit")
        sizes = ", ".join(f"{len(samples)} {name}" for name, samples in datamodule.splits().items())
        print(f"all files can be read: {sizes} samples of {datamodule.num_classes} classes")


def refuse_missing_cores(settings: Namespace) -> None:
    """Lightning checks GPUs, but starts any number of processes on a CPU."""
    devices, cores = settings.devices, os.cpu_count() or 1
    on_cpu = settings.accelerator == "cpu"
    if on_cpu and str(devices).isdecimal() and int(devices) > cores:
        raise UserError(f"trainer.devices: {devices} processes on {cores} CPU cores; ask for {cores} or fewer")


def wrong_flag(error: Exception, settings: Namespace) -> UserError:
    """Lightning's words for a flag of the trainer that is wrong."""
    what = str(error).strip().split("\n")[0]
    named = re.search(r"`(?:Trainer\()?(\w+)", what)
    key = locate({"trainer": settings.as_dict()}, named[1]) if named else ""
    return UserError(f"{key if '.' in key else 'trainer'}: {what.rstrip('.!')}; see --help")


def is_lightnings(error: BaseException) -> bool:
    """Whether Lightning's own code has raised an error: of flags that fit neither each other nor the data."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and frame.tb_frame.f_globals["__name__"].startswith("pytorch_lightning.")
