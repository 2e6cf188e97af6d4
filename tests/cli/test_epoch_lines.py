"""What a training prints, against the curves that it logs and a clock that only the test moves."""

import json
import re
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest

from longseq.cli.runs import epoch_lines
from longseq.cli.runs.epoch_lines import EpochLines, _duration
from longseq.reports.interval import wilson
from longseq.training.board.curves import read_curves

FIT = ["fit", "--config", "image/digits", "--model.encoder.dim", "8", "--model.encoder.depth", "1"]
FIT += ["--trainer.accelerator", "cpu", "--trainer.log_every_n_steps", "1", "--data.batch_size", "256"]
LINE = r"epoch (\d)/3  loss ([\d.]+)  val ([\d.]+)  best ([\d.]+) \((\d)\).*"


@pytest.mark.parametrize("bar", ["true", "false"])
def test_a_training_prints_each_epochs_figures_and_ends_with_the_interval_and_what_to_run_next(
    command, tmp_path: Path, bar: str
) -> None:
    done = command(*FIT, "--trainer.max_epochs", "3", "--trainer.enable_progress_bar", bar)
    assert done.code == 0, done.err
    lines = [re.fullmatch(LINE, line.strip()) for line in done.out.splitlines() if line.startswith("epoch ")]
    run = tmp_path / "runs/digits/0"
    curves = read_curves(run)
    losses, figures = ([value for _, value in curves[name]] for name in ("train/loss", "val/accuracy"))
    steps = len(losses) // 3
    assert len(lines) == len(figures) == 3
    for epoch, line in enumerate(lines, 1):
        assert line is not None
        best = max(figures[:epoch])
        assert int(line[1]) == epoch and int(line[5]) == figures.index(best) + 1
        assert float(line[2]) == pytest.approx(mean(losses[(epoch - 1) * steps : epoch * steps]), abs=0.006)
        assert (float(line[3]), float(line[4])) == pytest.approx((figures[epoch - 1], best), abs=6e-4)
    accuracy = json.loads((run / "metrics.json").read_text())["test/accuracy"]
    low, high = wilson(round(359 * accuracy), 359)
    at = done.out.index(f"test accuracy: {accuracy:.4f}\n")
    assert done.out[at:].split("\n")[1].strip() == f"95 % interval {low:.3f} to {high:.3f} (359 samples)"
    use = "longseq predict (or explain) --ckpt_path runs/digits/0/best.ckpt --input FILE"
    assert done.out.rstrip().endswith(f"next:          longseq board runs/digits, {use}")


def test_the_time_left_is_that_of_the_steps_left_at_the_speed_of_those_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 130.0])
    monkeypatch.setattr(epoch_lines, "_clock", lambda: next(now))
    trainer = SimpleNamespace(
        callbacks=[], max_steps=-1, max_epochs=20, num_training_batches=9, accumulate_grad_batches=2,
        global_step=50, progress_bar_callback=None,
    )  # fmt: skip
    lines = EpochLines(SimpleNamespace())
    lines.on_train_start(trainer, None)  # resumed at step 50
    trainer.global_step = 60  # ten steps in 30 seconds, and 100 in all
    assert lines._left(trainer) == 120
    assert [_duration(seconds) for seconds in (0.4, 59, 120, 7200, float("inf"))] == ["", "59 s", "2 min", "2.0 h", ""]
