"""Objects as plain values and back, so that a checkpoint holds tensors and plain types and nothing else.

An object is described by its class path and its constructor's arguments.
"""

import importlib
from collections.abc import Mapping
from os import PathLike
from typing import Any

from jsonargparse import set_parsing_settings

from longseq.arguments import arguments_of
from longseq.training.storage import CheckpointError, read_whole

# Packages whose classes a configuration or a checkpoint may name; nothing else is imported for it.
ALLOWED_PACKAGES = [
    "longseq", "datamodules", "torch", "torchvision", "torchaudio", "torchmetrics", "timm", "pytorch_lightning"
]  # fmt: skip


def allow_classes(packages: list[str]) -> None:
    """Let configurations and checkpoints name classes of these packages too."""
    ALLOWED_PACKAGES.extend(packages)
    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=ALLOWED_PACKAGES)


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
    if module.partition(".")[0] not in ALLOWED_PACKAGES:
        package = module.partition(".")[0]
        raise CheckpointError(
            f"{description['class_path']}: not a class that may be named; --allow_class {package} if you trust it"
        )
    return getattr(importlib.import_module(module), name)(**build(description["init_args"]))


def read_checkpoint(path: str | PathLike, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint of longseq as tensors and plain types, never running code that it may hold.

    Raises:
        CheckpointError: If there is no such file, or it is not a checkpoint of longseq.
    """
    checkpoint = read_whole(path, map_location)
    if "encoder" not in checkpoint.get("hyper_parameters", {}):
        raise CheckpointError(f"{path}: not a checkpoint of longseq; give one that fit has written")
    return checkpoint
