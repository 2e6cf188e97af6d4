"""Frozen networks that turn one raw input, a sound or an image, into tokens. network.py has what they share."""

from datamodules.networks.birdnet import BirdNET
from datamodules.networks.exported import Exported
from datamodules.networks.network import Network, refuse_other_inputs
from datamodules.networks.onnx import Onnx
from datamodules.networks.tflite import TFLite
from datamodules.networks.timm import Timm

__all__ = ["BirdNET", "Exported", "Network", "Onnx", "TFLite", "Timm", "refuse_other_inputs"]
