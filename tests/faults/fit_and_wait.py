"""train.py, but its ranks wait for permission at some steps: fit_and_wait.py FOLDER STEPS fit ...

STEPS are numbers with commas. Before such a step rank zero writes FOLDER/at-STEP, and waits for FOLDER/go-STEP. Every
rank writes its process's number to FOLDER/rank-RANK.
"""

import os
import sys
import time
from pathlib import Path

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_only

from longseq.cli import main
from longseq.cli.model_commands import Commands


class Waiting(pl.Callback):
    def __init__(self, folder: Path, steps: list[int]) -> None:
        super().__init__()
        self.folder, self.steps = folder, steps

    def on_train_start(self, trainer: pl.Trainer, *_: object) -> None:
        (self.folder / f"rank-{trainer.global_rank}").write_text(str(os.getpid()))

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        step = trainer.global_step
        if step in self.steps and trainer.is_global_zero:
            (self.folder / f"at-{step}").touch()
            while not (self.folder / f"go-{step}").exists():
                time.sleep(0.01)


if __name__ == "__main__":
    rank_zero_only.rank = int(os.environ["RANK"])  # torchrun has forked this process after Lightning's import
    folder, steps, *arguments = sys.argv[1:]
    plain = Commands.instantiate_trainer

    def with_waiting(self: Commands, **kwargs: object) -> pl.Trainer:
        trainer = plain(self, **kwargs)
        trainer.callbacks.insert(0, Waiting(Path(folder), [int(step) for step in steps.split(",")]))
        return trainer

    Commands.instantiate_trainer = with_waiting
    main(arguments)
