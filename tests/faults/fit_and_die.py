"""train.py, but one of its processes gets a signal during the training: fit_and_die.py HOOK COUNT SIGNAL RANK fit ...

SIGNAL may also be a number of MiB, such as +500: the process gets no signal, but from then on it may use only so many
MiB more memory than it has. HOOK is a hook of Lightning's callbacks. COUNT says at which call of the hook the signal
comes; the first call is 1, and sanity checks are not counted. RANK is the rank of the process.

Rank zero looks for dead ranks every half second and not every five, and a rank that fails alone waits one second for
rank zero to fail as well and not eight.
"""

import os
import resource
import signal
import sys
from pathlib import Path

import pytorch_lightning as pl
from lightning_fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

from longseq.cli import main
from longseq.cli.errors import machine
from longseq.cli.model_commands import Commands


class Killer(pl.Callback):
    def __init__(self, hook: str, count: int, fault: str, rank: int) -> None:
        super().__init__()
        calls = 0

        def called(trainer: pl.Trainer, *_: object) -> None:
            nonlocal calls
            if not trainer.sanity_checking and trainer.state.fn == "fit" and trainer.global_rank == rank:
                calls += 1
                if calls == count:
                    bring_about(fault)

        setattr(self, hook, called)


def bring_about(fault: str) -> None:
    if not fault.startswith("+"):
        os.kill(os.getpid(), getattr(signal, fault))
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + int(fault) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    hook, count, fault, rank, *arguments = sys.argv[1:]
    plain = Commands.instantiate_trainer

    def with_killer(self: Commands, **kwargs: object) -> pl.Trainer:
        trainer = plain(self, **kwargs)
        trainer.callbacks.insert(0, Killer(hook, int(count), fault, int(rank)))
        return trainer

    Commands.instantiate_trainer = with_killer
    _ChildProcessObserver.__init__.__defaults__ = (0.5,)
    machine.rank_zero_goes_on.__defaults__ = (1.0,)
    main(arguments)
