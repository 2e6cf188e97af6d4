"""Processes that load batches end with the trainer, and only then."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from datamodules.workers import begin_worker

LOADS = """
import time
from torch.utils.data import DataLoader
from datamodules.workers import begin_worker

batches = iter(DataLoader(range(10**6), num_workers=2, worker_init_fn=begin_worker, persistent_workers=True))
next(batches)
print("ready", *(worker.pid for worker in batches._workers), flush=True)
time.sleep(600)
"""


def wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (so := is_so()) and time.monotonic() < end:
        time.sleep(0.05)
    return so


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_workers_outlive_signals_and_not_a_killed_trainer(tmp_path: Path) -> None:
    trainer = forked.start("-c", LOADS, cwd=tmp_path)
    assert wait_until(lambda: "ready" in trainer.said()[0], 60), trainer.said()
    workers = [int(pid) for pid in trainer.said()[0].split()[1:]]
    for pid in workers:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
    time.sleep(0.5)
    assert all(map(is_running, workers)) and trainer.poll() is None
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert wait_until(lambda: not any(map(is_running, workers)), 20)


class Slow(Dataset):
    """Its samples take an hour; the first ones take no time."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index > 1:
            time.sleep(3600)
        return index


def test_a_worker_that_does_not_come_back_is_ended_by_the_trainer() -> None:
    batches = iter(DataLoader(Slow(), num_workers=1, worker_init_fn=begin_worker))
    next(batches)
    (worker,) = batches._workers  # type: ignore[attr-defined]
    begin = time.monotonic()
    del batches  # torch waits for five seconds
    assert not worker.is_alive() and worker.exitcode == 0
    assert time.monotonic() - begin < 30


class Drawn(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[float, float]:
        return np.random.rand(), torch.rand(()).item()


@pytest.mark.parametrize("seeded", [True, False])
def test_workers_are_seeded_as_lightning_seeds_them(seeded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_fabric.utilities.data import _auto_add_worker_init_fn

    monkeypatch.setenv("PL_SEED_WORKERS", str(int(seeded)))
    drawn = []
    for function in (None, begin_worker):
        loader = DataLoader(Drawn(), 2, num_workers=2, generator=torch.Generator(), worker_init_fn=function)
        _auto_add_worker_init_fn(loader, 0)
        drawn.append([torch.stack(batch) for batch in loader])
    assert torch.equal(torch.stack(drawn[0]), torch.stack(drawn[1]))
