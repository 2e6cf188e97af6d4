"""Data sets: named ones (sets), users' own files (own), and archives; frozen networks (networks). base.py has what data
sets share."""

from datamodules.archives.audio_shards import AudioShards
from datamodules.archives.image_shards import ImageShards
from datamodules.audio import AudioDataModule
from datamodules.augment import Gain, Noise, TimeShift
from datamodules.base import DataModule
from datamodules.errors import DataError
from datamodules.image_augment import Mirror, Shift
from datamodules.images import ImageDataModule
from datamodules.networks import BirdNET, Exported, Network, Onnx, TFLite, Timm
from datamodules.own.audio_folder import AudioFolder
from datamodules.own.feature_folder import FeatureFolder
from datamodules.own.image_folder import ImageFolder
from datamodules.own.signal_folder import SignalFolder
from datamodules.sets.cifar import CIFAR10, CIFAR100
from datamodules.sets.digits import Digits
from datamodules.sets.esc50 import ESC50
from datamodules.sets.fsdd import FSDD
from datamodules.sets.mnist import MNIST, FashionMNIST
from datamodules.sets.needles import Needles
from datamodules.sets.pathfinder import Pathfinder
from datamodules.sets.speech_commands import SpeechCommands
from datamodules.sets.tiny_imagenet import TinyImageNet
from datamodules.sets.vowels import Vowels

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "ESC50",
    "FSDD",
    "MNIST",
    "AudioDataModule",
    "AudioFolder",
    "AudioShards",
    "BirdNET",
    "DataError",
    "DataModule",
    "Digits",
    "Exported",
    "FashionMNIST",
    "FeatureFolder",
    "Gain",
    "ImageDataModule",
    "ImageFolder",
    "ImageShards",
    "Mirror",
    "Needles",
    "Network",
    "Noise",
    "Onnx",
    "Pathfinder",
    "Shift",
    "SignalFolder",
    "SpeechCommands",
    "TFLite",
    "TimeShift",
    "Timm",
    "TinyImageNet",
    "Vowels",
]
