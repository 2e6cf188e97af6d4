"""The accuracy of a classifier that sees only the mean spectrum: the least that a model of sounds must beat."""

from typing import Any

import torch
from jaxtyping import Float, Float32
from sklearn.neighbors import NearestCentroid
from torch import Tensor

from datamodules.audio import AudioDataModule
from datamodules.samples import Samples


def mean_log_spectrum(waveforms: Float32[Tensor, "n s"], num_fft: int = 256) -> Float[Tensor, "n f"]:
    """Log power, averaged over frames of `num_fft` samples every num_fft / 4 samples, minus the clip's mean level."""
    stft = torch.stft(waveforms, num_fft, window=torch.hann_window(num_fft), return_complex=True)
    spectra = (stft.abs().square() + 1e-8).log().mean(dim=-1)
    return spectra - spectra.mean(dim=1, keepdim=True)


def nearest_centroid_accuracy(data: AudioDataModule) -> float:
    """Accuracy on the test split if the predicted class is the one with the nearest mean log spectrum in training."""
    data.setup("fit")
    classifier = NearestCentroid().fit(_spectra(data.train_set), data.train_set.labels.numpy())
    predicted = classifier.predict(_spectra(data.test_set))
    return float((torch.from_numpy(predicted) == data.test_set.labels).float().mean())


def _spectra(samples: Samples) -> Any:
    return mean_log_spectrum(torch.stack(list(samples.inputs))).numpy()
