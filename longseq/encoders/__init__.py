"""Encoders: batches of images or waveforms become features (b, dim)."""

from longseq.encoders.encoder import Encoder
from longseq.encoders.image import ImageEncoder
from longseq.encoders.pretrained import TimmEncoder
from longseq.encoders.resize import resize
from longseq.encoders.spectrogram import SpecAugment, SpectrogramEncoder

__all__ = ["Encoder", "ImageEncoder", "SpecAugment", "SpectrogramEncoder", "TimmEncoder", "resize"]
