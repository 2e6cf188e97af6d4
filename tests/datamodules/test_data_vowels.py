"""The synthetic vowels, measured with the methods of phonetics."""

import numpy as np
import pytest
import torch
from scipy.linalg import solve_toeplitz
from sklearn.neighbors import NearestCentroid
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from datamodules import Vowels
from datamodules.sets.vowels import PETERSON_BARNEY_HZ, render

RATE_HZ = 10_000


def formants_by_linear_prediction(waveform: np.ndarray) -> np.ndarray:
    """The resonance frequencies in Hz, lowest first: the narrow poles that the autocorrelation method gives."""
    emphasised = np.diff(waveform) * np.hamming(len(waveform) - 1)
    order = 12
    correlation = np.correlate(emphasised, emphasised, "full")[len(emphasised) - 1 :][: order + 1]
    predictor = solve_toeplitz(correlation[:-1], correlation[1:])
    poles = np.roots([1, *-predictor])
    poles = poles[poles.imag > 0]
    hertz = np.angle(poles) * RATE_HZ / (2 * np.pi)
    bandwidths = -np.log(np.abs(poles)) * RATE_HZ / np.pi
    return np.sort(hertz[(bandwidths < 400) & (hertz > 150)])


@pytest.mark.parametrize("speaker", [0, 1, 2], ids=["man", "woman", "child"])
@pytest.mark.parametrize("word", PETERSON_BARNEY_HZ)
def test_linear_prediction_finds_the_tables_formants_in_the_sound(word, speaker):
    wanted = PETERSON_BARNEY_HZ[word][speaker]
    # a very low pitch; at a child's own pitch the harmonics are too far apart to show where a formant lies
    waveform = render(
        torch.tensor([70.0]), torch.zeros(1), torch.tensor([[*wanted, 4500.0, 4900.0]]), 10_000, RATE_HZ,
        torch.Generator().manual_seed(0),
    )[0]  # fmt: skip
    found = formants_by_linear_prediction(waveform.double().numpy())
    nearest = [min(found, key=lambda hertz: abs(hertz - formant)) for formant in wanted]
    assert nearest == pytest.approx(wanted, rel=0.06, abs=25)


def test_the_voice_has_the_pitch_that_was_asked_for():
    pitches = [90.0, 132.0, 223.0, 264.0]
    formants = torch.tensor([[500.0, 1500.0, 2500.0, 3500.0, 4500.0]]).expand(4, 5)
    voices = render(torch.tensor(pitches), torch.zeros(4), formants, 8000, RATE_HZ, torch.Generator().manual_seed(0))
    for voice, pitch in zip(voices, pitches, strict=True):
        correlation = torch.fft.irfft(torch.fft.rfft(voice, 16_000).abs().square())
        lags = torch.arange(RATE_HZ // 400, RATE_HZ // 60)
        assert RATE_HZ / lags[correlation[lags].argmax()] == pytest.approx(pitch, rel=0.03)


@pytest.fixture(scope="module")
def vowels() -> Vowels:
    data = Vowels()
    data.setup()
    return data


def test_clips_are_finite_below_full_scale_of_random_level_and_as_many_as_asked(vowels):
    assert len(vowels.train_set) + len(vowels.val_set) == 2400
    assert len(vowels.test_set) == 600
    for part in (vowels.train_set, vowels.val_set, vowels.test_set):
        peaks = part.inputs.abs().amax(dim=1)
        assert part.inputs.dtype == torch.float32
        assert part.inputs.shape[1:] == vowels.shape == (3200,)
        assert 0.1 <= peaks.min() < 0.2 and 0.85 < peaks.max() <= 0.95
        assert part.labels.bincount().unique().numel() == 1


def test_the_seed_decides_every_sample(vowels):
    again, other = Vowels(), Vowels(seed=1)
    again.setup()
    other.setup()
    assert torch.equal(again.train_set.inputs, vowels.train_set.inputs)
    assert torch.equal(again.test_set.inputs, vowels.test_set.inputs)
    assert not torch.equal(other.test_set.inputs, vowels.test_set.inputs)


def test_no_speaker_is_in_two_splits():
    data = Vowels(num_train=600, num_test=60)
    train, _, test = data.load()
    kept, held = data.split_validation(train)
    speakers_kept, speakers_held = (kept // 20).unique(), (held // 20).unique()
    assert len(kept) == 20 * len(speakers_kept) and len(held) == 20 * len(speakers_held) == 60
    assert not set(speakers_kept.tolist()) & set(speakers_held.tolist())
    assert sorted((speakers_held % 3).tolist()) == [0, 1, 2]  # a man, a woman, a child
    longer, _, _ = Vowels(num_train=660, num_test=60).load()
    assert torch.equal(longer.inputs[600:], test.inputs)  # test continues after training's last speaker


def mean_log_spectrum(waveforms: torch.Tensor) -> torch.Tensor:
    """Log power, averaged over frames of 256 samples every 64 samples, minus the clip's mean level: (n, 129)."""
    stft = torch.stft(waveforms, 256, window=torch.hann_window(256), return_complex=True)
    spectra = (stft.abs().square() + 1e-8).log().mean(dim=-1)
    return spectra - spectra.mean(dim=1, keepdim=True)


def test_vowels_sort_by_first_formant_as_the_table_says(vowels):
    """The centre of gravity of the spectrum below 1200 Hz rises with F1."""
    hertz = torch.arange(129) * 8000 / 256
    power = mean_log_spectrum(vowels.train_set.inputs).exp() * (hertz < 1200)
    centre = (power * hertz).sum(1) / power.sum(1)
    by_class = [centre[vowels.train_set.labels == label].mean().item() for label in range(10)]
    table = [np.mean([formants[0] for formants in row]) for row in PETERSON_BARNEY_HZ.values()]
    assert np.corrcoef(by_class, table)[0, 1] > 0.9


def test_the_task_is_above_chance_for_a_centroid_and_leaves_room_above_it(vowels):
    features = [mean_log_spectrum(part.inputs).numpy() for part in (vowels.train_set, vowels.test_set)]
    centroid, strong = (
        classifier.fit(features[0], vowels.train_set.labels).score(features[1], vowels.test_set.labels)
        for classifier in (NearestCentroid(), make_pipeline(StandardScaler(), SVC(C=10)))
    )
    print(f"accuracy on synthetic vowels: nearest centroid {centroid:.3f}, support vectors {strong:.3f}")
    assert 0.5 < centroid < 0.85
    assert strong > centroid + 0.1


def test_the_docstring_says_that_the_vowels_are_synthetic():
    assert Vowels.__doc__ is not None and Vowels.__doc__.startswith("SYNTHETIC")
