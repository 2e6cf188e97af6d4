"""Turn objects into plain values and back, so that a checkpoint holds only tensors and plain types.

The description of an object is its class path and its constructor's arguments.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from os import PathLike
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import numpy as np
from jsonargparse import set_parsing_settings

from longseq.arguments import ArgumentError, argument_hints, arguments_of
from longseq.files.storage import CheckpointError

# The packages whose classes a configuration or a checkpoint may name. No other package is imported for it.
OURS = ("longseq", "datamodules")
# Classes of these libraries may be named only where an object of the same library is expected. torch is left out,
# because its classes run programs and write files.
LIBRARIES = (
    "torchvision.transforms.v2", "pytorch_lightning.accelerators", "pytorch_lightning.callbacks",
    "pytorch_lightning.loggers", "pytorch_lightning.plugins", "pytorch_lightning.profilers",
    "pytorch_lightning.strategies",
)  # fmt: skip
# The class of a frozen network by the suffix of its file.
NETWORKS = {".onnx": "Onnx", ".tflite": "TFLite", ".pt2": "Exported", ".ckpt": "longseq.deploy.trained.Trained"}
_ALLOWED_PACKAGES: list[str] = []  # the user's own packages, and ours whose classes run code of files: --allow_class

Plan = Callable[[], Any]  # makes the described object when called


def allow_classes(packages: list[str]) -> None:
    """Allow configurations and checkpoints to name classes of these packages, and configurations also their functions.

    Raises:
        ValueError: If one is not the name of a package.
    """
    for package in packages:
        if not all(part.isidentifier() for part in package.split(".")) or package.partition(".")[0] == "jsonargparse":
            raise ArgumentError("allow_class", f"must be the name of a package, got {package!r}; such as my_encoders")
    set_parsing_settings(
        import_path_denylist=["*"],
        import_path_allowlist=[*OURS, *LIBRARIES, *packages],
        instantiate_subclass_spec_in_any=False,  # where any value is expected, a description stays a description
    )
    _ALLOWED_PACKAGES.extend(packages)


def describe(value: Any) -> Any:
    """Turn an object into plain values: numbers, strings, lists, and dictionaries {class_path, init_args}."""
    if isinstance(value, np.generic):  # np.str_ is a str and np.float64 a float, but a checkpoint may hold neither
        value = value.item()
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
        "init_args": {name: describe(argument) for name, argument in _constructor_arguments(value).items()},
    }


def _constructor_arguments(value: Any) -> dict[str, Any]:
    """The constructor arguments of an object. torchvision's objects store some in other forms, so for them only
    required arguments and those that differ from the defaults are returned."""
    arguments, kind = arguments_of(value), type(value)
    if kind.__module__.partition(".")[0] != "torchvision":
        return arguments
    defaults = {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
    required = {name: arguments[name] for name, default in defaults.items() if default is inspect.Parameter.empty}
    plain = arguments_of(kind(**required))
    needed = required | {name: argument for name, argument in arguments.items() if argument != plain[name]}
    for name, argument in needed.items():
        if isinstance(argument, list) and len(argument) == 1 and isinstance(defaults[name], int | float):
            needed[name] = argument[0]  # RandomErasing stores its value in a list
    return needed


def build(description: Any, expected: Any) -> Any:
    """Make the object that ``describe`` described.

    Args:
        description: Plain values.
        expected: The class of the object, or a type hint.

    Raises:
        CheckpointError: If a class is named where it is not expected; nothing has been called by then. Or if a class
            refuses its arguments.
    """
    return planned(description, expected)()


def build_from(kind: type, arguments: Mapping[str, Any], **changes: Any) -> Any:
    """Make an object of a class from the descriptions of its arguments. `changes` are objects, passed unchanged."""
    plans = planned_arguments(kind, arguments, kind)
    return _construct(kind, plans | {name: partial(_as_it_is, value) for name, value in changes.items()})


def planned(description: Any, expected: Any, key: str = "") -> Plan:
    """Check that a description names classes only where they are expected, and return a function that makes the object.

    The type hint of each constructor argument says which classes are expected there; a named class must be a subclass
    of one of them. Nothing is called before the whole description is checked, and only allowed packages are imported.

    Raises:
        CheckpointError: If a class is named where it is not expected.
    """
    return _planned(description, expected, (), key)


def planned_arguments(
    kind: type, arguments: Mapping[str, Any], callables: type | tuple[type, ...], key: str = ""
) -> dict[str, Plan]:
    """Check the descriptions of a class's arguments, and return a function for each that makes the argument.

    Args:
        kind: The class.
        arguments: Their descriptions.
        callables: The classes expected where a type hint is Callable: a transform, for example, contains transforms.
        key: The path of the class in the description, for error messages.
    """
    hints, defaults = argument_hints(kind), inspect.signature(kind).parameters
    return {
        name: partial(_as_it_is, value)
        if name in defaults and callable(value) and value is defaults[name].default  # the library's own default
        else _planned(value, hints.get(name), callables, f"{key}.{name}".lstrip("."))
        for name, value in arguments.items()
    }


def _planned(value: Any, hint: Any, callables: type | tuple[type, ...], key: str) -> Plan:
    expected = _classes_in(hint, callables)
    if isinstance(value, list | tuple):
        items = [_planned(item, hint, callables, key) for item in value]
        return lambda: [item() for item in items]
    if isinstance(value, Mapping) and "class_path" in value:
        path, arguments = value["class_path"], value.get("init_args")
        if set(value) != {"class_path", "init_args"} or not isinstance(arguments, Mapping):
            raise CheckpointError(f"{key}: not the description of an object; another program has written it")
        kind = class_named(path, expected, key)
        return partial(_construct, kind, planned_arguments(kind, arguments, expected, key))
    fields_alone = next((kind for kind in expected if isinstance(value, Mapping) and _has_fields(kind, value)), None)
    if fields_alone is not None:  # jsonargparse gives a dataclass as its fields, without a class path
        return partial(_construct, fields_alone, planned_arguments(fields_alone, value, expected, key))
    is_object = all(argument in (NoneType, *expected) for argument in get_args(hint))
    if expected and is_object and not isinstance(value, (NoneType, *expected)):
        raise CheckpointError(f"{key}: {type(value).__name__} where {_names(expected)} is expected; name a class")
    if callable(value) and not isinstance(value, (type, *expected)):
        _refuse_function(value, key)
    if isinstance(value, Mapping):
        parts = {name: _planned(item, hint, callables, f"{key}.{name}") for name, item in value.items()}
        return lambda: {name: part() for name, part in parts.items()}
    return partial(_as_it_is, value)


def _has_fields(kind: type, names: Iterable[str]) -> bool:
    return is_dataclass(kind) and set(names) <= {field.name for field in fields(kind) if field.init}


def _as_it_is(value: Any) -> Any:
    return value


def _classes_in(hint: Any, callables: type | tuple[type, ...]) -> tuple[type, ...]:
    """The classes whose objects a type hint accepts, without plain types and containers."""
    origin = get_origin(hint)
    if Callable in (hint, origin):
        return callables if isinstance(callables, tuple) else (callables,)
    if origin in (type, Literal):
        return ()
    inner = tuple(kind for argument in get_args(hint) for kind in _classes_in(argument, callables))
    kind = hint if origin is None else origin
    is_plain = not isinstance(kind, type) or kind.__module__.partition(".")[0] in sys.stdlib_module_names
    return inner if is_plain else (*inner, kind)


def class_named(path: Any, expected: tuple[type, ...], key: str) -> type:
    """Import the class at this path, if an object of it is expected.

    Raises:
        CheckpointError: If it is not expected, may not be named, or is no class.
    """
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        raise CheckpointError(f"{key}: {path!r} is not a class path; another program has written it")
    if not expected:
        raise CheckpointError(f"{key}: no object is expected here, got one of {path}; leave it out")
    libraries = [package for package in LIBRARIES if any(_is_of(kind.__module__, [package]) for kind in expected)]
    if not _is_of(path, [*OURS, *libraries, *_ALLOWED_PACKAGES]):
        package = path.partition(".")[0]
        raise CheckpointError(f"{key}: {path} may not be named; --allow_class {package} if you trust it")
    kind = _imported(path)
    # a function is refused, because it may do more than make an object
    if not isinstance(kind, type) or not issubclass(kind, expected):
        raise CheckpointError(f"{key}: {path} is no {_names(expected)}; name one")
    if getattr(kind, "runs_code", False) and not _is_of(path, _ALLOWED_PACKAGES):
        what = f"{kind.__name__} runs the code of its file"
        raise CheckpointError(f"{key}: {what}; --allow_class {path.rpartition('.')[0]} if you trust it")
    return kind


def renew_paths(description: Any) -> None:
    """Update a description from an earlier version in place: a class that has moved to another module gets the path
    under which its package exports it."""
    left = [description]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            path = value.get("class_path")
            if isinstance(path, str) and _is_of(path, OURS):
                value["class_path"] = _present_path(path)
            left += value.values()
        elif isinstance(value, list):
            left += value


def _present_path(path: str) -> str:
    *packages, _, name = path.split(".")
    places = (".".join(packages[:end]) for end in range(len(packages), 0, -1))
    return next((new for new in (path, *(f"{place}.{name}" for place in places)) if _imported(new)), path)


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    with suppress(ImportError):
        return vars(importlib.import_module(module)).get(name)
    return None


def _refuse_function(value: Any, key: str) -> None:
    """Refuse a function, which may do anything, unless it is from a package of --allow_class."""
    path = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    if not _is_of(path, _ALLOWED_PACKAGES):
        package = path.partition(".")[0]
        raise CheckpointError(f"{key}: {path} may not be named; --allow_class {package} if you trust it")


def _is_of(path: str, packages: Iterable[str]) -> bool:
    return any(path.startswith(f"{package}.") for package in packages)


def _names(kinds: tuple[type, ...]) -> str:
    return " or ".join(kind.__name__ for kind in kinds)


def _construct(kind: type, plans: Mapping[str, Plan]) -> Any:
    arguments = {name: plan() for name, plan in plans.items()}
    try:
        return kind(**arguments)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, AssertionError) as error:
        message = " ".join(str(error).split())
        raise CheckpointError(f"{kind.__name__} cannot be made: {message}; another version has written it") from error


@contextmanager
def naming(path: str | PathLike) -> Iterator[None]:
    """Prefix errors about the descriptions in a file with the file's path."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def settings_of(hyper_parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A model's settings as plain values by path, for people to read: without the many names of classes."""
    return {path: value for path, value in flatten(dict(hyper_parameters)) if path != "class_names"}


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the plain values of a description with their paths, such as ("encoder.attention.k", 16). The value at the
    path of an object is the name of its class, without the package."""
    if isinstance(value, Mapping) and set(value) == {"class_path", "init_args"}:
        yield key, value["class_path"].rpartition(".")[2]
        value = value["init_args"]
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from flatten(item, f"{key}.{name}".lstrip("."))
    else:
        yield key, value
