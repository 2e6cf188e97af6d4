"""Kaldi's log-mel features, on which the Audio Spectrogram Transformer was trained."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torchaudio.compliance.kaldi import get_mel_banks

from longseq.compat.torch import ExactBuffers, without_autocast
from longseq.encoders.patches import at_least


class KaldiLogMel(ExactBuffers):
    """torchaudio.compliance.kaldi.fbank with a Hann window, for a batch: (b, samples) -> (b, mels, frames).

    Frame i contains 25 ms of samples, from i * 10 ms on. Its mean is subtracted, x[t] - 0.97 x[t - 1] is windowed, and
    the power spectrum is summed in triangles from 20 Hz to half the sample rate. All steps before the power are linear
    in the samples, so they are a single convolution, on any device and in an exported file. It is computed in float32
    on a CPU and in float64 on a GPU, even under mixed precision and in a bfloat16 model; in a float64 model in float64.

    Args:
        sample_rate_hz: Samples per second.
        num_mels: Mel bands.
    """

    waves: Tensor
    filters: Tensor
    exact = "waves", "filters"

    def __init__(self, sample_rate_hz: int, num_mels: int) -> None:
        super().__init__()
        self.hop, self.window = sample_rate_hz // 100, sample_rate_hz // 40
        bins = 1 << (self.window - 1).bit_length()
        frame = torch.eye(self.window, dtype=torch.float64)  # each row a frame with a single sample
        frame = frame - frame.mean(dim=1, keepdim=True)
        frame = frame - 0.97 * F.pad(frame[None], (1, 0), mode="replicate")[0, :, :-1]
        frame = frame * torch.hann_window(self.window, periodic=False, dtype=torch.float64)
        spectrum = torch.fft.rfft(frame, bins)[:, :-1].T  # no triangle reaches the last frequency
        filters, _ = get_mel_banks(num_mels, bins, sample_rate_hz, 20.0, 0.0, 100.0, -500.0, 1.0)
        self.register_buffer("waves", torch.cat([spectrum.real, spectrum.imag])[:, None].float(), persistent=False)
        self.register_buffer("filters", filters[..., None], persistent=False)

    def forward(self, waveforms: Float[Tensor, "b samples"]) -> Float[Tensor, "b mels frames"]:
        waveforms = F.pad(waveforms.to(self.waves.dtype), (0, max(self.window - waveforms.shape[1], 0)))
        with without_autocast(waveforms):
            # A GPU rounds the factors of a float32 convolution to TF32. The error is 2^-11 of the loudest frequency, so
            # quiet ones beside it would be noise.
            kind = torch.float64 if waveforms.is_cuda else self.waves.dtype
            waves, filters = self.waves.to(kind), self.filters.to(kind)
            real, imaginary = F.conv1d(waveforms[:, None].to(kind), waves, stride=self.hop).chunk(2, dim=1)
            mels = F.conv1d(real.square() + imaginary.square(), filters).to(self.waves.dtype)
        return mels.clamp(min=torch.finfo(torch.float32).eps).log()

    def count_frames(self, num_samples: Any) -> Any:
        """The number of frames that samples fill, at least one: a number, or a tensor of numbers."""
        num_samples = at_least(num_samples, self.window)
        return 1 + (num_samples - self.window) // self.hop
