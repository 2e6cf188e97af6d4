"""What layers draw by the step of a training: random features of a Performer, rotations of a Reformer."""

from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint

from datamodules import Digits
from longseq.attention import Mechanism, Performer, Reformer
from longseq.attention.others.performer import orthogonal_directions
from longseq.attention.others.reformer import HashedAttention
from longseq.encoders import ImageEncoder
from longseq.training import Classifier
from longseq.training.generators import GeneratorStates

PERFORMER = Performer(num_features=5, redraw_every=3)


def trained(
    folder: Path, steps: int, resume: str | None = None, averaging: bool = False, seed: int = 0,
    attention: Mechanism = PERFORMER,
) -> pl.Trainer:  # fmt: skip
    pl.seed_everything(seed)
    model = Classifier(ImageEncoder((1, 8, 8), attention, dim=8, depth=2, heads=2, dropout=0.1), 10)
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=1, callbacks=[saving, GeneratorStates(), *([EMAWeightAveraging(decay=0.5)] * averaging)],
    )  # fmt: skip
    trainer.fit(model, datamodule=Digits(batch_size=8, num_workers=0), ckpt_path=resume, weights_only=True)
    return trainer


def directions(state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [value for name, value in state.items() if name.endswith("formula.directions")]


def test_features_are_redrawn_by_seed_and_step_and_a_resumed_training_is_bit_equal(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", 8).model.state_dict()
    at = [directions(torch.load(tmp_path / f"whole/step={step}.ckpt")["state_dict"]) for step in range(1, 9)]
    seeds = [int(value) for name, value in whole.items() if name.endswith("formula.seed")]
    for step, found in enumerate(at):
        for seed, drawn in zip(seeds, found, strict=True):
            assert torch.equal(drawn, orthogonal_directions(5, 4, seed + step // 3)), step
    for stop in (3, 5):  # before a draw, and between two
        resumed = trained(tmp_path / str(stop), 8, str(tmp_path / f"whole/step={stop}.ckpt"), seed=1)
        for name, weight in resumed.model.state_dict().items():
            assert torch.equal(weight, whole[name]), name


def test_rotations_are_redrawn_at_every_step_and_a_resumed_training_is_bit_equal(tmp_path: Path) -> None:
    attention = Reformer(rounds=2, chunk=8)
    whole = trained(tmp_path / "whole", 4, attention=attention).model.state_dict()
    (name, *_) = (name for name in whole if name.endswith("formula.rotations"))
    drawn = [torch.load(tmp_path / f"whole/step={step}.ckpt")["state_dict"] for step in range(1, 5)]
    seed = int(whole[name.replace("rotations", "seed")])
    for step, state in enumerate(drawn):
        expected = torch.randn(state[name].shape, generator=torch.Generator().manual_seed(seed + step))
        assert torch.equal(state[name], expected), step
    resumed = trained(tmp_path / "2", 4, str(tmp_path / "whole/step=2.ckpt"), seed=1, attention=attention)
    for name, weight in resumed.model.state_dict().items():
        assert torch.equal(weight, whole[name]), name


def test_averaged_weights_are_saved_with_features_that_were_drawn(tmp_path: Path) -> None:
    trained(tmp_path, 5, averaging=True)
    checkpoint = torch.load(tmp_path / "step=5.ckpt")
    averaged, current = (directions(checkpoint[key]) for key in ("state_dict", "current_model_state"))
    for mine, theirs in zip(averaged, current, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("freeze", ["encoder", None])
def test_only_an_encoder_that_is_frozen_keeps_its_features(freeze: str | None) -> None:
    model = Classifier(ImageEncoder((1, 8, 8), Performer(), dim=8, depth=1, heads=2), 10, freeze=freeze).train()
    model._trainer = pl.Trainer(max_steps=1, logger=False, enable_checkpointing=False)
    formula = model.encoder.trunk.blocks[0].attn.formula
    at_first = formula.directions.clone()
    formula.redraw(5)
    of_another = formula.directions.clone()
    model.on_train_batch_start(None, 0)
    assert torch.equal(formula.directions, of_another if freeze else at_first)


@pytest.mark.parametrize("argument", [{"num_features": 0}, {"redraw_every": -1}], ids=str)
def test_what_a_performer_cannot_be_is_named(argument: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(argument))):
        ImageEncoder((1, 8, 8), Performer(**argument), dim=8, depth=1, heads=2)


def test_what_is_drawn_does_not_depend_on_torchs_default_type() -> None:
    drawn = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        features = HashedAttention(4, 4, 64, Reformer(chunk=8))
        torch.set_default_dtype(dtype)
        try:
            features.draw(3)
            drawn.append((orthogonal_directions(5, 4, 3), features.rotations.clone()))
        finally:
            torch.set_default_dtype(torch.float32)
    for others in drawn[1:]:
        assert all(torch.equal(*pair) for pair in zip(drawn[0], others, strict=True))
