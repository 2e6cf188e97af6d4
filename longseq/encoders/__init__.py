"""Encoders: batches of images or waveforms become features (b, dim)."""

from longseq.encoders.ast import ASTEncoder
from longseq.encoders.encoder import Encoder
from longseq.encoders.feature import FeatureEncoder
from longseq.encoders.image import ImageEncoder
from longseq.encoders.local import Conv1d, Conv2d, LocalMixing
from longseq.encoders.pretrained import TimmEncoder
from longseq.encoders.pretrained_stem import Pretrained
from longseq.encoders.resize import resize
from longseq.encoders.spectrogram import SpecAugment, SpectrogramEncoder
from longseq.encoders.stem import Residual, Stem
from longseq.encoders.trunk import Sizes
from longseq.encoders.vit_pytorch import from_vit_pytorch
from longseq.encoders.waveform import WaveformEncoder

__all__ = [
    "ASTEncoder",
    "Conv1d",
    "Conv2d",
    "Encoder",
    "FeatureEncoder",
    "ImageEncoder",
    "LocalMixing",
    "Pretrained",
    "Residual",
    "Sizes",
    "SpecAugment",
    "SpectrogramEncoder",
    "Stem",
    "TimmEncoder",
    "WaveformEncoder",
    "from_vit_pytorch",
    "resize",
]
