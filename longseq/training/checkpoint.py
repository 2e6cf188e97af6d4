"""Objects as plain values and back, so that a checkpoint holds tensors and plain types and nothing else.

An object is described by its class path and its constructor's arguments.
"""

import importlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from longseq.arguments import arguments_of

TRUSTED_PACKAGES = ("longseq", "datamodules", "torch", "torchvision", "torchaudio", "torchmetrics", "timm")


class CheckpointError(Exception):
    """A checkpoint that cannot be used: the message names the file and the remedy."""

    exit_code = 4


def describe(value: Any) -> Any:
    """Turn an object into plain values: numbers, strings, lists, and dictionaries {class_path, init_args}."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, PathLike):
        return str(value)
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    kind = type(value)
    return {
        "class_path": f"{kind.__module__}.{kind.__qualname__}",
        "init_args": {name: describe(argument) for name, argument in arguments_of(value).items()},
    }


def build(description: Any) -> Any:
    """Make the object that ``describe`` described.

    Raises:
        CheckpointError: If a class is not of a trusted package; nothing of it has been imported then.
    """
    if isinstance(description, list):
        return [build(item) for item in description]
    if not isinstance(description, Mapping):
        return description
    if set(description) != {"class_path", "init_args"}:
        return {key: build(item) for key, item in description.items()}
    module, _, name = description["class_path"].rpartition(".")
    if module.partition(".")[0] not in TRUSTED_PACKAGES:
        raise CheckpointError(f"{description['class_path']}: no class of a trusted package; build the model in Python")
    return getattr(importlib.import_module(module), name)(**build(description["init_args"]))


def read_checkpoint(path: str | PathLike, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint of longseq as tensors and plain types, never running code that it may hold.

    Raises:
        CheckpointError: If there is no such file, or it is not a checkpoint of longseq.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"{path}: no such file; give a checkpoint of fit, such as runs/digits/0/best.ckpt")
    try:
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # torch raises a different kind for each way in which a file can be broken
        raise CheckpointError(f"{path}: not a readable checkpoint ({type(error).__name__}); give another") from error
    if not isinstance(checkpoint, dict) or "encoder" not in checkpoint.get("hyper_parameters", {}):
        raise CheckpointError(f"{path}: not a checkpoint of longseq; give one that fit has written")
    return checkpoint
