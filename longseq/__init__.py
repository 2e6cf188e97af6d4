"""longseq: classifiers of images and sound as very long sequences, at linear cost."""

from longseq.attention import Conv, Gaussian, Linear, Linformer, Max, Mean, Mechanism, Projection, Softmax, Verma, plug
from longseq.encoders import ImageEncoder, SpecAugment, SpectrogramEncoder, TimmEncoder, resize

__all__ = [
    "Conv",
    "Gaussian",
    "ImageEncoder",
    "Linear",
    "Linformer",
    "Max",
    "Mean",
    "Mechanism",
    "Projection",
    "Softmax",
    "SpecAugment",
    "SpectrogramEncoder",
    "TimmEncoder",
    "Verma",
    "plug",
    "resize",
]
