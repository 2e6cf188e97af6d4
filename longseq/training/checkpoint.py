"""Objects as plain values and back, so that a checkpoint holds tensors and plain types and nothing else.

An object is described by its class path and its constructor's arguments.
"""

import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from os import PathLike
from typing import Any

import pytorch_lightning as pl
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
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        raise TypeError(f"{value!r} cannot be kept in a checkpoint; leave the default")
    if isinstance(value, PathLike):
        return str(value)
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    kind = type(value)
    return {
        "class_path": f"{kind.__module__}.{kind.__qualname__}",
        "init_args": {name: describe(argument) for name, argument in _given(value).items()},
    }


def _given(value: Any) -> dict[str, Any]:
    """The constructor arguments of an object; of another library's, which keeps them in forms of its own, those that
    are not as they would be without being given."""
    arguments, kind = arguments_of(value), type(value)
    if kind.__module__.partition(".")[0] != "torchvision":
        return arguments
    defaults = {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
    required = {name: arguments[name] for name, default in defaults.items() if default is inspect.Parameter.empty}
    plain = arguments_of(kind(**required))
    given = required | {name: argument for name, argument in arguments.items() if argument != plain[name]}
    for name, argument in given.items():
        if isinstance(argument, list) and len(argument) == 1 and isinstance(defaults[name], int | float):
            given[name] = argument[0]  # RandomErasing keeps its value in a list
    return given


def build(description: Any) -> Any:
    """Make the object that ``describe`` described.

    Raises:
        CheckpointError: If a class is not of a trusted package, and nothing of it has been imported then; or is none.
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
    kind = None
    with suppress(ImportError):
        kind = getattr(importlib.import_module(module), name, None)
    # a function may do more than make an object, and so may what a package has itself imported from elsewhere
    if not isinstance(kind, type) or kind.__module__.partition(".")[0] not in ALLOWED_PACKAGES:
        raise CheckpointError(f"{description['class_path']}: no class of that package; longseq has not written it")
    try:
        return kind(**build(description["init_args"]))
    except TypeError as error:
        raise CheckpointError(f"{description['class_path']}: {error}; another version has written it") from error


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Plain values of a description by their path, ("encoder.attention.k", 16); an object's class, without its
    package, by its own."""
    if isinstance(value, Mapping) and set(value) == {"class_path", "init_args"}:
        yield key, value["class_path"].rpartition(".")[2]
        value = value["init_args"]
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from flatten(item, f"{key}.{name}".lstrip("."))
    else:
        yield key, value


def refuse_other_shapes(checkpoint: Mapping[str, Any], model: pl.LightningModule) -> None:
    """Check that a checkpoint's weights fit a model.

    Raises:
        CheckpointError: If they do not; the message names the settings that differ, there and here.
    """
    there, here = checkpoint["state_dict"], model.state_dict()
    if there.keys() == here.keys() and all(there[name].shape == here[name].shape for name in here):
        return
    old, new = (dict(flatten(settings)) for settings in (checkpoint["hyper_parameters"], model.hparams))
    differing = [
        f"model.{name} is {old.get(name)} there and {new.get(name)} here"
        for name in {**old, **new}
        if old.get(name) != new.get(name) and name != "class_names"
    ]
    raise CheckpointError(
        f"ckpt_path: does not fit the model: {', '.join(differing) or 'it was made by another version of longseq'}; "
        "leave the flags out, or start a new training from it with --model.init_from"
    )


def read_checkpoint(path: str | PathLike, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint of longseq as tensors and plain types, never running code that it may hold.

    Raises:
        CheckpointError: If there is no such file, or it is not a checkpoint of longseq.
    """
    checkpoint = read_whole(path, map_location)
    if "encoder" not in checkpoint.get("hyper_parameters", {}):
        raise CheckpointError(f"{path}: not a checkpoint of longseq; give one that fit has written")
    return checkpoint
