"""Compiled trainings on a GPU, by `make gpu`: CUDA graphs and Triton's kernels run there alone."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from datamodules import Digits
from longseq import Linformer, Verma
from longseq.attention import Mechanism
from longseq.encoders import Conv2d, ImageEncoder, SpectrogramEncoder
from longseq.encoders.sound import padded_clips
from longseq.training import Classifier
from longseq.training.compiled import Compile
from longseq.training.generators import GeneratorStates
from longseq.training.mix import MixUp

pytestmark = pytest.mark.needs("gpu")

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipping": {"trainer": {"gradient_clip_val": 0.1}},
    "averages": {"trainer": {"callbacks": [EMAWeightAveraging(decay=0.9)]}},
    "accumulation": {"trainer": {"accumulate_grad_batches": 3}},
    "checkpointing": {"encoder": {"checkpointing": True}},
    "local mixing": {"encoder": {"local": Conv2d(), "pool": "token"}},
    "drop path and MixUp": {"encoder": {"drop_path": 0.2, "dropout": 0.1}, "model": {"mix": MixUp(0.5)}},
}


def trained(
    folder: Path,
    how: Compile,
    encoder: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    mechanism: Mechanism | None = None,
    **fit: Any,
) -> Classifier:
    """Two epochs on digits, with a smaller last batch and a validation after each."""
    pl.seed_everything(0)
    torch.compiler.reset()
    of_images = ImageEncoder(
        (1, 8, 8), mechanism or Linformer(16), **{"dim": 64, "depth": 2, "heads": 4, **(encoder or {})}
    )
    classifier = Classifier(of_images, 10, compile=how, **{"learning_rate": 1e-3, **(model or {})})
    options = {"max_epochs": 2, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options |= {"enable_checkpointing": False, "precision": "32-true", **(trainer or {})}
    lightning = pl.Trainer(accelerator="gpu", devices=1, default_root_dir=str(folder), **options)
    lightning.fit(classifier, datamodule=Digits(batch_size=300), **fit)
    assert lightning.global_step and lightning.callback_metrics["val/loss"].isfinite()
    return classifier


def change(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """The largest difference between weights."""
    return max((after[name] - before[name]).abs().max().item() for name in before if before[name].is_floating_point())


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("how", [True, "blocks", "reduce-overhead"])
def test_a_compiled_training_ends_where_one_without_ends(how: Compile, name: str, tmp_path: Path) -> None:
    by_chance = name == "drop path and MixUp"  # compiled, masks are drawn in another order
    weights = [trained(tmp_path, kind, **SETTINGS[name]).state_dict() for kind in (False, how)]
    assert change(*weights) < (0.5 if by_chance else 5e-3)


@pytest.mark.parametrize("how", [False, True, "blocks", "reduce-overhead"])
def test_a_training_that_is_resumed_within_an_epoch_is_bit_equal(how: Compile, tmp_path: Path) -> None:
    settings: dict[str, Any] = SETTINGS["drop path and MixUp"]
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = {"callbacks": [saving, GeneratorStates()], "enable_checkpointing": True, "precision": "bf16-mixed"}
    whole = trained(tmp_path, how, **settings, trainer=trainer)
    assert (tmp_path / "step=6.ckpt").exists(), sorted(tmp_path.iterdir())
    trainer["callbacks"] = [GeneratorStates()]
    resumed = trained(
        tmp_path, how, **settings, trainer=trainer, ckpt_path=str(tmp_path / "step=6.ckpt"), weights_only=True
    )
    assert change(whole.state_dict(), resumed.state_dict()) == 0.0


@pytest.mark.parametrize("mechanism", [Linformer(16), Verma(), Verma(16)], ids=repr)
def test_a_layer_gives_the_values_and_gradients_of_float64(mechanism: Mechanism) -> None:
    """Whichever kernels the GPU has for it."""
    torch.manual_seed(0)
    encoder = ImageEncoder((1, 64, 64), mechanism, dim=128, depth=2, heads=2, local=Conv2d())
    encoder.set_statistics(torch.full((1, 1, 1), 128.0), torch.full((1, 1, 1), 64.0))
    images = torch.randint(256, (2, 1, 64, 64), dtype=torch.uint8)
    results = []
    for kind in (torch.float64, torch.float32):
        encoder.zero_grad()
        there = encoder.to("cuda", kind)
        features = there(images.cuda())
        (
            features * torch.linspace(-1, 1, features.numel(), device="cuda", dtype=kind).view_as(features)
        ).sum().backward()
        gradients = [weight.grad.double() for weight in there.parameters() if weight.grad is not None]
        results.append([features.detach().double(), *gradients])
    for exact, computed in zip(*results, strict=True):
        assert (computed - exact).norm() <= 1e-3 * exact.norm() + 1e-9


@pytest.mark.parametrize("how", [True, "blocks", "reduce-overhead"])
def test_sounds_of_several_lengths_train_compiled(how: Compile, tmp_path: Path) -> None:
    torch.compiler.reset()
    losses = []
    for kind in (False, how):
        pl.seed_everything(0)
        encoder = SpectrogramEncoder(8000, 0.5, Linformer(16), num_mels=32, dim=64, depth=2, heads=4)
        model = Classifier(encoder, 3, compile=kind)
        clips = [padded_clips(length, length // 2, 900) for length in (4000, 2700, 3900, 1000)]
        batches = [(clip, torch.tensor([0, 1, 2])) for clip in clips]
        lightning = pl.Trainer(
            accelerator="gpu", devices=1, max_epochs=2, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, default_root_dir=str(tmp_path),
        )  # fmt: skip
        lightning.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        losses.append(lightning.callback_metrics["train/loss"].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_features_that_are_kept_are_not_overwritten_by_the_next_batch(tmp_path: Path) -> None:
    model = trained(tmp_path, "reduce-overhead").eval().cuda()
    images = torch.randint(17, (3, 4, 1, 8, 8), dtype=torch.uint8, device="cuda")
    with torch.no_grad():
        features = [model.encoder(batch) for batch in images for _ in range(2)]
    assert not torch.equal(features[1], features[5])


def test_a_loader_of_tensors_trains_too(tmp_path: Path) -> None:
    images = torch.randint(256, (40, 1, 8, 8), dtype=torch.uint8)
    data = DataLoader(TensorDataset(images, torch.arange(40) % 3), 12)
    model = Classifier(ImageEncoder((1, 8, 8), Verma(), dim=64, depth=1, heads=4), 3, compile="reduce-overhead")
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 3}
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, enable_checkpointing=False, precision="16-mixed", gradient_clip_val=1.0,
        default_root_dir=str(tmp_path), **options,
    )  # fmt: skip
    trainer.fit(model, data)
    assert trainer.callback_metrics["train/loss"].isfinite()
