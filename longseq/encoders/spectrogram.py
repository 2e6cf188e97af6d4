"""Sound as sequences: one token a spectrogram frame, or a patch of mels and frames."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchaudio.functional import melscale_fbanks
from torchaudio.transforms import MelSpectrogram

from longseq.attention import Mechanism
from longseq.encoders.encoder import Encoder


class SpectrogramEncoder(Encoder):
    """A vision transformer over a log-mel spectrogram: waveforms (b, samples) -> (b, dim).

    The spectrogram is part of the encoder: computed for the whole batch, on its device, always in float32.

    Args:
        sample_rate_hz: Samples a second of the waveforms.
        seconds: Length of a clip.
        num_mels: Mel bands.
        hop_ms: Milliseconds from frame to frame.
        window_ms: Length of a frame's window, in milliseconds.
        tokens: ``frames``, one token a frame, or a patch as (mels, frames).
        dim: Width of a token.
        depth: Number of blocks.
        heads: Attention heads; they divide dim.
        attention: The mechanism of every block.
        mlp_ratio: Width of the hidden layer of a block's perceptron, in dims.
        dropout: Dropout rate of position embeddings, attention outputs and perceptrons.
        drop_path: Rate of stochastic depth in the last block, growing linearly from 0.
        pool: What becomes the features: ``avg``, the mean of the tokens, or ``token``, a class token.

    Raises:
        ValueError: If a number is not positive, the patch does not divide the mels, the heads the width, or the
            mechanism does not fit.
    """

    def __init__(
        self,
        sample_rate_hz: int,
        seconds: float,
        attention: Mechanism,
        num_mels: int = 64,
        hop_ms: float = 10.0,
        window_ms: float = 25.0,
        tokens: Literal["frames"] | Sequence[int] = "frames",
        dim: int = 128,
        depth: int = 6,
        heads: int = 4,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        pool: str = "avg",
    ) -> None:
        sizes = {"sample_rate_hz": sample_rate_hz, "seconds": seconds, "num_mels": num_mels}
        for name, value in sizes.items() | {"hop_ms": hop_ms, "window_ms": window_ms}.items():
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}; the README's configs have values that work")
        hop = round(sample_rate_hz * hop_ms / 1000)
        if hop < 1:
            raise ValueError(f"hop_ms must be a sample or more, got {hop_ms} ms at {sample_rate_hz} Hz; lengthen it")
        mels, frames = (num_mels, 1) if tokens == "frames" else tokens
        if mels < 1 or frames < 1 or num_mels % mels:
            raise ValueError(
                f"tokens must be 'frames' or a patch (mels, frames) that divides {num_mels} mels, got {list(tokens)}"
            )
        num_samples = round(sample_rate_hz * seconds)
        num_frames = (1 + num_samples // hop) // frames * frames  # what does not fill a patch is left out
        if num_frames == 0:
            raise ValueError(
                f"seconds must hold one token or more, but {seconds} s hold none of {frames} frames every {hop_ms} ms; "
                "lengthen the clip or shorten the hop"
            )
        picture = (1, num_mels, num_frames)
        statistics = (1, num_mels, 1)
        patch = (mels, frames)
        super().__init__(picture, statistics, patch, dim, depth, heads, attention, mlp_ratio, dropout, drop_path, pool)
        self.sample_rate_hz, self.seconds, self.num_mels = sample_rate_hz, seconds, num_mels
        self.hop_ms, self.window_ms = hop_ms, window_ms
        self.tokens = tokens if tokens == "frames" else list(tokens)
        self.num_samples = num_samples
        self.log_mel = LogMel(sample_rate_hz, num_mels, hop, round(sample_rate_hz * window_ms / 1000))

    def picture(self, batch: Float[Tensor, "b samples"]) -> Float[Tensor, "b 1 mels frames"]:
        if batch.shape[-1] != self.num_samples:
            raise ValueError(
                f"seconds must be that of the clips: {self.num_samples} samples ({self.seconds} s) are expected, "
                f"got {batch.shape[-1]}; pad or crop them"
            )
        return self.log_mel(batch)[:, None, :, : self.picture_shape[-1]]


class LogMel(nn.Module):
    """log(mel power + 1e-6) of waveforms in float32, under mixed precision and in a bfloat16 model too.

    Args:
        sample_rate_hz: Samples a second.
        num_mels: Mel bands up to half the sample rate.
        hop: Samples from frame to frame.
        window: Samples of a frame.
    """

    def __init__(self, sample_rate_hz: int, num_mels: int, hop: int, window: int) -> None:
        super().__init__()
        bins = fft_length(sample_rate_hz, num_mels, window)
        self.mel = MelSpectrogram(sample_rate_hz, bins, win_length=window, hop_length=hop, n_mels=num_mels)

    def forward(self, waveforms: Float[Tensor, "b samples"]) -> Float[Tensor, "b mels frames"]:
        with torch.autocast(waveforms.device.type, enabled=False):  # torch.fft knows no bfloat16
            return (self.mel(waveforms.float()) + 1e-6).log()

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.mel.float()  # whatever precision the rest of the model is moved to
        return self


def fft_length(sample_rate_hz: int, num_mels: int, window: int) -> int:
    """The shortest power of two that holds the window and leaves no mel filter empty.

    Raises:
        ValueError: If no reasonable length does.
    """
    length = 1 << max(window - 1, 1).bit_length()
    while length <= 16 * window:
        filters = melscale_fbanks(length // 2 + 1, 0.0, sample_rate_hz / 2, num_mels, sample_rate_hz)
        if (filters.amax(0) > 0).all():
            return length
        length *= 2
    raise ValueError(f"num_mels must be lower for a window of {window} samples, got {num_mels}; 40 to 80 are usual")
