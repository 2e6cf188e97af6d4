"""Version 0.1.0 wrote these checkpoints before tasks and token mixers existed: they load, test and train on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from longseq.training import Classifier

OLD = Path(__file__).with_name("old")
SHORT = ["--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1"]


def inputs(name: str, model: Classifier) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if name == "image":
        return torch.randint(0, 17, (2, 1, 8, 8), generator=generator).float()
    return torch.randn(2, model.encoder.num_samples, generator=generator) * 0.1


@pytest.mark.parametrize("name", ["image", "sound"])
def test_the_logits_are_those_of_the_version_that_wrote_it(name: str) -> None:
    model = Classifier.load_from_checkpoint(OLD / f"{name}.ckpt").eval()
    expected = torch.tensor(json.loads((OLD / "logits.json").read_text())[name])
    with torch.no_grad():
        torch.testing.assert_close(model(inputs(name, model)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["image", "sound"])
def test_it_tests_and_its_training_goes_on(name: str, command: Callable, tmp_path: Path) -> None:
    path = OLD / f"{name}.ckpt"
    tested = command("test", "--ckpt_path", path, "--trainer.limit_test_batches", "1")
    assert (tested.code, "test accuracy:" in tested.out) == (0, True), tested.err
    done = command("fit", "--ckpt_path", path, "--trainer.max_steps", "4", "--experiment", "on", *SHORT)
    assert done.code == 0, done.err
    assert torch.load("runs/on/0/last.ckpt", weights_only=True)["global_step"] == 4
