"""Programs of models that were made without a data module, with what such a module says of its inputs."""

from typing import Any

import torch

from datamodules.inputs import InputSpec
from longseq.deploy._program import Program
from longseq.training import Classifier


def program_of(model: Classifier) -> Program:
    encoder: Any = model.encoder
    if encoder.kind == "sounds":
        return Program(model, InputSpec("sounds", torch.float32, (None,), rate_hz=encoder.sample_rate_hz))
    return Program(model, InputSpec("images", torch.uint8, tuple(encoder.picture_shape), 0, 255))
