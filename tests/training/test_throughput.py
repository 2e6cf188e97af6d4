"""Throughput with a clock that only the test moves, so every expected number is computed by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers.logger import DummyLogger
from torch import Tensor
from torch.utils.data import DataLoader

from longseq.attention import Softmax
from longseq.encoders import ImageEncoder
from longseq.training import Classifier, throughput
from longseq.training.flops import flops_per_sample
from longseq.training.throughput import ThroughputLogger

NUM_TOKENS = 4
FIRST_STEP, STEP, LOADING, VALIDATION, SAVING = 100.0, 0.5, 0.25, 1000.0, 3000.0  # seconds


class Clock:
    def __init__(self) -> None:
        self.now = 7.0

    def __call__(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


class Timed(Classifier):
    """Takes FIRST_STEP for its first batch and STEP for each further one."""

    clock: Clock

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.clock.pass_time(STEP if self.trainer.global_step or batch_idx else FIRST_STEP)
        return self.head.weight.sum()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.clock.pass_time(VALIDATION)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        self.clock.pass_time(SAVING)


class Recorder(DummyLogger):
    """Keeps the values logged as throughput/..., by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if "throughput/step_ms" in metrics:
            self.rows[step] = {name.removeprefix("throughput/"): value for name, value in metrics.items()}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput, "clock", clock)
    return clock


Fit = Callable[..., dict[int, dict[str, float]]]


@pytest.fixture
def fit(clock: Clock, tmp_path: Path) -> Fit:
    """Train on batches of 8 that take LOADING each, and return what was logged."""

    def load(samples: list[int]) -> tuple[Tensor, Tensor]:
        clock.pass_time(LOADING)
        return torch.zeros(len(samples), 1, 2, 2, dtype=torch.uint8), torch.zeros(len(samples), dtype=torch.long)

    def fit(
        *callbacks: pl.Callback, peak_flops: float | None = None, batches: int = 40, **options: Any
    ) -> dict[int, dict[str, float]]:
        model = Timed(ImageEncoder((1, 2, 2), Softmax(), dim=4, depth=1, heads=1), 2)
        model.clock = clock
        recorder = Recorder()
        trainer = pl.Trainer(
            accelerator="cpu", logger=recorder, enable_model_summary=False, default_root_dir=tmp_path,
            callbacks=[ThroughputLogger(peak_flops), *callbacks],
            **{"enable_progress_bar": False, "enable_checkpointing": False, "max_epochs": 1, "log_every_n_steps": 5}
            | options,
        )  # fmt: skip
        loader = DataLoader(range(8 * batches), batch_size=8, collate_fn=load)  # type: ignore[arg-type]
        trainer.fit(model, loader, loader if "limit_val_batches" in options else None)
        return recorder.rows

    return fit


def test_rates_are_those_computed_by_hand_and_the_first_step_does_not_count(fit: Fit) -> None:
    rows = fit(batches=12)
    assert list(rows) == [4, 9]  # the steps as Lightning logs its own values: the first is 0
    for row in rows.values():
        assert row["samples_per_second"] == pytest.approx(8 / (STEP + LOADING))
        assert row["tokens_per_second"] == pytest.approx(8 * NUM_TOKENS / (STEP + LOADING))
        assert row["step_ms"] == pytest.approx(1000 * (STEP + LOADING))
        assert row["data_wait_ms"] == pytest.approx(1000 * LOADING)
        assert "mfu" not in row  # the peak of a CPU is not known


def test_no_token_is_lost_in_a_long_training(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    update = throughput.Throughput.update
    monkeypatch.setattr(
        throughput.Throughput, "update", lambda self, **sums: counted.append(sums["lengths"]) or update(self, **sums)
    )
    monkeypatch.setattr(ImageEncoder, "count_tokens", lambda self, inputs: torch.tensor(2**24 + 1))
    fit(batches=10)
    assert counted == [0, 4 * (2**24 + 1), 9 * (2**24 + 1)]  # float32 cannot hold them


def test_validation_does_not_count(fit: Fit) -> None:
    rows = fit(batches=12, max_epochs=3, limit_val_batches=2, val_check_interval=3)
    assert len(rows) == 7
    for row in rows.values():
        # if validation interrupts an epoch, the time to load the next batch is not counted
        assert row["step_ms"] <= 1000 * (STEP + LOADING) + 1e-3
        assert row["step_ms"] - row["data_wait_ms"] == pytest.approx(1000 * STEP)


def test_the_first_batch_of_an_epoch_counts_as_data_wait(fit: Fit) -> None:
    rows = fit(batches=5, max_epochs=3, limit_val_batches=1)
    assert list(rows) == [4, 9, 14]
    for row in rows.values():
        assert row["data_wait_ms"] == pytest.approx(1000 * LOADING)
        assert row["step_ms"] == pytest.approx(1000 * (STEP + LOADING))


def test_checkpoints_do_not_count(fit: Fit, tmp_path: Path) -> None:
    saver = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    rows = fit(saver, batches=11, enable_checkpointing=True)
    assert list(rows) == [4, 9]
    for row in rows.values():
        assert row["step_ms"] - row["data_wait_ms"] == pytest.approx(1000 * STEP)
        assert row["data_wait_ms"] <= 1000 * LOADING


def test_a_step_of_accumulated_gradients_is_all_its_batches(fit: Fit) -> None:
    rows = fit(batches=30, accumulate_grad_batches=3)
    assert list(rows) == [4, 9]
    for row in rows.values():
        assert row["step_ms"] == pytest.approx(3000 * (STEP + LOADING))
        assert row["data_wait_ms"] == pytest.approx(3000 * LOADING)
        assert row["samples_per_second"] == pytest.approx(8 / (STEP + LOADING))


def test_a_training_shorter_than_the_logging_interval_is_logged_at_its_end(fit: Fit) -> None:
    rows = fit(batches=4, log_every_n_steps=50)
    assert list(rows) == [3]
    assert rows[3]["samples_per_second"] == pytest.approx(8 / (STEP + LOADING))


def test_a_single_step_has_no_rate(fit: Fit) -> None:
    assert fit(batches=1) == {}


def test_with_every_step_logged_all_but_the_first_are(fit: Fit) -> None:
    rows = fit(batches=4, log_every_n_steps=1)
    assert list(rows) == [1, 2, 3]
    assert rows[1]["step_ms"] == pytest.approx(1000 * (STEP + LOADING))


def test_nothing_is_logged_where_logging_is_off(fit: Fit) -> None:
    assert fit(batches=4, log_every_n_steps=0) == {}


def test_mfu_is_the_flops_of_training_as_a_share_of_the_given_peak(fit: Fit) -> None:
    model = Classifier(ImageEncoder((1, 2, 2), Softmax(), dim=4, depth=1, heads=1), 2)
    rows = fit(batches=6, peak_flops=1e6)
    assert rows[4]["mfu"] == pytest.approx(flops_per_sample(model).training * 8 / (STEP + LOADING) / 1e6)
    with pytest.raises(ValueError, match="peak_flops must be positive"):
        ThroughputLogger(peak_flops=0.0)


def test_the_device_is_waited_for_at_logged_steps_only(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []

    class Step(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            self.step = trainer.global_step

    step = Step()
    monkeypatch.setattr(torch.cpu, "synchronize", lambda *_: waits.append(step.step))
    fit(step, batches=12)
    assert waits == [0, 4, 9, 11]  # the first, fifth and tenth step, and the end of the epoch


def test_two_ranks_are_added_not_doubled(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank is three times as slow and uses twice the memory."""
    slower = torch.tensor([1 / 3, 1 / 3, 3, 5, 2, 1])
    monkeypatch.setattr(
        pl.strategies.SingleDeviceStrategy, "all_gather", lambda self, own: torch.stack([own, own * slower])
    )
    row = fit(batches=6)[4]
    assert row["samples_per_second"] == pytest.approx((1 + 1 / 3) * 8 / (STEP + LOADING))
    assert row["tokens_per_second"] == pytest.approx(NUM_TOKENS * row["samples_per_second"])
    assert row["step_ms"] == pytest.approx(2000 * (STEP + LOADING))
    assert row["data_wait_ms"] == pytest.approx(3000 * LOADING)


def test_peak_memory_is_that_of_the_process_in_gib(fit: Fit) -> None:
    def peak() -> float:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) / 2**20

    before = peak()
    found = fit(batches=6)[4]["peak_memory_gib"]
    assert before * 0.999 <= found <= peak() * 1.001


def test_the_progress_bar_shows_samples_per_second(fit: Fit) -> None:
    shown: dict[str, Any] = {}

    class Bar(pl.callbacks.ProgressBar):
        def disable(self) -> None: ...

        def enable(self) -> None: ...

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            shown.update(self.get_metrics(trainer, pl_module))

    fit(Bar(), batches=7, enable_progress_bar=True)
    assert shown["samples/s"] == round(8 / (STEP + LOADING))
