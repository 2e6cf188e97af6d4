"""Waiting for ranks that another program must start: longseq prints which ones, and a signal ends the wait."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.plugins.environments import LightningEnvironment, SLURMEnvironment
from torch.distributed import DistError, is_torchelastic_launched

from longseq.cli.errors import UserError
from longseq.cli.errors.building import first_line
from longseq.cli.errors.machine import WORKER_OR_RANK
from longseq.compat.lightning import wait_for_ranks_within
from longseq.training.signals import ends_at_once

SECONDS = 5.0  # of waiting before longseq prints it


def name_awaited_ranks(trainer: pl.Trainer, clean_up: Callable[[], None]) -> None:
    """Print which ranks the trainer waits for. A signal during the wait calls clean_up and ends the process."""
    strategy: Any = trainer.strategy
    if getattr(strategy, "cluster_environment", None) is None:  # there is only one process
        return

    def end_others() -> None:
        if strategy.launcher is not None:
            strategy.launcher.kill(9)
        clean_up()

    @contextmanager
    def awaiting() -> Iterator[None]:
        timer = threading.Timer(SECONDS, lambda: print(_awaited(trainer), file=sys.stderr, flush=True))
        timer.daemon = True
        if _started_by(trainer):
            timer.start()
        try:
            with ends_at_once(end_others):
                yield
        except DistError as error:
            raise UserError(f"{_awaited(trainer)} ({first_line(error)})", WORKER_OR_RANK) from error
        finally:
            timer.cancel()

    wait_for_ranks_within(strategy, awaiting)


def _awaited(trainer: pl.Trainer) -> str:
    strategy: Any = trainer.strategy
    environment = strategy.cluster_environment
    rank, ranks = environment.global_rank(), environment.world_size()
    others = "the other rank" if ranks == 2 else f"{ranks - 1} other ranks"
    where = f"{environment.main_address}:{environment.main_port}"
    return f"rank {rank} of {ranks} waits for {others} at {where}: {_started_by(trainer)}"


def _started_by(trainer: pl.Trainer) -> str:
    """Which program starts the ranks, and the remedy; empty if longseq starts all of them."""
    environment: Any = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
    if is_torchelastic_launched():
        return f"torchrun has set WORLD_SIZE={os.environ['WORLD_SIZE']}; see the messages of the other ranks"
    if isinstance(environment, SLURMEnvironment):
        return f"SLURM_NTASKS is {os.environ['SLURM_NTASKS']}; start longseq with srun, as often as that"
    if not isinstance(environment, LightningEnvironment):
        return f"{type(environment).__name__} says so; see the messages of the other ranks"
    if trainer.num_nodes > 1:
        node = "start the same command on each, with its NODE_RANK, this MASTER_ADDR and this MASTER_PORT"
        return f"trainer.num_nodes is {trainer.num_nodes}; {node}"
    if "LOCAL_RANK" in os.environ:
        return f"LOCAL_RANK={os.environ['LOCAL_RANK']} is set; unset it, and longseq starts all ranks"
    return ""
