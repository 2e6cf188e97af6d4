"""Data sets, one a file; base.py is their contract."""

from datamodules.audio import AudioDataModule
from datamodules.base import DataError, DataModule
from datamodules.digits import Digits
from datamodules.fsdd import FSDD
from datamodules.images import ImageDataModule
from datamodules.mnist import MNIST
from datamodules.vowels import Vowels

__all__ = ["FSDD", "MNIST", "AudioDataModule", "DataError", "DataModule", "Digits", "ImageDataModule", "Vowels"]
