"""Data sets, one in each file; base.py defines their contract."""

from datamodules.audio import AudioDataModule
from datamodules.audio_folder import AudioFolder
from datamodules.audio_shards import AudioShards
from datamodules.augment import Gain, Noise, TimeShift
from datamodules.base import DataModule
from datamodules.cifar import CIFAR10, CIFAR100
from datamodules.digits import Digits
from datamodules.errors import DataError
from datamodules.esc50 import ESC50
from datamodules.fsdd import FSDD
from datamodules.image_augment import Mirror, Shift
from datamodules.image_folder import ImageFolder
from datamodules.image_shards import ImageShards
from datamodules.images import ImageDataModule
from datamodules.mnist import MNIST, FashionMNIST
from datamodules.needles import Needles
from datamodules.pathfinder import Pathfinder
from datamodules.speech_commands import SpeechCommands
from datamodules.tiny_imagenet import TinyImageNet
from datamodules.vowels import Vowels

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "ESC50",
    "FSDD",
    "MNIST",
    "AudioDataModule",
    "AudioFolder",
    "AudioShards",
    "DataError",
    "DataModule",
    "Digits",
    "FashionMNIST",
    "Gain",
    "ImageDataModule",
    "ImageFolder",
    "ImageShards",
    "Mirror",
    "Needles",
    "Noise",
    "Pathfinder",
    "Shift",
    "SpeechCommands",
    "TimeShift",
    "TinyImageNet",
    "Vowels",
]
