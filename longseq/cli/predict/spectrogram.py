"""The spectrogram of a recording, read in sections."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longseq.encoders.spectrogram import LogMel

READ_SECONDS = 60.0  # of a recording are read at a time, to draw it


def sections_of(
    encoder: Any, datamodule: Any, path: str, length: float, columns_a_second: float
) -> Iterator[Float[Tensor, "mels columns"]]:
    """The log-mel spectrogram of a recording, the mean of its channels, averaged to some columns a second. Yields a
    section of it for each READ_SECONDS.

    Args:
        encoder: Its spectrogram is drawn, or one with 40 bands if it has none.
        datamodule: Reads the recording.
        path: The recording.
        length: Its length in seconds.
        columns_a_second: The most columns for each second.
    """
    raw = getattr(datamodule, "raw_inputs", datamodule.inputs)  # before a frozen network
    rate_hz, device = int(raw.rate_hz), encoder.mean.device
    hop, window = (rate_hz // 100, rate_hz // 40) if rate_hz >= 1000 else (16, 128)
    log_mel = getattr(encoder, "log_mel", None) or LogMel(rate_hz, 40, hop, window).to(device)
    for number in range(math.ceil(length / READ_SECONDS - 1e-6)):
        start, end = number * READ_SECONDS, min((number + 1) * READ_SECONDS, length)
        waveform = datamodule.read_part((path, start, end))
        columns = max(round((end - start) * columns_a_second), 1)
        with torch.inference_mode():
            mels = log_mel(waveform.view(-1, waveform.shape[-1]).to(device)).mean(0).float().cpu()
        yield F.adaptive_avg_pool1d(mels, min(columns, mels.shape[1]))
