"""Sound as sequences of spectrogram frames."""

import numpy as np
import pytest
import torch

from longseq.attention import Linformer, Softmax
from longseq.encoders import SpectrogramEncoder
from longseq.encoders.spectrogram import LogMel, fft_length

SMALL = {"dim": 16, "depth": 2, "heads": 2}


def encoder(**change: object) -> SpectrogramEncoder:
    torch.manual_seed(0)
    arguments = {"sample_rate_hz": 8000, "seconds": 1.0, "attention": Softmax(), **SMALL, **change}
    return SpectrogramEncoder(**arguments).eval()


def test_the_log_mel_is_that_of_a_short_time_fourier_transform_by_hand() -> None:
    """Compute the Hann window, the power and the triangles of the HTK mel scale in NumPy."""
    model = encoder(num_mels=20)
    wave = np.random.default_rng(0).standard_normal(8000)
    n_fft, window, hop = model.log_mel.mel.n_fft, 200, 80

    hann = np.zeros(n_fft)
    start = (n_fft - window) // 2
    hann[start : start + window] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    padded = np.pad(wave, n_fft // 2)
    frames = np.stack([padded[i * hop : i * hop + n_fft] * hann for i in range(101)], axis=1)
    power = np.abs(np.fft.rfft(frames, axis=0)) ** 2
    edges_mel = np.linspace(0, 2595 * np.log10(1 + 4000 / 700), 22)
    edges = 700 * (10 ** (edges_mel / 2595) - 1)
    bins = np.linspace(0, 4000, n_fft // 2 + 1)
    mel = []
    for low, centre, high in zip(edges, edges[1:], edges[2:], strict=False):
        triangle = np.minimum((bins - low) / (centre - low), (high - bins) / (high - centre)).clip(0)
        mel.append(triangle @ power)
    expected = torch.from_numpy(np.log(np.array(mel) + 1e-6)).float()

    ours = model.front_end(torch.from_numpy(wave).float()[None])[0, 0].T
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("rate", "mels", "hop", "window"), [(8000, 20, 80, 200), (44100, 128, 441, 1102), (4000, 8, 3, 7)]
)
def test_the_log_mel_and_its_gradient_are_those_of_torchaudio(rate: int, mels: int, hop: int, window: int) -> None:
    """With random sounds, of which some are shorter than a window."""
    for dtype, exactness in ((torch.float32, 2e-6), (torch.float64, 1e-11)):
        log_mel = LogMel(rate, mels, hop, window).to(dtype)
        for samples in (1, hop, window, rate // 3 + 1):
            waves = (0.1 * torch.randn(3, samples, dtype=dtype)).requires_grad_()
            pair = log_mel(waves), (log_mel.mel(waves) + 1e-6).log()
            torch.testing.assert_close(*pair, rtol=1e-6, atol=exactness)
            if dtype == torch.float64:
                weights = torch.randn_like(pair[0])
                gradients = (torch.autograd.grad((weights * side).sum(), waves)[0] for side in pair)
                torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


def test_silence_has_a_gradient_of_zeros() -> None:
    waves = torch.zeros(1, 800, requires_grad=True)
    (gradient,) = torch.autograd.grad(LogMel(8000, 20, 80, 200)(waves).sum(), waves)
    assert torch.equal(gradient, torch.zeros(1, 800))


def test_a_tone_lights_the_band_of_its_frequency() -> None:
    model = encoder()
    tone = torch.sin(2 * torch.pi * 1000 * torch.arange(8000) / 8000)
    band = model.front_end(tone[None])[0, 0].mean(0).argmax()
    centres = 700 * (10 ** (torch.linspace(0, 2595 * np.log10(1 + 4000 / 700), 66)[1:-1] / 2595) - 1)
    assert abs(centres[band] - 1000) < 40


@pytest.mark.parametrize(("tokens", "count"), [("frames", 101), ([16, 4], 4 * 26), ([64, 10], 11), ([64, 200], 1)])
def test_it_says_how_many_tokens_it_makes(tokens: object, count: int) -> None:
    model = encoder(tokens=tokens)
    assert model.num_tokens == count
    assert model(torch.randn(2, 8000)).shape == (2, 16)


def test_the_spectrogram_is_float32_under_mixed_precision() -> None:
    model, waves = encoder(), torch.randn(2, 8000)
    expected = model.front_end(waves)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model.front_end(waves)
        assert model(waves).isfinite().all()
    assert mixed.dtype == torch.float32
    assert torch.equal(mixed, expected)


def test_the_spectrogram_is_float32_in_a_bfloat16_model() -> None:
    model = encoder().to(torch.bfloat16)
    assert model.front_end(torch.randn(2, 8000)).dtype == torch.float32
    assert model(torch.randn(2, 8000)).dtype == torch.bfloat16


def test_a_bfloat16_model_hears_a_pure_tone_as_exactly_as_a_float32_model() -> None:
    """Rounding the Hann window raises its sidelobes, which are where a tone is not."""
    tone = torch.sin(2 * torch.pi * 200 * torch.arange(8000) / 8000)[None]
    expected, low = encoder().front_end(tone), encoder().to(torch.bfloat16)
    assert torch.equal(low.front_end(tone), expected)
    assert torch.equal(low.float().front_end(tone), expected)
    assert encoder().double().bfloat16().front_end(tone).dtype == torch.float32


@pytest.mark.parametrize(("rate", "mels", "window"), [(8000, 64, 200), (8000, 128, 200), (16000, 80, 400)])
def test_no_mel_filter_is_empty(rate: int, mels: int, window: int) -> None:
    model = encoder(sample_rate_hz=rate, num_mels=mels)
    assert model.log_mel.mel.n_fft == fft_length(rate, mels, window)
    assert (model.log_mel.mel.mel_scale.fb.amax(0) > 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": -1.0}, "seconds must be positive, got -1"),
        ({"hop_ms": 0.01}, "hop_ms must be a sample or more"),
        ({"window_ms": 0.01}, "window_ms must be a sample or more"),
        ({"tokens": [10, 4]}, "tokens must be 'frames' or a patch .* divides 64 mels"),
        ({"num_mels": 4000}, "num_mels must be lower"),
        ({"attention": Linformer(k=102)}, r"k must be in 1\.\.101"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoder(**change)


def test_longer_clips_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="8000 samples .* got 8001"):
        encoder()(torch.randn(1, 8001))


def test_measure_sets_mean_and_deviation_of_each_mel_band() -> None:
    model = encoder(num_mels=20)
    clips = [torch.randn(3, 8000), torch.randn(2, 8000) * 5]
    model.measure(clips)
    bands = model.front_end(torch.cat(clips)).double().permute(3, 0, 1, 2).flatten(1)
    torch.testing.assert_close(model.mean.flatten().double(), bands.mean(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.std.flatten().double(), bands.std(1, correction=0), rtol=1e-5, atol=1e-5)
