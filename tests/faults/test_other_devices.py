"""A training that goes on with other processes sees the same samples in the same batches."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import forked
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
TRAIN, DIE = ROOT / "train.py", Path(__file__).with_name("fit_and_die.py")
# An epoch has 761 samples: 5 batches of 152, and one of a single sample, which one process gets and three do not.
FIT = [
    "fit", "--config", str(ROOT / "configs/image/digits.yaml"), "--model.encoder.dim", "16",
    "--model.encoder.depth", "2", "--model.encoder.drop_path", "0", "--model.class_weights", "balanced",
    "--model.optimizer", "sgd", "--model.learning_rate", "0.5", "--trainer.log_every_n_steps", "1",
    "--trainer.max_epochs", "2", "--trainer.accelerator", "cpu", "--data.val_fraction", "0.47",
    "--data.batch_size", "152",
]  # fmt: skip
GO_ON = ["fit", "--resume", "runs/digits/0", "--trainer.strategy"]


def run_on(processes: int, folder: Path, *command: Any) -> list[forked.Forked]:
    """Run a command in so many processes, as torchrun does, to their end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": processes}
    job |= {"LOCAL_WORLD_SIZE": processes, "GROUP_RANK": 0, "PYTHONPATH": ROOT}
    started = []
    for rank in range(processes):
        environment = {name: str(value) for name, value in (job | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        started.append(forked.start(*command, cwd=folder, env=os.environ | environment))
    for process in started:
        assert process.wait(200) is not None, process.said()
    return started


def curves(run: Path, tags: Iterable[str]) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(*map(str, run.glob("*-seed*")), size_guidance={"scalars": 0}).Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in tags}


# How many processes, with which strategy, until after which step. An epoch has 6, the last of a single sample.
STAGES = [(2, "ddp", 1), (2, "SequenceParallel", 3), (1, "auto", 4), (2, "FullySharded", 8), (4, "ddp", 12)]


@pytest.mark.thorough
def test_a_run_on_other_processes_with_any_strategy_has_the_losses_of_one_that_never_stopped(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = forked.run(TRAIN, *FIT, cwd=tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr[-3000:]
    step = 0
    for processes, strategy, until in STAGES:
        flags = [*GO_ON, strategy] if step else [*FIT, "--data.batch_size", "76", "--trainer.strategy", strategy]
        if strategy == "FullySharded":
            flags += ["--trainer.strategy.save_distributed_checkpoint", "true"]
        die = [DIE, "on_train_batch_end", until - step, "SIGTERM", processes - 1]
        ranks = run_on(processes, tmp_path / "parts", *(die if until < 12 else [TRAIN]), *flags)
        code = 143 if until < 12 else 0
        assert [process.returncode for process in ranks] == [code] * processes, ranks[0].said()
        assert (tmp_path / "parts/runs/digits/0/last.ckpt").is_dir() == (strategy == "FullySharded")
        step = until
    assert "data.batch_size: 38 on 4 processes, it was 76 on 2" in ranks[0].said()[0]
    tags = ["train/loss", "val/loss", "train/accuracy", "val/accuracy"]
    ours, theirs = (curves(tmp_path / name / "runs/digits/0", tags) for name in ("parts", "whole"))
    for tag in tags:
        assert [step for step, _ in ours[tag]] == [step for step, _ in theirs[tag]]
        assert [value for _, value in ours[tag]] == pytest.approx([value for _, value in theirs[tag]], abs=1e-5), tag
    assert abs(theirs["val/loss"][0][1] - theirs["val/loss"][1][1]) > 1  # the weights have changed
