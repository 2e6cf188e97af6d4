"""Gaps in signals, NaN in the inputs, are masked exactly: what stands in one changes nothing."""

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import longseq.encoders.forward_pass as forward_pass
from longseq.attention import LSTM, S4D, Linformer, Mechanism, Reformer, Softmax, Verma
from longseq.attention.examples import every_mechanism
from longseq.encoders import Conv1d, SpectrogramEncoder, WaveformEncoder
from longseq.tasks import Masked
from longseq.training import Classifier, MixUp

NAN = float("nan")
SMALL = {"dim": 16, "depth": 2, "heads": 4, "channels": 2, "gaps": True, "sample_rate_hz": 100, "seconds": 2.0}
SPECTROGRAM = {"num_mels": 6, "hop_ms": 50, "window_ms": 200}


def encoder(kind: type, mechanism: Mechanism, **options: object) -> WaveformEncoder | SpectrogramEncoder:
    torch.manual_seed(0)
    own = {"patch_size": 5} if kind is WaveformEncoder else SPECTROGRAM
    model = kind(attention=mechanism, **{**SMALL, **own, **options}).double().eval()
    model.set_statistics(torch.randn_like(model.mean), torch.rand_like(model.std) + 0.5)
    for name, weight in model.named_parameters():
        if "local" in name:  # neutral at the start
            torch.nn.init.normal_(weight, std=0.3)
    return model


def signals(*lengths: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    waveforms = torch.zeros(len(lengths), 2, max(lengths), dtype=torch.float64)
    for waveform, length in zip(waveforms, lengths, strict=True):
        waveform[:, :length] = torch.randn(2, length, dtype=torch.float64, generator=generator) + 3
    return {"waveforms": waveforms, "lengths": torch.tensor(lengths)}


def with_gap(batch: dict[str, Tensor], first: int, stop: int) -> dict[str, Tensor]:
    waveforms = batch["waveforms"].clone()
    waveforms[:, :, first:stop] = NAN
    return {**batch, "waveforms": waveforms}


IN_SHORT = [Softmax(), Linformer(7), Verma(), LSTM(), S4D(), Reformer(2, 8)]
EVERY = pytest.mark.parametrize(
    "mechanism",
    IN_SHORT + [pytest.param(mechanism, marks=pytest.mark.thorough) for mechanism in every_mechanism()],
    ids=repr,
)


@pytest.mark.parametrize("kind", [WaveformEncoder, SpectrogramEncoder])
@EVERY
def test_what_stands_in_a_gap_changes_no_bit(mechanism: Mechanism, kind: type, monkeypatch) -> None:
    model = encoder(kind, mechanism, local=Conv1d(3))
    batch = with_gap(signals(200, 160), 60, 95)
    expected = model(batch)
    assert expected.isfinite().all()
    plain = forward_pass.without_gaps

    def filled(picture: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        known, without = plain(picture, rows)
        noise = 100 * torch.randn_like(without)
        return known, torch.where(known[:, None, :, None], without, noise)

    monkeypatch.setattr(forward_pass, "without_gaps", filled)
    assert torch.equal(model(batch), expected)


@pytest.mark.parametrize("kind", [WaveformEncoder, SpectrogramEncoder])
@EVERY
def test_a_signal_that_ends_in_a_gap_is_the_shorter_signal(mechanism: Mechanism, kind: type) -> None:
    model = encoder(kind, mechanism, local=Conv1d(3))
    for length in (100, 113):
        longer = with_gap(signals(200, 160), length, 200)
        shorter = {"waveforms": longer["waveforms"][:, :, :length], "lengths": torch.tensor([length, length])}
        torch.testing.assert_close(model(longer), model(shorter), atol=1e-9, rtol=1e-9)


def test_exact_attention_without_positions_sees_the_signal_without_its_gap() -> None:
    model = encoder(WaveformEncoder, Softmax())
    whole = signals(200)
    gap = with_gap(whole, 60, 95)
    waveforms = torch.cat([whole["waveforms"][..., :60], whole["waveforms"][..., 95:]], dim=-1)
    torch.testing.assert_close(model(gap), model({"waveforms": waveforms, "lengths": torch.tensor([165])}))


@pytest.mark.parametrize("kind", [WaveformEncoder, SpectrogramEncoder])
@pytest.mark.parametrize("any_length", [False, True])
@pytest.mark.parametrize("subtract_mean", [None, "level", "bands"])
def test_a_signal_with_a_gap_is_the_same_alone_and_in_a_batch(kind: type, any_length: bool, subtract_mean) -> None:
    options = {"subtract_mean": subtract_mean} if kind is SpectrogramEncoder else {}
    model = encoder(kind, Softmax(), any_length=any_length, local=Conv1d(3), positions="none", **options)
    batch = with_gap(signals(200, 160, 90), 60, 80)
    alone = [
        model({"waveforms": waveform[None, :, :length], "lengths": length[None]})
        for waveform, length in zip(batch["waveforms"], batch["lengths"], strict=True)
    ]
    torch.testing.assert_close(model(batch), torch.cat(alone))
    shorter = {"waveforms": batch["waveforms"][:, :, :60], "lengths": torch.tensor([60, 60, 60])}
    to_its_end = {**batch, "waveforms": batch["waveforms"].clone()}
    to_its_end["waveforms"][:, :, 60:] = NAN
    torch.testing.assert_close(model(to_its_end), model(shorter))


def test_a_missing_sample_of_a_present_token_is_the_mean_of_its_channel() -> None:
    model = encoder(WaveformEncoder, Softmax())
    batch = signals(200)
    holes, filled = batch["waveforms"].clone(), batch["waveforms"].clone()
    for channel, sample in ((0, 17), (1, 120)):
        holes[0, channel, sample], filled[0, channel, sample] = NAN, model.mean[channel, 0, 0]
    holes[0, 1, 50:60], filled[0, 1, 50:60] = NAN, model.mean[1, 0, 0]  # a channel alone is no gap
    expected = model({**batch, "waveforms": filled})
    torch.testing.assert_close(model({**batch, "waveforms": holes}), expected)


@pytest.mark.parametrize("kind", [WaveformEncoder, SpectrogramEncoder])
def test_mean_and_deviation_are_those_of_what_is_there(kind: type) -> None:
    model = encoder(kind, Softmax())
    batch = with_gap(signals(200, 160), 60, 95)
    batch["waveforms"][0, 1, 100:150] = NAN
    model.measure([batch])
    picture, rows = model.front_end(batch), model.rows(batch)
    assert rows is not None
    for channel in range(2):
        own = torch.cat([one[channel, :count] for one, count in zip(picture, rows.tolist(), strict=True)])
        own = own[~own.isnan().any(1)]
        torch.testing.assert_close(model.mean[channel, 0], own.mean(0))
        torch.testing.assert_close(model.std[channel, 0], own.std(0, correction=0))


@pytest.mark.parametrize("kind", [WaveformEncoder, SpectrogramEncoder])
def test_an_input_without_any_sample_has_no_features_and_leaves_others_alone(kind: type) -> None:
    model = encoder(kind, Softmax())
    batch = signals(200, 160)
    expected = model(batch)
    batch["waveforms"][1] = NAN
    features = model(batch)
    assert features[1].isnan().all()
    torch.testing.assert_close(features[0], expected[0])


@pytest.mark.parametrize("kind", [WaveformEncoder, SpectrogramEncoder])
@pytest.mark.parametrize(
    "options",
    [{}, {"task": Masked(0.3, 2)}, {"mix": MixUp()}, {"pool": "attention"}],
    ids=["plain", "masked", "mixed", "pooled"],
)
def test_weights_stay_finite_in_training(kind: type, options: dict) -> None:
    model = Classifier(encoder(kind, Softmax(), local=Conv1d(3)), 2, **options).double().train()
    batch = with_gap(signals(200, 160, 120), 60, 95), torch.tensor([0, 1, 0])
    options = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_steps=2, enable_progress_bar=False, **options)  # type: ignore[arg-type]
    trainer.fit(model, DataLoader([batch, batch], batch_size=None))  # type: ignore[arg-type]
    assert all(weight.isfinite().all() for weight in model.parameters())
