"""The lines at the start of a training."""

import pytest
import pytorch_lightning as pl

from datamodules import Digits
from longseq.attention import Linformer, Softmax
from longseq.encoders import ImageEncoder, SpectrogramEncoder
from longseq.training import Classifier
from longseq.training.board.summary import SequenceSummary, summary
from longseq.training.flops import flops_per_sample


def test_a_layerwise_projection_is_counted_once() -> None:
    model = Classifier(ImageEncoder((1, 8, 8), Linformer(20, "layerwise"), dim=32, depth=3, heads=4), 10)
    lines = dict(line.split(maxsplit=1) for line in summary(model).splitlines())
    total = sum(parameter.numel() for parameter in model.parameters())
    assert lines["parameters"] == f"{total / 1000:.1f} k, 1.3 k of them in projections"  # one E has 20 x 64 weights
    assert lines["tokens"] == "64 a sample, in a grid of 8 x 8"
    assert lines["attention"] == "Linformer(k=20, sharing='layerwise', projection=Linear(start='random'))"
    flops = flops_per_sample(model)
    assert (
        lines["cost"]
        == f"{flops.forward / 1e6:.1f} MFLOPs a sample forward, {flops.training / 1e6:.1f} MFLOPs in training"
    )


def test_frames_and_class_tokens_are_told_apart() -> None:
    encoder = SpectrogramEncoder(4000, 0.5, Softmax(), num_mels=16, dim=8, depth=1, heads=1, pool="token")
    text = summary(Classifier(encoder, 2))
    assert "52 a sample, in a grid of 51 x 1 and 1 in front" in text
    assert text.startswith("encoder     SpectrogramEncoder: 1 blocks")
    assert "0.0 of them in projections" in text


def test_a_cost_is_that_of_the_weights_that_are_trained_now() -> None:
    model = Classifier(ImageEncoder((1, 8, 8), Softmax(), dim=8, depth=2, heads=1), 10)
    whole = summary(model)
    model.encoder.requires_grad_(False)
    frozen = summary(model)
    model.encoder.requires_grad_(True)
    assert whole == summary(model) != frozen


def test_the_summary_is_printed_once_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    model = Classifier(ImageEncoder((1, 8, 8), Softmax(), dim=8, depth=1, heads=1), 10)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, limit_train_batches=1, limit_val_batches=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[SequenceSummary()],
    )  # fmt: skip
    trainer.fit(model, datamodule=Digits())
    assert capsys.readouterr().out.count(summary(model)) == 1
