"""Encoders: batches of images or waveforms become features (b, dim)."""

from longseq.encoders.encoder import Encoder
from longseq.encoders.image import ImageEncoder
from longseq.encoders.spectrogram import SpectrogramEncoder

__all__ = ["Encoder", "ImageEncoder", "SpectrogramEncoder"]
