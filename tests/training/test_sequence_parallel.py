"""Real processes (gloo, CPU) that share the tokens of their sequences train as one process does."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

from longseq.training import SequenceParallel

SCRIPT = Path(__file__).with_name("shared_training.py")
FIT = [
    "fit", "--config", "image/digits", "--experiment", "x", "--trainer.accelerator", "cpu",
    "--trainer.limit_train_batches", "5", "--model.encoder.dim", "16", "--model.encoder.depth", "2",
    "--model.encoder.dropout", "0",
]  # fmt: skip
SHARED = ["--trainer.strategy", "SequenceParallel", "--trainer.devices", "2"]


def trained(
    folder: Path, devices: int, tokens: int, *strategy: str
) -> tuple[dict[str, Any], dict[str, float], dict[str, float]]:
    """The checkpoint, the figures and the throughput of a training."""
    where = folder / "x".join(map(str, (devices, tokens, *strategy)))
    where.mkdir()
    done = forked.run(SCRIPT, devices, tokens, where, *strategy, cwd=where)
    assert done.returncode == 0, done.stderr[-3000:]
    with open(*where.rglob("metrics.csv"), newline="") as file:
        rates = [row for row in csv.DictReader(file) if row.get("throughput/mfu")]
    speed = {name: float(value) for name, value in rates[-1].items() if value and name.startswith("throughput")}
    return torch.load(where / "last.ckpt", weights_only=False), torch.load(where / "figures.pt"), speed


def tensors(checkpoint: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All weights and moments of a checkpoint, by name."""
    moments = checkpoint["optimizer_states"][0]["state"]
    named = {f"{number}.{name}": value for number, of in moments.items() for name, value in of.items()}
    return {name: value for name, value in (checkpoint["state_dict"] | named).items() if value.is_floating_point()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(tmp_path_factory.mktemp("alone"), 1, 1)


def test_two_processes_end_with_the_weights_moments_and_figures_of_one(alone: Any, tmp_path: Path) -> None:
    checkpoint, figures, speed = trained(tmp_path, 2, 2)
    expected, of_one, speed_of_one = alone
    ours, theirs = tensors(checkpoint), tensors(expected)
    assert ours.keys() == theirs.keys() and any("project_keys" in name for name in ours)
    for name, value in ours.items():
        assert value.shape == theirs[name].shape and torch.allclose(value, theirs[name], atol=1e-9), name
    for name in ("train/loss", "val/loss", "val/accuracy", "test/loss", "test/f1"):
        assert figures[name] == pytest.approx(of_one[name], abs=1e-9), name
    ratio = speed["throughput/samples_per_second"] * 64 / speed["throughput/tokens_per_second"]
    assert ratio == pytest.approx(64 / 65)  # each sample counts once, with its 65 tokens
    for shares, of in ((2, speed), (1, speed_of_one)):  # the whole model's FLOPs, on so many devices
        flops = of["throughput/mfu"] * shares / of["throughput/samples_per_second"]
        assert flops == pytest.approx(
            speed_of_one["throughput/mfu"] / speed_of_one["throughput/samples_per_second"], 0.01
        )


def test_groups_share_the_samples_of_a_batch_as_ddp_does(tmp_path: Path) -> None:
    ours, theirs = (trained(tmp_path, *numbers) for numbers in ((4, 2), (2, 1)))
    expected = tensors(theirs[0])
    for name, value in tensors(ours[0]).items():
        assert torch.allclose(value, expected[name], atol=1e-9), name
    for name in ("val/loss", "val/accuracy", "test/loss"):
        assert ours[1][name] == pytest.approx(theirs[1][name], abs=1e-9), name


def test_a_masked_pretraining_ends_with_the_weights_and_figures_of_one_process(tmp_path: Path) -> None:
    (ours, figures, _), (theirs, of_one, _) = (trained(tmp_path, *numbers, "masked") for numbers in ((2, 2), (1, 1)))
    expected = tensors(theirs)
    for name, value in tensors(ours).items():
        assert torch.allclose(value, expected[name], atol=1e-9), name
    for name in ("train/l1", "val/l1", "test/l1"):  # they are counted in float32
        assert figures[name] == pytest.approx(of_one[name], abs=1e-6), name


def test_a_bad_step_is_left_out_where_gradients_are_clipped(tmp_path: Path) -> None:
    ours, theirs = (tensors(trained(tmp_path, *numbers, "bad")[0]) for numbers in ((2, 2), (1, 1)))
    for name, value in ours.items():
        assert value.isfinite().all() and torch.allclose(value, theirs[name], atol=1e-9), name


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--model.encoder.attention", "Softmax"], "model.encoder.attention: must meet all tokens in a sum"),
        (["--model.encoder.dropout", "0.1"], "model.encoder.dropout: must be 0 to be shared by several processes"),
        (["--model.compile", "true"], "model.compile: must be false where devices share a sequence"),
        (["--model.encoder.reversible", "true"], "model.encoder.reversible: must be false to be shared"),
        (["--model.optimizer", "lamb"], "model.optimizer: must be one of adam"),
        (
            ["--trainer.callbacks+=EMAWeightAveraging"],
            "trainer.callbacks: must not hold EMAWeightAveraging where weigh",
        ),
        (
            ["--trainer.callbacks+=QuantizationAwareTraining"],
            "trainer.callbacks: must not hold QuantizationAwareTraining where weigh",
        ),
        (
            ["--trainer.callbacks+=BackboneFinetuning", "--trainer.callbacks.unfreeze_backbone_at_epoch=1"],
            "trainer.callbacks: must not hold BackboneFinetuning with several processes: each would train another enc",
        ),
    ],
)
def test_what_cannot_be_shared_is_one_line(train_py: Callable, flags: list[str], error: str) -> None:
    done = train_py(*FIT, *SHARED, *flags, expect=2)
    assert f"error: {error}" in done.stderr and "Traceback" not in done.stderr


def test_a_sequence_needs_a_device() -> None:
    with pytest.raises(ValueError, match="tokens must be positive, got 0"):
        SequenceParallel(0)
