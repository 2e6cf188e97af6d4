"""Real processes (gloo, CPU) that hold parts of all weights train as one process does."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging
from test_sequence_parallel import FIT, tensors, trained

import longseq
from longseq import ImageEncoder, Linformer
from longseq.arguments import ArgumentError
from longseq.files.checkpoint import CheckpointError, read_any
from longseq.training import Classifier, QuantizationAwareTraining
from longseq.training.devices.fully_sharded import _refuse_unsharded_training

SCRIPT = Path(__file__).with_name("sharded_weights.py")
SHARDED = ["--trainer.strategy", "FullySharded", "--trainer.devices", "2"]
PARTS = [*SHARDED, "--trainer.strategy.save_distributed_checkpoint", "true"]


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    done = forked.run(SCRIPT, folder, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.thorough
def test_every_mechanism_and_sharing_ends_three_steps_with_the_weights_of_one_process(apart: Path) -> None:
    differences = json.loads((apart / "differences.json").read_text())
    assert len(differences) > 25
    for name, difference in differences.items():
        assert difference < 1e-9, name


def test_ten_steps_in_bf16_mixed_end_with_the_weights_of_one_process_that_takes_the_same_shares(apart: Path) -> None:
    differences = json.loads((apart / "mixed.json").read_text())
    assert len(differences) == 3 and max(differences.values()) < 1e-6, differences


def test_a_model_built_on_the_meta_device_starts_with_the_weights_of_one_that_was_not(apart: Path) -> None:
    started = json.loads((apart / "started.json").read_text())
    assert started == {
        "ImageEncoder": 0.0, "SpectrogramEncoder": 0.0, "WaveformEncoder": 0.0, "ASTEncoder": 0.0
    }  # fmt: skip


def test_a_training_has_the_weights_moments_and_figures_of_ddp(tmp_path: Path) -> None:
    ours, theirs = trained(tmp_path, 2, 1, "fullysharded"), trained(tmp_path, 2, 1)
    expected, found = tensors(theirs[0]), tensors(ours[0])
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert type(value) is torch.Tensor and torch.allclose(value, expected[name], atol=1e-9), name
    for name in ("train/loss", "val/loss", "val/accuracy", "test/loss"):
        assert ours[1][name] == pytest.approx(theirs[1][name], abs=1e-9), name
    flops = [of["throughput/mfu"] / of["throughput/samples_per_second"] for of in (ours[2], theirs[2])]
    assert flops[0] == pytest.approx(flops[1], 0.01)


@pytest.fixture(scope="module")
def from_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    done = forked.run(SCRIPT.with_name("trained_from_parts.py"), folder, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("pair", [("sharded", "ddp"), ("resumed", "whole")], ids=" and ".join)
def test_a_training_from_parts_ends_with_the_weights_and_moments_of_its_like(
    pair: tuple[str, str], from_parts: Path
) -> None:
    """Started from parts, with a teacher and accumulated gradients; or resumed from parts."""
    found, expected = (tensors(read_any(from_parts / f"{name}.ckpt")) for name in pair)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.allclose(value, expected[name], atol=1e-9), name
    before = tensors(read_any(from_parts / "parts.ckpt"))
    assert max(float((found[name] - before[name]).abs().max()) for name in found) > 1e-3


def test_a_checkpoint_of_parts_loads_anywhere_and_a_damaged_part_is_named(train_py: Callable, tmp_path: Path) -> None:
    shared = ["--model.encoder.attention.sharing", "layerwise", "--trainer.precision", "bf16-mixed"]
    few = ["--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1"]
    train_py(*FIT, *PARTS, *shared, *few, "--trainer.max_epochs", "1", "--trainer.gradient_clip_val", "1")
    run = tmp_path / "runs/x/0"
    best = read_any(run / "best.ckpt")
    names = [name for name in best["state_dict"] if "project_keys" in name]
    assert len(names) == 2 and len({best["state_dict"][name].data_ptr() for name in names}) == 1
    copied = tmp_path / "copied.ckpt"
    shutil.copytree(run / "best.ckpt", copied)
    both = ["--trainer.limit_test_batches", "2"]  # one process tests the batches of two
    said = train_py("test", "--ckpt_path", str(copied), "--trainer.precision", "bf16-mixed", *both).stdout
    figures = json.loads((run / "metrics.json").read_text())
    (loss,) = (float(line.split()[-1]) for line in said.splitlines() if line.startswith("test loss"))
    assert loss == pytest.approx(figures["test/loss"], abs=1e-3)
    image = tmp_path / "x.png"
    image.write_bytes((SCRIPT.parents[2] / "docs/picture.png").read_bytes())
    ((answer,),) = (found.answers for found in longseq.load(copied).predict(image))
    said = train_py("predict", "--ckpt_path", str(copied), "--input", str(image)).stdout.strip().split("\t")
    assert said[1] == answer.class_name and float(said[2]) == pytest.approx(answer.probability, abs=1e-4)
    part = next(copied.glob("*/*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="copied.ckpt: damaged, the SHA-256 of a part"):
        read_any(copied)
    alone = ["--trainer.strategy", "auto", "--trainer.devices", "1", "--trainer.max_epochs", "2"]
    train_py("fit", "--resume", str(run), *alone)
    assert (run / "last.ckpt").is_file() and read_any(run / "last.ckpt")["global_step"] == 10


def test_lightnings_own_strategy_is_refused_in_one_line(train_py: Callable) -> None:
    done = train_py(*FIT, "--trainer.strategy", "ModelParallelStrategy", expect=2)
    assert "error: trainer.strategy: ModelParallelStrategy cannot shard weights that layers share" in done.stderr


@pytest.mark.parametrize(
    ("model", "encoder", "trainer", "error"),
    [
        ({"optimizer": "muon"}, {}, {}, "must be one of adam, .* got muon; adamw is usual"),
        (
            {},
            {"reversible": True},
            {},
            "^model.encoder.reversible must be false where weights are sharded; ",
        ),
        ({}, {}, {"callbacks": [EMAWeightAveraging()]}, "must not hold EMAWeightAveraging where weights are sharded"),
        ({}, {}, {"callbacks": [QuantizationAwareTraining()]}, "must not hold QuantizationAwareTraining where weights"),
        ({}, {}, {}, "must be measured before the training"),
    ],
)
def test_what_needs_whole_weights_is_refused_by_its_name(model: Any, encoder: Any, trainer: Any, error: str) -> None:
    classifier = Classifier(ImageEncoder((1, 8, 8), Linformer(4), dim=8, depth=1, heads=2, **encoder), 3, **model)
    asked = pl.Trainer(**{"accelerator": "cpu", "logger": False, "enable_checkpointing": False, **trainer})
    with pytest.raises(ArgumentError, match=error):
        _refuse_unsharded_training(asked, classifier)
