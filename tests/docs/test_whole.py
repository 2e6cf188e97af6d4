"""docs/whole.py computes what the package computes: a newcomer reads it first."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pages import ROOT
from torch.utils.data import DataLoader, TensorDataset

from longseq.attention import Linformer, Mechanism, Verma
from longseq.encoders import ImageEncoder
from longseq.training import Classifier

SHAPE, CLASSES, STEPS = (3, 4, 6), 5, 4
SIZES = {"d": 16, "depth": 2, "h": 4, "k": 7}
# Weights of the package that have another name in the file, where encoder.trunk. is left out.
NAMES = {"patch_embed.proj": "patch_embed", "project_keys.weight": "E", "project_values.weight": "F", "mlp.": "",
         "encoder.trunk.": "", "encoder.": ""}  # fmt: skip


def whole() -> Any:
    spec = importlib.util.spec_from_file_location("whole", ROOT / "docs/whole.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def named(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights or gradients of the package, under the names and in the shapes of the file."""
    renamed = {}
    for name, value in values.items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        renamed[name] = value.flatten(1) if name == "patch_embed.weight" else value
    return {name: value.clone() for name, value in renamed.items()}


class Recorder(pl.Callback):
    """Keeps the gradients and weights of each step of a training."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        gradients = {name: weight.grad for name, weight in pl_module.named_parameters() if weight.grad is not None}
        self.gradients.append(named(gradients))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.weights.append(named(pl_module.state_dict()))


@pytest.mark.parametrize(
    ("formula", "attention"),
    [("linformer", Linformer(SIZES["k"], sharing="headwise")), ("verma", Verma(SIZES["k"], sharing="headwise"))],
)
def test_the_file_has_the_logits_loss_gradients_and_trained_weights_of_the_package(
    formula: str, attention: Mechanism, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    images = torch.randint(256, (STEPS * 3, *SHAPE), dtype=torch.uint8)
    labels = torch.randint(CLASSES, (len(images),))
    encoder = ImageEncoder(SHAPE, attention, dim=SIZES["d"], depth=SIZES["depth"], heads=SIZES["h"])
    encoder.measure([images])
    product = Classifier(encoder, CLASSES, learning_rate=0.01, weight_decay=0.2, warmup_fraction=0.5).double()
    for weight in product.parameters():  # biases and norms too: zeros and ones would hide a mistake
        torch.nn.init.normal_(weight, std=0.3)
    file = whole()
    model = file.Classifier(SHAPE, CLASSES, **SIZES, formula=getattr(file, formula)).double()
    model.load_state_dict(named(product.state_dict()))
    logits = product(images)
    assert logits.dtype == torch.float64
    torch.testing.assert_close(model(images), logits, rtol=0, atol=1e-6)

    recorder = Recorder()
    trainer = pl.Trainer(
        default_root_dir=tmp_path, max_epochs=1, accelerator="cpu", precision="64-true", logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, callbacks=[recorder],
    )  # fmt: skip
    trainer.fit(product, DataLoader(TensorDataset(images, labels), batch_size=3))
    optimizer = file.make_optimizer(model, weight_decay=0.2)
    for step in range(STEPS):
        batch = images[3 * step : 3 * step + 3], labels[3 * step : 3 * step + 3]
        rate = file.learning_rate(step, STEPS, peak=0.01, warmup_fraction=0.5)
        loss = file.train_step(model, optimizer, *batch, rate)
        assert loss == pytest.approx(recorder.losses[step], abs=1e-6)
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        torch.testing.assert_close(gradients, recorder.gradients[step], rtol=0, atol=1e-6)
        torch.testing.assert_close(dict(model.state_dict()), recorder.weights[step], rtol=0, atol=1e-6)
