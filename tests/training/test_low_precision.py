"""Losses in low precision stay near those in float32, for pixels and for sound, on the CPU."""

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F

from datamodules import Digits, Vowels
from longseq.attention import Linformer, Verma
from longseq.encoders import Conv1d, ImageEncoder, SpectrogramEncoder
from longseq.training import Classifier, MixUp
from longseq.training.statistics import measure_inputs

SMALL = {"dim": 32, "depth": 2, "heads": 2}


@pytest.fixture(scope="module", params=["pixels", "sound"])
def data(request):
    data = Digits(batch_size=16) if request.param == "pixels" else Vowels(batch_size=16)
    data.setup("fit")
    return data


def losses(data, mechanism, dtype, steps=8, **options):
    """The losses of mixed-precision steps on one batch, which is soon learned; float16 scales its gradients."""
    torch.manual_seed(0)
    if isinstance(data, Digits):
        encoder = ImageEncoder(data.shape, mechanism, **SMALL, **options)
    else:
        encoder = SpectrogramEncoder(data.sample_rate_hz, data.seconds, mechanism, **SMALL, **options)
    measure_inputs(encoder, data)
    model = Classifier(encoder, data.num_classes)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    found = []
    inputs, labels = next(iter(data.train_dataloader()))
    for _ in range(steps):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.item())
    assert scaler.get_scale() in (1.0, 65536.0)  # a step skipped for gradients that are not finite would lower it
    return torch.tensor(found)


def test_they_do_without_position_embeddings_too(data):
    options = {"positions": "none", "local": Conv1d(), "any_length": True}
    low = losses(data, Verma(), torch.bfloat16, **options)
    torch.testing.assert_close(low, losses(data, Verma(), torch.float32, **options), rtol=0, atol=0.03)


@pytest.mark.parametrize("mechanism", [Linformer(8), Verma()], ids=repr)
def test_losses_in_half_precisions_follow_those_in_float32(data, mechanism):
    expected = losses(data, mechanism, torch.float32)
    assert expected[-1] < expected[0] - 0.1
    for dtype in (torch.bfloat16, torch.float16):
        torch.testing.assert_close(losses(data, mechanism, dtype), expected, rtol=0, atol=0.02)


def test_a_training_with_weights_in_bfloat16_hears_sounds_in_float32(monkeypatch):
    data, plain, heard = Vowels(batch_size=16), [], []
    encoder = SpectrogramEncoder(data.sample_rate_hz, data.seconds, Verma(), **SMALL)
    front_end, mixed = encoder.front_end, MixUp.__call__
    monkeypatch.setattr(encoder, "front_end", lambda inputs: front_end(heard.append(inputs["waveforms"]) or inputs))
    monkeypatch.setattr(MixUp, "share", lambda mix, share=MixUp.share: 0 * share(mix) + 0.3)
    monkeypatch.setattr(MixUp, "__call__", lambda mix, x, y: mixed(mix, plain.append(x["waveforms"]) or x, y))
    trainer = pl.Trainer(
        accelerator="cpu", precision="bf16-true", max_epochs=1, limit_train_batches=1, limit_val_batches=1,
        num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Classifier(encoder, data.num_classes, mix=MixUp()), datamodule=data)
    expected = 0.3 * plain[0].double() + 0.7 * plain[0].double().roll(1, 0)
    torch.testing.assert_close(heard[-2].double(), expected, rtol=0, atol=1e-6)
    assert torch.equal(heard[-1], next(iter(data.val_dataloader()))[0]["waveforms"])
